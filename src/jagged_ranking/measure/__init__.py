"""Measuring attention and interaction operations over jagged batches: workloads, providers, time,
memory, one table.

from jagged_ranking.measure.benchmark import measure_attention
from jagged_ranking.measure.workload_sets import workloads
table = measure_attention(workloads(), device="cuda", run_id="01_speed")
"""
