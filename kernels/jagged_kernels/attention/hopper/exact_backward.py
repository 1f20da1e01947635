"""Gradients that were touched by what the mask hides, a second time (see `triton_seen`).

As `hopper.exact` does it for the forward, but without marks, for which the Gluon kernels have no
registers left: where the sum of a gradient's dims is not finite, they make all of them NaN. One
small launch looks at the first of the dims, after both passes. What it computes is what
`plain.backward` computes on its second walk.
"""

# Triton's jit is not typed.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.hopper.exact import is_marked
from jagged_kernels.attention.plain.backward import dkv_walk, dq_walk
from jagged_kernels.attention.plans import PLANS, Call, scale_argument
from jagged_kernels.attention.scores.bias_launch import NO_BIAS
from jagged_kernels.attention.triton_seen import SEEN_BLOCK
from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import cdiv
from jagged_kernels.device.memory import load_block, load_numbers, store_block
from jagged_kernels.schedule.row_access import load_row
from jagged_kernels.schedule.row_layout import ROW_WIDTH

_ROW_WIDTH = tl.constexpr(ROW_WIDTH)
# Parts of tiles that a program looks at.
_PLACES = tl.constexpr(16)


def launch_exact_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse2: Tensor,
    delta: Tensor,
    dq: Tensor | None,
    dkv: tuple[Tensor, Tensor] | None,
    rows: Tensor,
    rows_t: Tensor,
    call: Call,
    *,
    tile: int,
    part_q: int,
    part_k: int,
    left: int,
    right: int,
) -> None:
    """Overwrites dq of `part_q` queries of a row's tile where one of theirs begins with NaN, and
    dk and dv of `part_k` keys where one of these does.

    Args:
        d_o, q, k, v: `rows_of_dims`.
        delta: [Tq, H] float32, of `launch_dq`.
        dq, dkv: None for what is not to be looked at.
        rows, rows_t: of tiles of `tile` tokens, which holds one or more parts.
        call: of q, k, v and d_o.
    """
    parts = 0 if dq is None else tile // part_q
    parts_t = 0 if dkv is None else tile // part_k
    scale_log2, constants = _constants(call, part_q, part_k, parts, parts_t)
    places = rows.shape[0] * parts * q.shape[1]
    places_t = rows_t.shape[0] * parts_t * k.shape[1]
    at_once = _PLACES.value
    launch(
        _exact_backward_kernel,
        cdiv(places, at_once) + cdiv(places_t, at_once),
        (
            q, k, v, d_o, lse2, delta, dq, *(dkv or (None, None)), rows, rows_t, places, places_t,
            call.scale, scale_log2, left, right,
        ),
        constants,
        num_warps=4,
        num_stages=1,
    )  # fmt: skip


@lru_cache(PLANS)
def _constants(
    call: Call, part_q: int, part_k: int, parts: int, parts_t: int
) -> tuple[float, dict[str, Any]]:
    """(scale in base 2, the kernel's compile-time parameters)."""
    scale_log2, negate = scale_argument(call.scale)
    block = SEEN_BLOCK.value
    return scale_log2, {
        "S": call.shape(tile=part_q, block=block),
        "T": call.mirrored.shape(tile=part_k, block=block),
        "PARTS": parts,
        "PARTS_T": parts_t,
        "NEGATE": negate,
        "BIAS": NO_BIAS["BIAS"],
    }


