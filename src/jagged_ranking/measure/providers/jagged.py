"""Providers that read jagged tensors: ours, and those that come with PyTorch."""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from jagged_kernels import JaggedTensor, attention_schedule, jagged_attention
from jagged_ranking.measure.providers.base import (
    Prepared,
    Provider,
    Unavailable,
    leaves,
    need_cuda,
    need_half,
)
from jagged_ranking.measure.providers.block_mask import document_block_mask
from jagged_ranking.measure.workloads import Batch


def as_is(batch: Batch, values: Tensor) -> Tensor:
    """The layout is [T, H, D] already."""
    return values


def _prepare_ours(batch: Batch) -> Prepared:
    q, k, v = leaves(batch.q, batch.k, batch.v)
    causal = batch.workload.causal
    histories = JaggedTensor(q, batch.offsets)
    jagged = (histories, histories.with_values(k), histories.with_values(v))
    if batch.device.type != "cuda":
        return Prepared(
            forward=lambda: jagged_attention(*jagged, causal=causal).values,
            inputs=(q, k, v),
            grad_output=batch.dout,
            to_tokens=as_is,
            held=(batch.offsets,),
            config={"backend": "native"},
        )

    build = functools.partial(
        attention_schedule, histories, causal=causal, head_dim=batch.workload.head_dim
    )
    schedule = build()
    return Prepared(
        forward=lambda: jagged_attention(*jagged, causal=causal, schedule=schedule).values,
        inputs=(q, k, v),
        grad_output=batch.dout,
        to_tokens=as_is,
        held=(batch.offsets, schedule.rows, schedule.rows_t),
        builds={"schedule": build},
        config={"backend": "triton", "tile_q": schedule.tile_q, "tile_k": schedule.tile_k},
    )


def _prepare_njt(batch: Batch) -> Prepared:
    longest, shortest = int(batch.lengths.max()), int(batch.lengths.min())
    # int64: the nested jagged layout compares its offsets by identity, so all share this one.
    offsets = batch.offsets.long()

    def nest(values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(
            values.detach(), offsets, min_seqlen=shortest, max_seqlen=longest
        )

    q, k, v = leaves(nest(batch.q), nest(batch.k), nest(batch.v))
    causal = batch.workload.causal

    def forward() -> Tensor:
        out = scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal
        )
        return out.transpose(1, 2)

    return Prepared(
        forward=forward,
        inputs=(q, k, v),
        grad_output=nest(batch.dout),
        to_tokens=lambda batch, nested: nested.values(),
        held=(offsets,),
    )


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # One compilation for each shape, as the fastest static code; a silent fall-back to eager
    # after the default of eight would materialise [T, T] scores.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    limit = torch._dynamo.config.accumulated_recompile_limit
    torch._dynamo.config.accumulated_recompile_limit = max(limit, 1024)
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def _prepare_flex(batch: Batch) -> Prepared:
    need_cuda(batch, "compiled FlexAttention, as measured here,")
    if batch.workload.head_dim < 16:
        raise Unavailable("unsupported", "FlexAttention has head_dim >= 16")
    flex = _compiled_flex()
    tokens, causal = batch.q.shape[0], batch.workload.causal
    build = functools.partial(document_block_mask, batch.offsets, tokens=tokens, causal=causal)
    block_mask = build()
    # One sequence of T tokens: [1, H, T, D] views of the token layout.
    q, k, v = leaves(batch.q, batch.k, batch.v)

    def forward() -> Tensor:
        views = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = flex(*views, block_mask=block_mask)
        return out[0].transpose(0, 1)

    return Prepared(
        forward=forward,
        inputs=(q, k, v),
        grad_output=batch.dout,
        to_tokens=as_is,
        held=(block_mask.kv_num_blocks, block_mask.kv_indices),
        builds={"block_mask": build},
    )


def _prepare_varlen(batch: Batch) -> Prepared:
    need_cuda(batch, "varlen_attn")
    need_half(batch, "varlen_attn")
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        message = f"torch {torch.__version__} has no torch.nn.attention.varlen"
        raise Unavailable("missing", message) from None
    if batch.workload.head_dim > 256:
        raise Unavailable("unsupported", "varlen_attn has head_dim <= 256")
    q, k, v = leaves(batch.q, batch.k, batch.v)
    offsets, longest = batch.offsets, int(batch.lengths.max())
    mask: dict[str, Any] = {}
    if batch.workload.causal:
        # The name of the option changed between releases.
        windowed = "window_size" in inspect.signature(varlen_attn).parameters
        mask = {"window_size": (-1, 0)} if windowed else {"is_causal": True}

    def forward() -> Tensor:
        out = varlen_attn(q, k, v, offsets, offsets, longest, longest, **mask)
        assert isinstance(out, Tensor)  # a tuple only if the log-sum-exp was asked for
        return out

    return Prepared(
        forward=forward,
        inputs=(q, k, v),
        grad_output=batch.dout,
        to_tokens=as_is,
        held=(offsets,),
    )


JAGGED = Provider(
    name="jagged",
    description="ours: jagged_attention, the schedule of the batch handed along",
    prepare=_prepare_ours,
)
NJT_SDPA = Provider(
    name="njt_sdpa",
    description="torch.nested (jagged layout) and SDPA",
    prepare=_prepare_njt,
)
FLEX = Provider(
    name="flex",
    description="FlexAttention, compiled for the exact shape, document mask, block mask built "
    "beforehand",
    prepare=_prepare_flex,
)
VARLEN_ATTN = Provider(
    name="varlen_attn",
    description="torch.nn.attention.varlen.varlen_attn (FlashAttention-2)",
    prepare=_prepare_varlen,
)
