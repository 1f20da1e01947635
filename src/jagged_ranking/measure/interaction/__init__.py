"""Measuring the interaction operations: problems, peers, sweeps.

from jagged_ranking.measure.interaction import measure_interaction, token_sweep
table = measure_interaction(["jagged_sum"], token_sweep(), device="cuda", run_id="05")
"""

from jagged_ranking.measure.interaction.batches import token_sweep
from jagged_ranking.measure.interaction.measurement import measure_interaction
from jagged_ranking.measure.interaction.operations import OPERATIONS

__all__ = ["OPERATIONS", "measure_interaction", "token_sweep"]
