"""Measuring the interaction operations: problems, peers, sweeps.

from jagged_ranking.measure import token_sweep
from jagged_ranking.measure.interaction import measure_interaction
table = measure_interaction(["jagged_sum"], token_sweep(), device="cuda", run_id="05")
"""

from jagged_ranking.measure.interaction.catalogue import OPERATIONS
from jagged_ranking.measure.interaction.measurement import measure_interaction

__all__ = ["OPERATIONS", "measure_interaction"]
