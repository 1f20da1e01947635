"""Peers that are measured where somebody installed them: FBGEMM's sll kernels, flash-attn 4,
FlashInfer."""

import importlib
import math
from typing import Any

import torch
from torch import Tensor

from jagged_ranking.measure.providers.base import (
    Prepared,
    Provider,
    Unavailable,
    leaves,
    need_cuda,
    need_half,
)
from jagged_ranking.measure.providers.jagged import (
    as_is,
    like_queries,
    packed_bounds,
    packed_queries,
)
from jagged_ranking.measure.workloads import Batch

FBGEMM_FUNCTION = "multi_head_jagged_flash_attention"
# Of FlashInfer's partial results, as its documentation advises.
FLASHINFER_WORKSPACE = 128 * 2**20
# The function moved between files from release to release.
FBGEMM_MODULES = (
    "fbgemm_gpu.sll.triton.triton_multi_head_jagged_flash_attention",
    "fbgemm_gpu.sll.triton.multi_head_jagged_flash_attention",
    "fbgemm_gpu.sll.triton",
    "fbgemm_gpu.sll.triton_sll",
)


def _prepare_fbgemm(batch: Batch) -> Prepared:
    attention = find(FBGEMM_FUNCTION, FBGEMM_MODULES, "fbgemm_gpu")
    need_cuda(batch.device, "FBGEMM sll")
    if batch.workload.causal:
        raise Unavailable("unsupported", "FBGEMM sll has no causal mask")
    max_len = batch.workload.max_len
    scale = 1.0 / math.sqrt(batch.workload.head_dim)
    # Its kernel computes softmax(q k^T) v / max_seq_len on [H, T, D]: the scale of the scores
    # goes into q beforehand, and results are multiplied by max_seq_len before the comparison.
    q, k, v = leaves(*(x.transpose(0, 1).contiguous() for x in (batch.q * scale, batch.k, batch.v)))
    offsets = batch.offsets.long()
    return Prepared(
        forward=lambda: attention(q, k, v, offsets, max_len, True),
        inputs=(q, k, v),
        grad_output=batch.dout.transpose(0, 1).contiguous(),
        to_tokens=lambda batch, values: values.transpose(0, 1),
        held=(offsets,),
        corrections=(max_len, max_len * scale, max_len, max_len),
    )


def _prepare_flash_attn_4(batch: Batch) -> Prepared:
    attention = find("flash_attn_varlen_func", ("flash_attn.cute",), "flash_attn.cute")
    need_cuda(batch.device, "flash-attn 4")
    need_half(batch.q.dtype, "flash-attn 4")
    if torch.cuda.get_device_capability(batch.device)[0] < 9:
        raise Unavailable("unsupported", "flash-attn 4 needs compute capability 9.0 or newer")
    q, k, v = leaves(packed_queries(batch, batch.q), batch.k, batch.v)
    offsets, causal = batch.offsets, batch.workload.causal
    query_offsets, most_queries, longest = packed_bounds(batch)

    def forward() -> Tensor:
        result = attention(
            q,
            k,
            v,
            cu_seqlens_q=query_offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=most_queries,
            max_seqlen_k=longest,
            causal=causal,
        )
        # Releases differ in whether the log-sum-exp comes along.
        return result[0] if isinstance(result, tuple) else result

    return Prepared(
        forward=forward,
        inputs=(q, k, v),
        grad_output=packed_queries(batch, batch.dout),
        to_tokens=as_is,
        to_queries=like_queries,
        held=(offsets, query_offsets),
    )


def _prepare_flashinfer(batch: Batch) -> Prepared:
    make = find("BatchPrefillWithRaggedKVCacheWrapper", ("flashinfer",), "flashinfer")
    need_cuda(batch.device, "FlashInfer")
    need_half(batch.q.dtype, "FlashInfer")
    w = batch.workload
    q, k, v = leaves(packed_queries(batch, batch.q), batch.k, batch.v)
    query_offsets, _, _ = packed_bounds(batch)
    workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=batch.device)
    # Its kernels for Hopper alone do not cut histories.
    wrapper = make(workspace, "NHD", backend="fa2")

    def plan() -> None:
        wrapper.plan(
            query_offsets,
            batch.offsets,
            w.heads,
            w.heads,
            w.head_dim,
            causal=w.causal,
            q_data_type=batch.q.dtype,
        )

    plan()
    return Prepared(
        forward=lambda: wrapper.run(q, k, v),
        inputs=(q, k, v),
        grad_output=packed_queries(batch, batch.dout),
        to_tokens=as_is,
        to_queries=like_queries,
        held=(batch.offsets, query_offsets, workspace),
        builds={"plan": plan},
    )


def find(function: str, modules: tuple[str, ...], package: str) -> Any:
    """The function, from the first module that has it; raises Unavailable."""
    problem = f"{package} is not installed"
    for module in modules:
        try:
            return getattr(importlib.import_module(module), function)
        except Exception as error:  # a broken installation is as good as none
            if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
                continue  # this module is missing, not one that it needs
            problem = f"{module} cannot be used: {type(error).__name__}: {error}"
    raise Unavailable("missing", problem)


FBGEMM_SLL = Provider(
    name="fbgemm_sll",
    description="fbgemm_gpu.sll multi_head_jagged_flash_attention (Triton). It divides by "
    "max_seq_len and has no 1/sqrt(D); both are undone outside of the timed region",
    prepare=_prepare_fbgemm,
)
FLASH_ATTN_4 = Provider(
    name="flash_attn_4",
    description="flash_attn.cute flash_attn_varlen_func (FlashAttention-4, CuTe DSL)",
    prepare=_prepare_flash_attn_4,
    dense_queries=True,
)
FLASHINFER = Provider(
    name="flashinfer",
    description="flashinfer BatchPrefillWithRaggedKVCacheWrapper, which cuts histories; its plan, "
    "made on the host, is built beforehand",
    prepare=_prepare_flashinfer,
    dense_queries=True,
    forward_only=True,
)
