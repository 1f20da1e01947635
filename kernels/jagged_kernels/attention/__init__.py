"""Jagged attention: specification, backends and schedule.

`api` is the function, `reference` the specification, `native` PyTorch for a CPU; `plain`, `split`
and `hopper` are the Triton backend's kernels, `scores` what is done to scores, and `operators` all
of that registered with PyTorch.
"""

from jagged_kernels.attention.api import jagged_attention
from jagged_kernels.attention.scores.bias import ALiBi, RelativePositionBias, RelativeTimeBias
from jagged_kernels.attention.varlen import jagged_varlen_attention
from jagged_kernels.schedule.schedule import AttentionSchedule, attention_schedule

__all__ = [
    "ALiBi",
    "AttentionSchedule",
    "RelativePositionBias",
    "RelativeTimeBias",
    "attention_schedule",
    "jagged_attention",
    "jagged_varlen_attention",
]
