"""Jagged attention: specification, backends and schedule.

`api` is the function, `shared_prefix` that with keys that all users share, put together by
`merge_parts`; `reference` is the specification, `native` PyTorch for a CPU; `plain`, `split` and
`hopper` are the Triton backend's kernels, `choice` says which of them take a call, `scores` is what
is done to scores, `retrieval` finds key blocks by their means, `fp8` is for keys in FP8, and
`operators` is all of that registered with PyTorch.
"""

from jagged_kernels.attention.api import jagged_attention
from jagged_kernels.attention.explain import explain_attention
from jagged_kernels.attention.fp8 import FP8Keys, fp8_attention, fp8_keys
from jagged_kernels.attention.scores.bias import ALiBi, RelativePositionBias, RelativeTimeBias
from jagged_kernels.attention.scores.policy import PointwiseScores, Sigmoid, SiLU
from jagged_kernels.attention.shared_prefix import prefix_schedule, prefixed_attention
from jagged_kernels.attention.varlen import jagged_varlen_attention
from jagged_kernels.schedule.schedule import AttentionSchedule, attention_schedule

__all__ = [
    "ALiBi",
    "AttentionSchedule",
    "FP8Keys",
    "PointwiseScores",
    "RelativePositionBias",
    "RelativeTimeBias",
    "SiLU",
    "Sigmoid",
    "attention_schedule",
    "explain_attention",
    "fp8_attention",
    "fp8_keys",
    "jagged_attention",
    "jagged_varlen_attention",
    "prefix_schedule",
    "prefixed_attention",
]
