"""Attention over rows that a partition cuts, as operators: few dense queries, long histories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from jagged_kernels.attention.flops import backward_flops, forward_flops, pairs_of_rows
from jagged_kernels.attention.operators.plain import (
    empty_gradients,
    empty_output,
    given_lse,
    output_gradients,
    save_with_lse,
)
from jagged_kernels.core.flops import define_flops
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.schedule.spans import Partition


def _attention_split(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    with_lse: bool,
    spans: Tensor,
    block: int,
    rows: Tensor,
    rows_t: Tensor,
    spans_t: Tensor,
    block_t: int,
    tile_q: int,
    tile_k: int,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(o [Tq, H, Dv], lse2 [Tq, H], or [0] without); `spans`, `block`: the forward's partition."""
    from jagged_kernels.attention.split.forward import launch_split_forward

    mask = {"tile_q": tile_q, "left": left, "right": right, "scale": scale}
    partition = Partition(spans, block, cuts=True)
    o, lse2 = launch_split_forward(q, k, v, rows, partition, **mask, with_lse=with_lse)
    return o, given_lse(lse2, q)


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
    from jagged_kernels.attention.split.backward import launch_split_backward

    # Every user has queries: without a window, every key is seen.
    all_seen = left == right == -1
    mask = {"tile_q": tile_q, "tile_k": tile_k, "left": left, "right": right, "scale": scale}
    return launch_split_backward(
        d_o, d_lse2, q, k, v, o, lse2, rows, Partition(spans_t, block_t, cuts=True),
        rows_t=None if all_seen else rows_t, **mask,
    )  # fmt: skip


attention_split = define_op(_attention_split, fake=empty_output)
attention_split_backward = define_op(_attention_split_backward, fake=empty_gradients)


def _save(inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    q, k, v, o, lse2, _spans, _block, *rest = save_with_lse(inputs, output)
    return (q, k, v, o, lse2, *rest)


def _gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_o: Tensor | None, d_lse2: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return call(attention_split_backward, *output_gradients(d_o, d_lse2, *saved[3:5]), *saved)


define_gradient(attention_split, save=_save, gradient=_gradient)


def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, with_lse: bool, spans: Tensor, block: int,
    rows: Tensor, rows_t: Tensor, spans_t: Tensor, block_t: int,
    tile_q: int, tile_k: int, left: int, right: int, scale: float,
) -> Any:  # fmt: skip
    return forward_flops(q, v, pairs_of_rows(q, k, rows, rows_t, tile_k, left, right))


def _backward_flops(
    d_o: Tensor, d_lse2: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse2: Tensor,
    rows: Tensor, rows_t: Tensor, spans_t: Tensor, block_t: int,
    tile_q: int, tile_k: int, left: int, right: int, scale: float,
) -> Any:  # fmt: skip
    return backward_flops(q, v, pairs_of_rows(q, k, rows, rows_t, tile_k, left, right))


define_flops(attention_split, _forward_flops)
define_flops(attention_split_backward, _backward_flops)
