"""Triton kernels over jagged (variable-length) tensors, with plain PyTorch specifications.

The names below are the public interface; everything else may change.
"""

from jagged_kernels.attention import (
    ALiBi,
    AttentionSchedule,
    RelativePositionBias,
    RelativeTimeBias,
    attention_schedule,
    jagged_attention,
)
from jagged_kernels.jagged_tensor import JaggedTensor, lengths_to_offsets

__all__ = [
    "ALiBi",
    "AttentionSchedule",
    "JaggedTensor",
    "RelativePositionBias",
    "RelativeTimeBias",
    "attention_schedule",
    "jagged_attention",
    "lengths_to_offsets",
]
