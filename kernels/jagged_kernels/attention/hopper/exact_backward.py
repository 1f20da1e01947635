"""Gradients that were touched by what the mask hides, a second time (see `triton_sums`).

As `hopper.exact` does it for the forward, but without a mark for each part of a tile, for which the
Gluon kernels have no registers left: one alarm stands for all gradients of a call. Where it was
raised, a launch after both passes looks for the parts that are not finite, and what it computes for
them is what `plain.backward` computes on its second walk.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.blocks import finite
from jagged_kernels.attention.hopper.exact import part_of_place
from jagged_kernels.attention.meeting import RANGES, Meeting, MeetShape
from jagged_kernels.attention.plain.dkv import dkv_walk
from jagged_kernels.attention.plain.dq import dq_walk
from jagged_kernels.attention.plans import PLANS, AttentionShape, Call, scale_argument
from jagged_kernels.attention.scores.bias_launch import NO_BIAS
from jagged_kernels.attention.seen.triton_sums import SEEN_BLOCK, is_bad, size_of_sums
from jagged_kernels.attention.triton_meeting import factor_of_user, list_ends, rule_of_row
from jagged_kernels.core.backends import multiprocessors
from jagged_kernels.core.launch import launch
from jagged_kernels.device.columns import load_columns, store_columns, times
from jagged_kernels.device.memory import load_block, load_numbers


def launch_exact_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse2: Tensor,
    delta: Tensor | None,
    dq: Tensor | None,
    dkv: tuple[Tensor, Tensor] | None,
    rows: Tensor,
    rows_t: Tensor,
    call: Call,
    alarm: Tensor,
    *,
    tile: int,
    part_q: int,
    part_k: int,
    left: int,
    right: int,
    meeting: Meeting = RANGES,
) -> None:
    """Overwrites dq of `part_q` queries of a row's tile where it is not finite, and dk and dv of
    `part_k` keys likewise, if the alarm is 1.

    Args:
        d_o, q, k, v: `rows_of_dims`.
        lse2, delta: [Tq, H] float32, of the forward and of `launch_dq`; not read where weights are
            by a policy.
        dq, dkv: None for what is not to be looked at.
        rows, rows_t: of tiles of `tile` tokens, which holds one or more parts.
        meeting: whose lists are of blocks as large as that tile.
        call: of q, k, v and d_o.
    """
    parts = 0 if dq is None else tile // part_q
    parts_t = 0 if dkv is None else tile // part_k
    shape = meeting.constants
    scale_log2, constants = _constants(call, part_q, part_k, parts, parts_t, shape)
    places = rows.shape[0] * parts * q.shape[1]
    places_t = rows_t.shape[0] * parts_t * k.shape[1]
    launch(
        _exact_backward_kernel,
        # Programs stay: where there is no alarm, they are to be few.
        min(multiprocessors(q.device), places + places_t),
        (
            q, k, v, d_o, lse2, delta, dq, *(dkv or (None, None)), rows, rows_t, alarm,
            meeting.arguments, meeting.arguments_t if shape.groups else None,
            places, places_t, call.scale, scale_log2, left, right,
        ),
        constants,
        num_warps=4,
        num_stages=1,
    )  # fmt: skip


@lru_cache(PLANS)
def _constants(
    call: Call, part_q: int, part_k: int, parts: int, parts_t: int, meets: MeetShape
) -> tuple[float, dict[str, Any]]:
    """(scale in base 2, the kernel's compile-time parameters)."""
    scale_log2, negate = scale_argument(call.scale)

    def shape(of: Call, part: int, parts: int) -> AttentionShape:
        parts = max(parts, 1)
        return of.shape(tile=part * parts, parts=parts, block=SEEN_BLOCK.value, meets=meets)

    return scale_log2, {
        "S": shape(call, part_q, parts),
        "T": shape(call.mirrored, part_k, parts_t),
        "PARTS": parts,
        "PARTS_T": parts_t,
        "NEGATE": negate,
        "BIAS": NO_BIAS["BIAS"],
        "WEIGHT": meets.weight,
        "D_SCORE": meets.d_score,
    }


@triton.jit(do_not_specialize=["places", "places_t", "left", "right"])
def _exact_backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, rows_ptr, rows_t_ptr,
    alarm_ptr, meets, meets_t, places, places_t, scale, scale_log2, left, right,
    S: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr, PARTS_T: tl.constexpr,
    NEGATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr, D_SCORE: tl.constexpr,
):  # fmt: skip
    """A place is a (row, part, head); programs take every n-th. `meets_t`: of rows of keys that
    have lists."""
    if tl.load(alarm_ptr) != 0:
        if PARTS > 0:
            for place in range(tl.program_id(0), places, tl.num_programs(0)):
                _dq_again(
                    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dq_ptr, rows_ptr,
                    place, meets, scale, scale_log2, left, right,
                    S, NEGATE, BIAS, WEIGHT, D_SCORE, PARTS,
                )  # fmt: skip
        if PARTS_T > 0:
            for place in range(tl.program_id(0), places_t, tl.num_programs(0)):
                _dkv_again(
                    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, rows_t_ptr,
                    place, meets_t if T.GROUPS else meets, scale, scale_log2, right, left,
                    T, NEGATE, BIAS, WEIGHT, D_SCORE, PARTS_T,
                )  # fmt: skip


