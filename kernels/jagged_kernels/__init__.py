"""Triton kernels over jagged (variable-length) tensors, with plain PyTorch specifications.

The names below are the public interface; everything else may change. Results are in the dtype of
the inputs. Examples need `import torch` and `from jagged_kernels import *`.

- Tensors: `JaggedTensor`, `Jagged2Tensor`, `lengths_to_offsets`, `jagged_collate`, `jagged2_like`,
  `to_padded`, `from_padded`, `jagged2_to_padded`, `from_torchrec`, `to_torchrec`,
  `from_list_column`, `to_list_column`
- Attention: `jagged_attention`, `jagged_varlen_attention`, `prefixed_attention`,
  `attention_schedule`, `prefix_schedule`, `AttentionSchedule`, `explain_attention`,
  `RelativePositionBias`, `RelativeTimeBias`, `ALiBi`
- Attention in FP8: `fp8_keys`, `FP8Keys`, `fp8_attention`
- What a score becomes: `SiLU`, `Sigmoid`, `PointwiseScores`
- Which keys: `StridedKeys`, `SemiLocalKeys`, `RequestKeys`, `KeyLists`, `retrieved_blocks`,
  `block_means`
- Caches: `HistoryCache`, `cached_attention`, `cache_schedule`, `CacheSchedule`, `key_statistics`,
  `KeyStatistics`, `scissorhands`, `persistence_ratio`, `Persistence`
- Products: `jagged_dense_bmm`, `jagged_linear`, `jagged_jagged_bmm`, `jagged_outer`,
  `jagged2_matmul`, `target_interaction`
- Pooling: `jagged_sum`, `jagged_mean`, `jagged_max`, `jagged_weighted_sum`, `jagged_last_k`
- Softmax and normalisation: `jagged_softmax`, `jagged2_softmax`, `jagged_layer_norm`,
  `jagged_rms_norm`
- Token by token: `jagged_add`, `jagged_mul`, `jagged2_mul`, `jagged_self_difference`,
  `jagged_embedding`
- Selection: `jagged_cat`, `jagged_slice`, `jagged_recent`, `jagged_index_select`, `jagged_top_k`,
  `jagged_unique`
- Modules: `JaggedMultiheadAttention`, `JaggedLayerNorm`, `JaggedRMSNorm`
- CUDA graphs: `StepGraphs`

Contents are not read where that would wait for a GPU, unless JAGGED_CHECK=1 is in the environment
when Python starts: then attention reads those of offsets and schedules in each call, and whatever
else is checked on a CPU is checked on a GPU too.

Under `torch.autocast`, attention and matrix products (`jagged_attention`, `prefixed_attention`,
`jagged_linear`, `jagged_dense_bmm`, `jagged_jagged_bmm`, `target_interaction`, `jagged_outer`,
`jagged2_matmul`) do as PyTorch's own: all their floating inputs but float64 are cast to its dtype,
so that dtypes may be mixed, and each gradient has the dtype of its input. Every other operation
computes as without.

Gradients are of first order, by `torch.autograd`: where the derivative of a gradient would be
needed, operators raise (backend="reference" has it), as in forward mode and for `torch.func.grad`.
Under `torch.func.vmap`, and for batched gradients, an operator runs once for each part of a batch.
For tensors on "meta" operations give shapes, and raise where a shape depends on contents.
"""

from jagged_kernels.attention import (
    ALiBi,
    AttentionSchedule,
    FP8Keys,
    PointwiseScores,
    RelativePositionBias,
    RelativeTimeBias,
    Sigmoid,
    SiLU,
    attention_schedule,
    explain_attention,
    fp8_attention,
    fp8_keys,
    jagged_attention,
    jagged_varlen_attention,
    prefix_schedule,
    prefixed_attention,
)
from jagged_kernels.attention.retrieval.block_means import block_means
from jagged_kernels.attention.retrieval.retrieval import retrieved_blocks
from jagged_kernels.cache import (
    CacheSchedule,
    HistoryCache,
    KeyStatistics,
    Persistence,
    cache_schedule,
    cached_attention,
    key_statistics,
    persistence_ratio,
    scissorhands,
)
from jagged_kernels.graphs import StepGraphs
from jagged_kernels.modules import JaggedLayerNorm, JaggedMultiheadAttention, JaggedRMSNorm
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
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.rules import RequestKeys, SemiLocalKeys, StridedKeys
from jagged_kernels.tensors.collate import jagged_collate
from jagged_kernels.tensors.columns import from_list_column, to_list_column
from jagged_kernels.tensors.container import rebuilt as rebuilt
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.jagged2 import Jagged2Tensor, jagged2_like
from jagged_kernels.tensors.offsets import lengths_to_offsets
from jagged_kernels.tensors.torchrec import (
    from_torchrec,
    to_torchrec,
)

# By topic: the order of the reference.
__all__ = [  # noqa: RUF022
    "JaggedTensor",
    "Jagged2Tensor",
    "lengths_to_offsets",
    "jagged_collate",
    "jagged2_like",
    "to_padded",
    "from_padded",
    "jagged2_to_padded",
    "from_torchrec",
    "to_torchrec",
    "from_list_column",
    "to_list_column",
    "jagged_attention",
    "jagged_varlen_attention",
    "prefixed_attention",
    "attention_schedule",
    "prefix_schedule",
    "AttentionSchedule",
    "explain_attention",
    "RelativePositionBias",
    "RelativeTimeBias",
    "ALiBi",
    "fp8_keys",
    "FP8Keys",
    "fp8_attention",
    "SiLU",
    "Sigmoid",
    "PointwiseScores",
    "StridedKeys",
    "SemiLocalKeys",
    "RequestKeys",
    "KeyLists",
    "retrieved_blocks",
    "block_means",
    "HistoryCache",
    "cached_attention",
    "cache_schedule",
    "CacheSchedule",
    "key_statistics",
    "KeyStatistics",
    "scissorhands",
    "persistence_ratio",
    "Persistence",
    "jagged_dense_bmm",
    "jagged_linear",
    "jagged_jagged_bmm",
    "jagged_outer",
    "jagged2_matmul",
    "target_interaction",
    "jagged_sum",
    "jagged_mean",
    "jagged_max",
    "jagged_weighted_sum",
    "jagged_last_k",
    "jagged_softmax",
    "jagged2_softmax",
    "jagged_layer_norm",
    "jagged_rms_norm",
    "jagged_add",
    "jagged_mul",
    "jagged2_mul",
    "jagged_self_difference",
    "jagged_embedding",
    "jagged_cat",
    "jagged_slice",
    "jagged_recent",
    "jagged_index_select",
    "jagged_top_k",
    "jagged_unique",
    "JaggedMultiheadAttention",
    "JaggedLayerNorm",
    "JaggedRMSNorm",
    "StepGraphs",
]

__version__ = "0.1.0"
