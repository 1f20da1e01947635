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
from jagged_kernels.interaction.cat import jagged_cat
from jagged_kernels.interaction.embedding import jagged_embedding
from jagged_kernels.interaction.index_select import jagged_index_select
from jagged_kernels.interaction.jagged2 import Jagged2Tensor, jagged2_like
from jagged_kernels.interaction.jagged2_padded import jagged2_to_padded
from jagged_kernels.interaction.padded import from_padded, to_padded
from jagged_kernels.interaction.slice import jagged_recent, jagged_slice
from jagged_kernels.interaction.top_k import jagged_top_k
from jagged_kernels.interaction.unique import jagged_unique
from jagged_kernels.jagged_tensor import JaggedTensor, lengths_to_offsets

__all__ = [
    "ALiBi",
    "AttentionSchedule",
    "Jagged2Tensor",
    "JaggedTensor",
    "RelativePositionBias",
    "RelativeTimeBias",
    "attention_schedule",
    "from_padded",
    "jagged2_like",
    "jagged2_to_padded",
    "jagged_attention",
    "jagged_cat",
    "jagged_embedding",
    "jagged_index_select",
    "jagged_recent",
    "jagged_slice",
    "jagged_top_k",
    "jagged_unique",
    "lengths_to_offsets",
    "to_padded",
]
