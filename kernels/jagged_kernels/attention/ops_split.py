"""Attention over rows that a partition cuts, as operators: few dense queries, long histories."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_kernels.attention.ops import LIBRARY, define_op, empty_output
from jagged_kernels.attention.partition import Partition


def _attention_split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    rows_t: Tensor,
    spans: Tensor,
    spans_t: Tensor,
    block: int,
    block_t: int,
    tile_q: int,
    tile_k: int,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(o [Tq, H, Dv], lse2 [Tq, H]); `spans` and `block` are the forward's `Partition`."""
    from jagged_kernels.attention.triton_split_forward import launch_split_forward

    partition = Partition(spans, block, cuts=True)
    return launch_split_forward(
        q, k, v, rows, partition, tile_q=tile_q, left=left, right=right, scale=scale
    )


def _attention_split_backward(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor,
    rows: Tensor,
    rows_t: Tensor,
    spans_t: Tensor,
    block_t: int,
    tile_q: int,
    tile_k: int,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the dtypes and shapes of q, k, v."""
    from jagged_kernels.attention.triton_split_backward import launch_split_backward

    return launch_split_backward(
        d_o,
        d_lse2,
        q,
        k,
        v,
        o,
        lse2,
        rows,
        Partition(spans_t, block_t, cuts=True),
        # Every user has queries: without a window, every key is seen.
        rows_t=None if left == right == -1 else rows_t,
        tile_q=tile_q,
        tile_k=tile_k,
        left=left,
        right=right,
        scale=scale,
    )


attention_split = define_op(_attention_split)
attention_split_backward = define_op(_attention_split_backward)


@torch.library.register_fake("jagged_kernels::attention_split")
def _(q, k, v, *rest):
    return empty_output(q, v)


@torch.library.register_fake("jagged_kernels::attention_split_backward")
def _(d_o, d_lse2, q, k, v, *rest):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _SplitAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            output = attention_split(*inputs)
        q, k, v, rows, rows_t, _, spans_t, _, *ctx.numbers = inputs
        ctx.save_for_backward(q, k, v, *output, rows, rows_t, spans_t)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_lse2: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        unused = (None,) * 11
        if d_o is None and d_lse2 is None:
            return (None, None, None, *unused)
        q, k, v, o, lse2, *tables = ctx.saved_tensors
        d_o = torch.zeros_like(o) if d_o is None else d_o
        gradients = attention_split_backward(d_o, d_lse2, q, k, v, o, lse2, *tables, *ctx.numbers)
        return (*gradients, *unused)


LIBRARY.impl("attention_split", lambda *inputs: _SplitAttention.apply(*inputs), "Autograd")
