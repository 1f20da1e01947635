"""Measuring attention over jagged batches: workloads, providers, time, memory, one table.

from jagged_ranking.measure import measure_attention, workloads
table = measure_attention(workloads(), device="cuda", run_id="01_speed")
"""

from jagged_ranking.measure.benchmark import measure_attention
from jagged_ranking.measure.providers import PROVIDERS, default_providers
from jagged_ranking.measure.timing import Effort
from jagged_ranking.measure.workloads import (
    Workload,
    length_sweep,
    small_workloads,
    waste_sweep,
    with_options,
    workloads,
)

__all__ = [
    "PROVIDERS",
    "Effort",
    "Workload",
    "default_providers",
    "length_sweep",
    "measure_attention",
    "small_workloads",
    "waste_sweep",
    "with_options",
    "workloads",
]
