"""dQ: one program walks one row of queries for one head, and leaves delta for the other kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.blocks import (
    finite,
    probability,
    score_gradients,
    whole_blocks,
)
from jagged_kernels.attention.meeting import RANGES, Meeting
from jagged_kernels.attention.plain.backward_plan import backward_plan
from jagged_kernels.attention.plans import Call
from jagged_kernels.attention.scores.bias_launch import NO_BIAS, BiasSlots
from jagged_kernels.attention.scores.triton_bias import (
    add_bias,
    add_to_sums,
    bias_place,
    keep_block,
    store_sums,
    zero_sums,
)
from jagged_kernels.attention.seen.triton_sums import (
    SEEN_BLOCK,
    add_weighted_pieces,
    is_bad,
    size_of_pieces,
)
from jagged_kernels.attention.triton_meeting import (
    factor_of_user,
    inside_block,
    is_cut,
    list_ends,
    listed_block,
    rule_of_row,
)
from jagged_kernels.core.backends import has_small_memory
from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import empty_as
from jagged_kernels.core.sizes import LaunchConfig
from jagged_kernels.device.arithmetic import LN2, LOG2_E
from jagged_kernels.device.columns import (
    factors,
    load_columns,
    row_products,
    scores_of,
    store_columns,
    times,
    zero_columns,
)
from jagged_kernels.device.memory import load_numbers, store_numbers
from jagged_kernels.schedule.policy.plain import SHORT_HISTORY, dq_config, short_dq_config
from jagged_kernels.schedule.row_access import load_part
from jagged_kernels.schedule.rows import rows_to_walk, users_of_rows

_LOG2_E = tl.constexpr(LOG2_E)
_LN2 = tl.constexpr(LN2)


def launch_dq(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor | None,
    rows: Tensor,
    call: Call,
    *,
    tile: int,
    left: int,
    right: int,
    bias: dict[str, Any] | None = None,
    bias_slots: BiasSlots | None = None,
    meeting: Meeting = RANGES,
    skips: bool = False,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(dq, delta [Tq, H] float32); delta = rowsum(o * dO) - d_lse is for `launch_dkv`, of float32
    without d_lse, None where weights are no softmax.

    Args:
        d_o, q, k, v: read in place (`rows_of_dims`).
        d_lse2: contiguous.
        lse2: None where weights are no softmax.
        call: of q, k, v and d_o.
        skips: leave out users of up to `SHORT_USER` tokens.
    """
    dq = empty_as(q)
    delta = None if lse2 is None else torch.empty_like(lse2)
    if q.shape[0] == 0:
        return dq, delta
    bias = bias or NO_BIAS
    small_memory = has_small_memory(q.device)
    # What is listed does not end where a history does.
    short = not meeting.constants.groups
    short = short and q.shape[0] < SHORT_HISTORY * users_of_rows(rows, q.shape[0], tile)
    rule = short_dq_config if short else dq_config
    plan = backward_plan(
        call, rule, q.shape[1], tile, bias["BIAS"], meeting.constants, config, small_memory, skips
    )
    if count := rows_to_walk(rows, q.shape[0], tile, skips=skips):
        launch(
            _dq_kernel,
            count * plan.programs,
            (q, k, v, o, d_o, lse2, d_lse2, delta, dq, rows, bias["bias"], bias_slots,
             meeting.arguments, call.scale, plan.scale_log2, left, right),
            plan.constants,
            **plan.options,
        )  # fmt: skip
    return dq, delta