@triton.jit
def _dq_again(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dq_ptr, rows_ptr, place,
    meets, scale, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
    D_SCORE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = S.TILE
    HEADS: tl.constexpr = S.HEADS
    PAD_D: tl.constexpr = S.PAD_D
    PRECISION: tl.constexpr = S.PRECISION
    # The interpreter's loops count in Python integers.
    place += tl.full([], 0, tl.int32)
    row_ends = part_of_place(rows_ptr, place, HEADS, TILE, PARTS)
    q_start, q_end, k_start, k_end, shift, head = row_ends
    dq_ptr += head * S.D
    dq = load_block(dq_ptr, q_start, q_end, HEADS * S.D, TILE, S.D, PAD_D).to(tl.float32)
    if is_bad(size_of_sums(dq)):
        # Not before all threads have read what is written again.
        tl.debug_barrier()
        row = place // (PARTS * HEADS)
        q_ptr += head * S.Q_STRIDE_H
        do_ptr += head * S.DO_STRIDE_H
        k_ptr += (head // S.GROUP) * S.K_STRIDE_H
        v_ptr += (head // S.GROUP) * S.V_STRIDE_H
        q = load_columns(q_ptr, q_start, q_end, S.Q_STRIDE_T, TILE, S.D, PAD_D, PRECISION, NEGATE)
        d_o = load_columns(do_ptr, q_start, q_end, S.DO_STRIDE_T, TILE, S.DV, S.PAD_DV, PRECISION)
        if WEIGHT is None:
            lse2 = finite(load_numbers(lse2_ptr + head, q_start, q_end, HEADS, TILE))
            delta = load_numbers(delta_ptr + head, q_start, q_end, HEADS, TILE)
            of_query = (lse2, delta, tl.zeros([TILE], tl.float32))  # delta has d_lse
        else:
            of_query = (factor_of_user(meets, rows_ptr, row), 0.0, 0.0)
        ends = (k_start, k_end)
        if S.GROUPS:
            ends = list_ends(meets, rows_ptr, row, q_start, k_end, shift, head, S)
        rule = 0
        if S.RULED:
            rule = rule_of_row(meets, rows_ptr, row, k_start, k_end, shift, False)
        dq_pieces, _, _, _ = dq_walk(
            q, d_o, of_query, k_ptr, v_ptr, row_ends, ends, scale_log2, left, right,
            (0, 0, 0, 0, meets, rule), S, BIAS, WEIGHT, D_SCORE, True,
        )  # fmt: skip
        dq_pieces = times(dq_pieces, scale)
        store_columns(dq_ptr, dq_pieces, q_start, q_end, HEADS * S.D, TILE, S.D, PAD_D, PRECISION)


@triton.jit
def _dkv_again(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, rows_ptr, place,
    meets, scale, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
    D_SCORE: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = S.TILE
    KV_HEADS: tl.constexpr = S.HEADS // S.GROUP
    PAD_D: tl.constexpr = S.PAD_D
    PRECISION: tl.constexpr = S.PRECISION
    PAD_DV: tl.constexpr = S.PAD_DV
    place += tl.full([], 0, tl.int32)
    k_start, k_end, q_start, q_end, shift, kv_head = part_of_place(
        rows_ptr, place, KV_HEADS, TILE, PARTS
    )
    dk_ptr += kv_head * S.D
    dv_ptr += kv_head * S.DV
    dk = load_block(dk_ptr, k_start, k_end, KV_HEADS * S.D, TILE, S.D, PAD_D).to(tl.float32)
    dv = load_block(dv_ptr, k_start, k_end, KV_HEADS * S.DV, TILE, S.DV, PAD_DV).to(tl.float32)
    if is_bad(size_of_sums(dk) + size_of_sums(dv)):
        # Not before all threads have read what is written again.
        tl.debug_barrier()
        k_ptr += kv_head * S.K_STRIDE_H
        v_ptr += kv_head * S.V_STRIDE_H
        k = load_columns(k_ptr, k_start, k_end, S.K_STRIDE_T, TILE, S.D, PAD_D, PRECISION, NEGATE)
        v = load_columns(v_ptr, k_start, k_end, S.V_STRIDE_T, TILE, S.DV, PAD_DV, PRECISION)
        row_ends = (k_start, k_end, q_start, q_end, shift)
        row = place // (PARTS * KV_HEADS)
        factor_n = 1.0
        if WEIGHT is not None:
            factor_n = factor_of_user(meets, rows_ptr, row)
        rule = 0
        if S.RULED:
            rule = rule_of_row(meets, rows_ptr, row, q_start, q_end, shift, True)
        dk_pieces, dv_pieces = dkv_walk(
            k, v, q_ptr, do_ptr, lse2_ptr, None, delta_ptr, row_ends, kv_head,
            scale_log2, left, right, rows_ptr, row, (0, meets, rule, factor_n),
            S, BIAS, WEIGHT, D_SCORE, True,
        )  # fmt: skip
        if WEIGHT is not None:
            dv_pieces = times(dv_pieces, factor_n)
        dk_pieces = times(dk_pieces, scale)
        store_columns(
            dk_ptr, dk_pieces, k_start, k_end, KV_HEADS * S.D, TILE, S.D, PAD_D, PRECISION
        )
        store_columns(
            dv_ptr, dv_pieces, k_start, k_end, KV_HEADS * S.DV, TILE, S.DV, PAD_DV, PRECISION
        )
