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
from jagged_kernels.interaction.jagged2 import Jagged2Tensor, jagged2_like
from jagged_kernels.interaction.jagged_jagged_bmm import jagged_jagged_bmm
from jagged_kernels.interaction.jagged_linear import jagged_dense_bmm, jagged_linear
from jagged_kernels.interaction.jagged_outer import jagged2_matmul, jagged_outer
from jagged_kernels.interaction.target_interaction import target_interaction
from jagged_kernels.jagged_tensor import JaggedTensor, lengths_to_offsets

__all__ = [
    "ALiBi",
    "AttentionSchedule",
    "Jagged2Tensor",
    "JaggedTensor",
    "RelativePositionBias",
    "RelativeTimeBias",
    "attention_schedule",
    "jagged2_like",
    "jagged2_matmul",
    "jagged_attention",
    "jagged_dense_bmm",
    "jagged_jagged_bmm",
    "jagged_linear",
    "jagged_outer",
    "lengths_to_offsets",
    "target_interaction",
]
