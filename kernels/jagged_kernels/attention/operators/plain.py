"""Plain attention's Triton kernels as operators; other ways to compute it are in `ops_*.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.attention.choice import (
    HOPPER_DKV,
    HOPPER_FORWARD,
    HOPPER_ONE_PASS,
    SHORT,
    pick,
)
from jagged_kernels.attention.flops import backward_flops, forward_flops, pairs_of_rows
from jagged_kernels.core.flops import define_flops
from jagged_kernels.core.operators import call, define_gradient, define_op


def empty_output(
    q: Tensor, k: Tensor, v: Tensor, with_lse: bool, *rest: Any
) -> tuple[Tensor, Tensor]:
    """o and lse2 of the Triton kernels; of the latter nothing if it is not wanted."""
    return q.new_empty((*q.shape[:2], v.shape[2])), given_lse(
        q.new_empty(q.shape[:2], dtype=torch.float32) if with_lse else None, q
    )


def given_lse(lse2: Tensor | None, q: Tensor) -> Tensor:
    """An operator's second output must be a tensor."""
    return q.new_empty(0, dtype=torch.float32) if lse2 is None else lse2


def empty_gradients(
    d_o: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def output_gradients(
    d_o: Tensor | None, d_lse: Tensor | None, o: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor | None]:
    """What a backward takes for the gradients of o and lse.

    A query that sees no key has a constant lse of -inf, whose gradient reaches nothing. Often it is
    NaN (that of `torch.where(lse.isinf(), 0, lse.square())` is), and 0 * NaN would spread.
    """
    d_o = torch.zeros_like(o) if d_o is None else d_o
    return d_o, None if d_lse is None else d_lse.masked_fill(lse == -math.inf, 0.0)


def _attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    with_lse: bool,
    rows: Tensor,
    rows_t: Tensor,
    tile_q: int,
    tile_k: int,
    left: int,
    right: int,
    scale: float,
    offsets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(o [Tq, H, Dv], lse2 [Tq, H], or [0] without) for the rows of an `AttentionSchedule`.

    `offsets` are those of queries and keys alike, None if each have their own.

    lse2 is log2 of the sum of exponentials: the kernels work in base 2, and a backward from a
    natural logarithm would round twice more.
    """
    band = {"left": left, "right": right, "scale": scale}
    family = pick("forward", q, k, v, rows, tile_q, tile_k, offsets, left=left, right=right)
    if family is HOPPER_FORWARD:
        from jagged_kernels.attention.hopper import forward as gluon_forward

        o, lse2 = gluon_forward.launch_forward(q, k, v, rows, **band, with_lse=with_lse)
    else:
        from jagged_kernels.attention.plain.forward import launch_forward

        short = offsets if family is SHORT else None
        options = {"with_lse": with_lse, "short_offsets": short}
        o, lse2 = launch_forward(q, k, v, rows, tile_q=tile_q, **band, **options)
    return o, given_lse(lse2, q)


def _attention_triton_backward(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor,
    rows: Tensor,
    rows_t: Tensor,
    tile_q: int,
    tile_k: int,
    left: int,
    right: int,
    scale: float,
    offsets: Tensor | None,
    wanted_kv: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the dtypes and shapes of q, k, v; dk and dv [0] if they are not wanted."""
    band = {"left": left, "right": right, "scale": scale}
    inputs = (d_o, d_lse2, q, k, v, o, lse2, rows, rows_t)
    family = pick("dkv", q, k, v, rows, tile_q, tile_k, offsets, left=left, right=right)
    if family in (HOPPER_ONE_PASS, HOPPER_DKV):
        from jagged_kernels.attention.hopper import backward as gluon_backward

        if family is HOPPER_ONE_PASS and wanted_kv:
            assert offsets is not None
            return gluon_backward.launch_backward_in_one_pass(*inputs, offsets, **band)
        return gluon_backward.launch_backward(*inputs, **band, wanted_kv=wanted_kv)
    from jagged_kernels.attention.plain.backward import launch_backward

    short = offsets if family is SHORT else None
    return launch_backward(
        *inputs, tile_q=tile_q, tile_k=tile_k, **band, wanted_kv=wanted_kv, short_offsets=short
    )


def _empty_backward(
    d_o: Tensor, d_lse2: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    *_, wanted_kv = rest
    dq, dk, dv = empty_gradients(d_o, d_lse2, q, k, v)
    return (dq, dk, dv) if wanted_kv else (dq, k.new_empty(0), v.new_empty(0))


attention_triton = define_op(_attention_triton, fake=empty_output)
attention_triton_backward = define_op(_attention_triton_backward, fake=_empty_backward)


def save_with_lse(inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    """(q, k, v, o, lse2, what follows with_lse)."""
    q, k, v, with_lse, *rest = inputs
    assert with_lse, "a gradient needs lse"
    return (q, k, v, *output, *rest)


def _gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_o: Tensor | None, d_lse2: Tensor | None
) -> tuple[Tensor | None, ...]:
    wanted_kv = wanted[1] or wanted[2]
    of_outputs = output_gradients(d_o, d_lse2, *saved[3:5])
    dq, dk, dv = call(attention_triton_backward, *of_outputs, *saved, wanted_kv)
    return (dq, dk, dv) if wanted_kv else (dq, None, None)


define_gradient(attention_triton, save=save_with_lse, gradient=_gradient)


def triton_flops(
    q: Tensor, k: Tensor, v: Tensor, with_lse: bool, rows: Tensor, rows_t: Tensor,
    tile_q: int, tile_k: int, left: int, right: int, *rest: Any,
) -> Any:  # fmt: skip
    return forward_flops(q, v, pairs_of_rows(q, k, rows, rows_t, tile_k, left, right))


def _backward_flops(
    d_o: Tensor, d_lse2: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse2: Tensor,
    rows: Tensor, rows_t: Tensor, tile_q: int, tile_k: int, left: int, right: int, *rest: Any,
) -> Any:  # fmt: skip
    pairs = pairs_of_rows(q, k, rows, rows_t, tile_k, left, right)
    return backward_flops(q, v, pairs, wanted_kv=rest[-1])


define_flops(attention_triton, triton_flops)
define_flops(attention_triton_backward, _backward_flops)
