"""Measuring the interaction operations: what they are, problems, peers.

from jagged_ranking.measure.interaction.measurement import measure_interaction
from jagged_ranking.measure.workload_sets import token_sweep
table = measure_interaction(["jagged_sum"], token_sweep(), device="cuda", run_id="05")
"""