@triton.jit(do_not_specialize=["places", "places_t", "left", "right"])
def _exact_backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, rows_ptr, rows_t_ptr,
    places, places_t, scale, scale_log2, left, right,
    S: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr, PARTS_T: tl.constexpr,
    NEGATE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The first programs look at dq, the others at dk and dv."""
    first = tl.program_id(0) * _PLACES
    if PARTS > 0:
        marked = _begin_with_nan(dq_ptr, None, rows_ptr, first, places, S.HEADS, S, PARTS)
        if tl.sum(marked, 0) > 0:
            for index in range(0, _PLACES):
                if is_marked(marked, index):
                    _dq_again(
                        q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dq_ptr, rows_ptr,
                        first + index, scale, scale_log2, left, right, S, NEGATE, BIAS, PARTS,
                    )  # fmt: skip
    if PARTS_T > 0:
        first -= tl.cdiv(places, _PLACES) * _PLACES
        KV_HEADS: tl.constexpr = T.HEADS // T.GROUP
        marked = _begin_with_nan(dk_ptr, dv_ptr, rows_t_ptr, first, places_t, KV_HEADS, T, PARTS_T)
        if tl.sum(marked, 0) > 0:
            for index in range(0, _PLACES):
                if is_marked(marked, index):
                    _dkv_again(
                        q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr,
                        rows_t_ptr, first + index, scale, scale_log2, right, left,
                        T, NEGATE, BIAS, PARTS_T,
                    )  # fmt: skip


@triton.jit
def _begin_with_nan(
    first_ptr, second_ptr, rows_ptr, first, places,
    HEADS: tl.constexpr, S: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """[_PLACES] int32, 1 or 0: for the places (row, part, head) from `first` on, whether one of
    their tokens has NaN for its first number in one of the gradients [T, HEADS, D]."""
    place = first + tl.arange(0, _PLACES)
    there = (place >= 0) & (place < places)
    row = rows_ptr + (place // (PARTS * HEADS)).to(tl.int64) * _ROW_WIDTH
    start = tl.load(row, mask=there, other=0) + place // HEADS % PARTS * S.TILE
    end = tl.load(row + 1, mask=there, other=0)
    token = start[:, None] + tl.arange(0, S.TILE)[None, :]
    index = token.to(tl.int64) * HEADS + (place % HEADS)[:, None]
    inside = there[:, None] & (token < end[:, None])
    number = tl.load(first_ptr + index * S.D, mask=inside, other=0.0)
    if second_ptr is not None:
        number += tl.load(second_ptr + index * S.DV, mask=inside, other=0.0)
    return tl.max((number != number).to(tl.int32), 1)


@triton.jit
def _dq_again(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dq_ptr, rows_ptr, place,
    scale, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = S.TILE
    HEADS: tl.constexpr = S.HEADS
    PAD_D: tl.constexpr = S.PAD_D
    head = (place % HEADS).to(tl.int64)
    q_start, q_end, k_start, k_end, shift = load_row(rows_ptr, place // (PARTS * HEADS))
    q_start += place // HEADS % PARTS * TILE
    q_end = tl.minimum(q_end, q_start + TILE)
    q_ptr += head * S.Q_STRIDE_H
    do_ptr += head * S.DO_STRIDE_H
    k_ptr += (head // S.GROUP) * S.K_STRIDE_H
    v_ptr += (head // S.GROUP) * S.V_STRIDE_H
    q = load_block(q_ptr, q_start, q_end, S.Q_STRIDE_T, TILE, S.D, PAD_D)
    if NEGATE:
        q = -q
    d_o = load_block(do_ptr, q_start, q_end, S.DO_STRIDE_T, TILE, S.DV, S.PAD_DV)
    lse2 = load_numbers(lse2_ptr + head, q_start, q_end, HEADS, TILE)
    lse2 = tl.where(lse2 == float("-inf"), 0.0, lse2)
    delta = load_numbers(delta_ptr + head, q_start, q_end, HEADS, TILE)
    row_ends = (q_start, q_end, k_start, k_end, shift, head)
    dq, _, _, _ = dq_walk(
        tl.zeros([TILE, PAD_D], tl.float32), 0.0, 0.0, 0.0, q, d_o, lse2, delta, k_ptr, v_ptr,
        row_ends, scale_log2, left, right, None, None, None, S, BIAS, True,
    )  # fmt: skip
    store_block(dq_ptr + head * S.D, dq * scale, q_start, q_end, HEADS * S.D, TILE, S.D, PAD_D)


@triton.jit
def _dkv_again(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, rows_ptr, place,
    scale, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = S.TILE
    KV_HEADS: tl.constexpr = S.HEADS // S.GROUP
    PAD_D: tl.constexpr = S.PAD_D
    PAD_DV: tl.constexpr = S.PAD_DV
    kv_head = (place % KV_HEADS).to(tl.int64)
    row = place // (PARTS * KV_HEADS)
    k_start, k_end, q_start, q_end, shift = load_row(rows_ptr, row)
    k_start += place // KV_HEADS % PARTS * TILE
    k_end = tl.minimum(k_end, k_start + TILE)
    k_ptr += kv_head * S.K_STRIDE_H
    v_ptr += kv_head * S.V_STRIDE_H
    k = load_block(k_ptr, k_start, k_end, S.K_STRIDE_T, TILE, S.D, PAD_D)
    if NEGATE:
        k = -k
    v = load_block(v_ptr, k_start, k_end, S.V_STRIDE_T, TILE, S.DV, PAD_DV)
    dk = tl.zeros([TILE, PAD_D], tl.float32)
    dv = tl.zeros([TILE, PAD_DV], tl.float32)
    row_ends = (k_start, k_end, q_start, q_end, shift)
    dk, dv = dkv_walk(
        dk, dv, k, v, q_ptr, do_ptr, lse2_ptr, delta_ptr, row_ends, kv_head,
        scale_log2, left, right, rows_ptr, row, None, S, BIAS, True,
    )  # fmt: skip
    dk_ptr += kv_head * S.D
    dv_ptr += kv_head * S.DV
    store_block(dk_ptr, dk * scale, k_start, k_end, KV_HEADS * S.D, TILE, S.D, PAD_D)
    store_block(dv_ptr, dv, k_start, k_end, KV_HEADS * S.DV, TILE, S.DV, PAD_DV)
