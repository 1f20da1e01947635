"""Measuring attention over jagged batches: workloads, providers, time, memory, one table.

from jagged_ranking.measure import measure_attention, workloads
table = measure_attention(workloads(), device="cuda", run_id="01_speed")
"""

from jagged_ranking.measure.benchmark import measure_attention
from jagged_ranking.measure.providers import PROVIDERS, default_providers
from jagged_ranking.measure.timing import Effort
from jagged_ranking.measure.workload_sets import (
    head_dim_sweep,
    length_sweep,
    skew_sweep,
    small_target_workloads,
    small_workloads,
    target_workloads,
    token_sweep,
    waste_sweep,
    with_options,
    workloads,
)
from jagged_ranking.measure.workloads import Workload

__all__ = [
    "PROVIDERS",
    "Effort",
    "Workload",
    "default_providers",
    "head_dim_sweep",
    "length_sweep",
    "measure_attention",
    "skew_sweep",
    "small_target_workloads",
    "small_workloads",
    "target_workloads",
    "token_sweep",
    "waste_sweep",
    "with_options",
    "workloads",
]
