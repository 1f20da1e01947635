"""Triton kernels over jagged (variable-length) tensors, with plain PyTorch specifications.

The names below are the public interface; everything else may change. Results are in the dtype of
the inputs, and computed as if there were no autocast: cast inputs yourself.
"""

from jagged_kernels.attention import (
    ALiBi,
    AttentionSchedule,
    RelativePositionBias,
    RelativeTimeBias,
    attention_schedule,
    jagged_attention,
)
from jagged_kernels.ops.elementwise.elementwise import jagged_add, jagged_mul
from jagged_kernels.ops.elementwise.jagged2_mul import jagged2_mul
from jagged_kernels.ops.elementwise.self_difference import jagged_self_difference
from jagged_kernels.ops.ids.embedding import jagged_embedding
from jagged_kernels.ops.ids.top_k import jagged_top_k
from jagged_kernels.ops.ids.unique import jagged_unique
from jagged_kernels.ops.layout.cat import jagged_cat
from jagged_kernels.ops.layout.index_select import jagged_index_select
from jagged_kernels.ops.layout.jagged2_padded import jagged2_to_padded
from jagged_kernels.ops.layout.last_k import jagged_last_k
from jagged_kernels.ops.layout.padded import from_padded, to_padded
from jagged_kernels.ops.layout.slice import jagged_recent, jagged_slice
from jagged_kernels.ops.normalise.norm import jagged_layer_norm, jagged_rms_norm
from jagged_kernels.ops.normalise.softmax import jagged2_softmax, jagged_softmax
from jagged_kernels.ops.pooling.pooling import jagged_max, jagged_mean, jagged_sum
from jagged_kernels.ops.pooling.weighted_sum import jagged_weighted_sum
from jagged_kernels.ops.products.jagged_jagged_bmm import jagged_jagged_bmm
from jagged_kernels.ops.products.jagged_linear import jagged_dense_bmm, jagged_linear
from jagged_kernels.ops.products.jagged_outer import jagged2_matmul, jagged_outer
from jagged_kernels.ops.products.target_interaction import target_interaction
from jagged_kernels.tensors.jagged import JaggedTensor, lengths_to_offsets
from jagged_kernels.tensors.jagged2 import Jagged2Tensor, jagged2_like

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
    "jagged2_matmul",
    "jagged2_mul",
    "jagged2_softmax",
    "jagged2_to_padded",
    "jagged_add",
    "jagged_attention",
    "jagged_cat",
    "jagged_dense_bmm",
    "jagged_embedding",
    "jagged_index_select",
    "jagged_jagged_bmm",
    "jagged_last_k",
    "jagged_layer_norm",
    "jagged_linear",
    "jagged_max",
    "jagged_mean",
    "jagged_mul",
    "jagged_outer",
    "jagged_recent",
    "jagged_rms_norm",
    "jagged_self_difference",
    "jagged_slice",
    "jagged_softmax",
    "jagged_sum",
    "jagged_top_k",
    "jagged_unique",
    "jagged_weighted_sum",
    "lengths_to_offsets",
    "target_interaction",
    "to_padded",
]
