"""Triton kernels over jagged (variable-length) tensors, with plain PyTorch specifications.

The names below are the public interface; everything else may change.
"""

from jagged_kernels.attention import AttentionSchedule, attention_schedule, jagged_attention
from jagged_kernels.jagged_tensor import JaggedTensor, lengths_to_offsets

__all__ = [
    "AttentionSchedule",
    "JaggedTensor",
    "attention_schedule",
    "jagged_attention",
    "lengths_to_offsets",
]