@triton.jit(do_not_specialize=["left", "right"])
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse2_ptr, d_lse2_ptr, delta_ptr, dq_ptr, rows_ptr,
    bias, slots, meets, scale, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
    D_SCORE: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, and delta for the other kernel."""
    HEADS: tl.constexpr = S.HEADS
    TILE: tl.constexpr = S.TILE
    slot, head = tl.program_id(0) // HEADS, (tl.program_id(0) % HEADS).to(tl.int64)
    row = slot // S.PARTS
    q_start, q_end, k_start, k_end, shift = load_part(
        rows_ptr, row, slot % S.PARTS, left, right, S.NARROWS_LEFT, S.NARROWS_RIGHT, TILE, S.PARTS,
        S.SKIPS,
    )  # fmt: skip
    if q_start == q_end:
        if BIAS.ANY:
            position, time, slope = zero_sums(slots, slot, head, BIAS, HEADS)
            store_sums(position, time, slope, slots, slot, head, BIAS, HEADS)
        return
    q_ptr += head * S.Q_STRIDE_H
    do_ptr += head * S.DO_STRIDE_H
    k_ptr += (head // S.GROUP) * S.K_STRIDE_H
    v_ptr += (head // S.GROUP) * S.V_STRIDE_H
    PRECISION: tl.constexpr = S.PRECISION
    LSE_LAST: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    q = load_columns(q_ptr, q_start, q_end, S.Q_STRIDE_T, TILE, S.D, S.PAD_D, PRECISION, NEGATE)
    d_o = load_columns(do_ptr, q_start, q_end, S.DO_STRIDE_T, TILE, S.DV, S.PAD_DV, PRECISION)
    if WEIGHT is None:
        o_ptr += head * S.DV
        o = load_columns(o_ptr, q_start, q_end, HEADS * S.DV, TILE, S.DV, S.PAD_DV, PRECISION)
        delta = row_products(o, d_o, PRECISION)
        d_lse = tl.zeros([TILE], tl.float32)
        if d_lse2_ptr is not None:
            d_lse = load_numbers(d_lse2_ptr + head, q_start, q_end, HEADS, TILE) * _LOG2_E
            if not LSE_LAST:
                delta -= d_lse
        store_numbers(delta_ptr + head, delta, q_start, q_end, HEADS, TILE)
        lse2 = load_numbers(lse2_ptr + head, q_start, q_end, HEADS, TILE)
        of_query = (finite(lse2), delta, d_lse)
    else:
        of_query = (factor_of_user(meets, rows_ptr, row), 0.0, 0.0)
    place = 0  # a tuple cannot hold None
    if BIAS.ANY:
        place = bias_place(bias, rows_ptr, row, head, BIAS)
    ends = (k_start, k_end)
    if S.GROUPS:
        ends = list_ends(meets, rows_ptr, row, q_start, k_end, shift, head, S)
    rule = 0
    if S.RULED:
        rule = rule_of_row(meets, rows_ptr, row, k_start, k_end, shift, False)
    by = (bias, slots, slot, place, meets, rule)

    row_ends = (q_start, q_end, k_start, k_end, shift, head)
    if PRECISION == "bf16x6":
        # Again: what delta's product and others have would stay in registers, and spill.
        d_o = load_columns(do_ptr, q_start, q_end, S.DO_STRIDE_T, TILE, S.DV, S.PAD_DV, PRECISION)
    q, d_o = factors(q, PRECISION), factors(d_o, PRECISION)
    dq, d_position, d_time, d_slope = dq_walk(
        q, d_o, of_query, k_ptr, v_ptr, row_ends, ends, scale_log2, left, right, by,
        S, BIAS, WEIGHT, D_SCORE, False,
    )  # fmt: skip
    if S.MASKED and is_bad(size_of_pieces(dq)):
        # Other threads may have written the bias' gradients that are written again.
        tl.debug_barrier()
        dq, d_position, d_time, d_slope = dq_walk(
            q, d_o, of_query, k_ptr, v_ptr, row_ends, ends, scale_log2, left, right, by,
            S, BIAS, WEIGHT, D_SCORE, True,
        )  # fmt: skip
    store_columns(
        dq_ptr + head * S.D,
        times(dq, scale),
        q_start,
        q_end,
        HEADS * S.D,
        TILE,
        S.D,
        S.PAD_D,
        PRECISION,
    )
    if BIAS.ANY:
        store_sums(d_position, d_time, d_slope, slots, slot, head, BIAS, HEADS)


@triton.jit
def dq_walk(
    q, d_o, of_query, k_ptr, v_ptr, row_ends, ends, scale_log2, left, right, by,
    S: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr, D_SCORE: tl.constexpr,
    SEEN: tl.constexpr,
):  # fmt: skip
    """dQ, in pieces of columns, and the sums of a row's key blocks; with SEEN over what is seen
    alone (`triton_sums`). q and d_o are `factors`.

    Args:
        of_query: (lse2, delta, d_lse), or (1 / n, 0, 0) of weights by a policy.
        ends: of the row's entries where it has a list.
        by: (bias, slots, slot, place, meets, rule).
    """
    TILE: tl.constexpr = S.TILE
    BLOCK: tl.constexpr = SEEN_BLOCK if SEEN else S.BLOCK
    PRECISION: tl.constexpr = S.PRECISION
    q_start, q_end, first, k_end, shift, _ = row_ends
    if S.GROUPS:
        dq = zero_columns(TILE, S.D, S.PAD_D, PRECISION)
        d_position, d_time, d_slope = zero_sums(by[1], by[2], row_ends[5], BIAS, S.HEADS)
        LISTED: tl.constexpr = S.TILE * S.PARTS
        PER_ENTRY: tl.constexpr = LISTED // BLOCK
        begin, end = ends
        for index in tl.range(0, (end - begin) * PER_ENTRY, num_stages=1 if SEEN else None):
            k_start, cut = listed_block(by[4], begin, index, first, k_end, LISTED, BLOCK)
            dq, d_position, d_time, d_slope = _dq_block(
                dq, d_position, d_time, d_slope, q, d_o, of_query, k_ptr, v_ptr, k_start, cut,
                row_ends, scale_log2, left, right, by, S, BIAS, WEIGHT, D_SCORE, BLOCK, SEEN,
            )  # fmt: skip
    else:
        whole = whole_blocks(
            q_start, q_end, first, k_end, shift, left, right, S.HAS_LEFT, S.HAS_RIGHT, BLOCK
        )
        dq = zero_columns(TILE, S.D, S.PAD_D, PRECISION)
        d_position, d_time, d_slope = zero_sums(by[1], by[2], row_ends[5], BIAS, S.HEADS)
        for k_start in tl.range(first, k_end, BLOCK, num_stages=1 if SEEN else None):
            dq, d_position, d_time, d_slope = _dq_block(
                dq, d_position, d_time, d_slope, q, d_o, of_query, k_ptr, v_ptr, k_start, whole,
                row_ends, scale_log2, left, right, by, S, BIAS, WEIGHT, D_SCORE, BLOCK, SEEN,
            )  # fmt: skip
    return dq, d_position, d_time, d_slope


@triton.jit
def _dq_block(
    dq, d_position, d_time, d_slope, q, d_o, of_query, k_ptr, v_ptr, k_start, whole, row_ends,
    scale_log2, left, right, by,
    S: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr, D_SCORE: tl.constexpr,
    BLOCK: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """`dq_walk` over one block.

    whole: from where to where blocks are visible whole; of a list, whether this one is not.
    """
    TILE: tl.constexpr = S.TILE
    PRECISION: tl.constexpr = S.PRECISION
    ROUNDS: tl.constexpr = BIAS.ANY or k_ptr.dtype.element_ty == tl.float32
    SCALES: tl.constexpr = BIAS.ANY or WEIGHT is not None
    q_start, q_end, _, k_end, shift, head = row_ends
    bias, slots, slot, place, _, rule = by
    k = load_columns(k_ptr, k_start, k_end, S.K_STRIDE_T, BLOCK, S.D, S.PAD_D, PRECISION)
    v = load_columns(v_ptr, k_start, k_end, S.V_STRIDE_T, BLOCK, S.DV, S.PAD_DV, PRECISION)
    scores = scores_of(q, factors(k, PRECISION), PRECISION)
    bucket = 0
    if SCALES:
        scores *= scale_log2
    if BIAS.ANY:
        q_token = (q_start + tl.arange(0, TILE))[:, None]
        k_token = (k_start + tl.arange(0, BLOCK))[None, :]
        scores, bucket = add_bias(
            scores, bias, place, q_token, k_token, q_end, k_end, shift, head, BIAS, S.HEADS
        )
    if WEIGHT is None:
        if SEEN or is_cut(k_start, whole, S):
            inside = inside_block(
                rule, q_start, k_start, k_end, shift, left, right, S, TILE, BLOCK, False
            )
            scores = tl.where(inside, scores, float("-inf"))
        if not SCALES:
            scores *= scale_log2
        lse2, delta, d_lse = of_query
        probabilities = probability(scores, lse2[:, None], ROUNDS)
    d_weights = scores_of(d_o, factors(v, PRECISION), PRECISION)
    if BIAS.DROPS:
        d_weights *= keep_block(bias, place, q_token, k_token)
    if WEIGHT is None:
        LSE_LAST: tl.constexpr = k_ptr.dtype.element_ty == tl.float32
        d_scores = score_gradients(
            probabilities, d_weights, delta[:, None], d_lse[:, None] if LSE_LAST else None
        )
        if SEEN:
            d_scores = tl.where(inside, d_scores, 0.0)
    else:
        d_scores = D_SCORE(scores * _LN2, d_weights * of_query[0])
        if SEEN or is_cut(k_start, whole, S):
            inside = inside_block(
                rule, q_start, k_start, k_end, shift, left, right, S, TILE, BLOCK, False
            )
            d_scores = tl.where(inside, d_scores, 0.0)
    if BIAS.ADDS:
        # What is behind an end is 0, but 0 times a NaN is none.
        d_scores = tl.where((q_token < q_end) & (k_token < k_end), d_scores, 0.0)
        d_position, d_time, d_slope = add_to_sums(
            d_position, d_time, d_slope, d_scores, slots, slot, bias, place, bucket,
            q_start, k_start, q_end, k_end, shift, head, BIAS, S.HEADS,
        )  # fmt: skip
    dq = add_weighted_pieces(dq, d_scores, k, inside if SEEN else None, PRECISION)
    return dq, d_position, d_time, d_slope
