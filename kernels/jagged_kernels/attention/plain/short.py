"""Users of a few tokens: a warp each, and the whole backward in one pass.

Where most users have a handful of tokens, a program of the plain kernels does little but wait for
memory, with most of its tile empty. Here a program is one warp, with a tile of 16 or 32 tokens,
so that a multiprocessor has many users on their way. All keys of a user are there at once: there is
no online softmax, and one program makes dQ, dK and dV from probabilities that are computed once,
where the plain kernels compute them twice (TLX Block Attention has this idea for blocks of 64
tokens). Biases' gradients are summed as the plain kernels sum them, in slots behind those of rows.
Longer users are left to the plain kernels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.blocks import (
    finite,
    lse2_of,
    probability,
    score_gradients,
    visible,
    weighted_mean,
)
from jagged_kernels.attention.meeting import RANGES, Meeting, MeetShape
from jagged_kernels.attention.plain.short_by_token import (
    attend_by_token,
    differentiate_by_token,
    factor_of,
)
from jagged_kernels.attention.plans import PLANS, Call, LaunchPlan
from jagged_kernels.attention.scores.bias_launch import NO_BIAS, BiasShape, BiasSlots
from jagged_kernels.attention.scores.triton_bias import (
    add_bias,
    add_to_sums,
    keep_block,
    place_of_user,
    store_sums,
    zero_sums,
)
from jagged_kernels.attention.seen.triton_sums import is_bad, size_of_pieces, size_of_sums
from jagged_kernels.core.launch import launch
from jagged_kernels.device.arithmetic import LN2, LOG2_E, add_factors
from jagged_kernels.device.columns import (
    add_to_each,
    each_product,
    factors,
    load_columns,
    scores_of,
    store_columns,
    times,
    zero_columns,
)
from jagged_kernels.device.float32 import dot_factors, factor, transposed
from jagged_kernels.device.memory import load_block, load_numbers, store_block, store_numbers
from jagged_kernels.schedule.policy.plain import short_warps
from jagged_kernels.schedule.row_layout import SHORT_USER

_LOG2_E = tl.constexpr(LOG2_E)
_LN2 = tl.constexpr(LN2)


def launch_short_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor | None,
    offsets: Tensor,
    call: Call,
    *,
    left: int,
    right: int,
    bias: dict[str, Any] | None = None,
    meeting: Meeting = RANGES,
) -> None:
    """Writes o [T, H, Dv] and lse2 [T, H] (or None) of users of 1 to `SHORT_USER` tokens.

    Args:
        q, k, v: [T, H, D], [T, Hk, D], [T, Hk, Dv], read in place (`rows_of_dims`).
        offsets: [B + 1] of all three, int32 or int64.
        call: of q, k, v.
        left, right, bias: as in `launch_forward`.
        meeting: what a score becomes, over ranges.
    """
    bias = bias or NO_BIAS
    plan = _plan(call, bias["BIAS"], meeting.constants)
    launch(
        _short_forward_kernel,
        (offsets.shape[0] - 1) * plan.programs,
        (q, k, v, o, lse2, offsets.contiguous(), bias["bias"], meeting.arguments,
         plan.scale_log2, left, right),
        plan.constants,
        **plan.options,
    )  # fmt: skip


def launch_short_backward(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse2: Tensor | None,
    dq: Tensor,
    dk: Tensor | None,
    dv: Tensor | None,
    offsets: Tensor,
    call: Call,
    *,
    left: int,
    right: int,
    bias: dict[str, Any] | None = None,
    bias_slots: BiasSlots | None = None,
    meeting: Meeting = RANGES,
) -> None:
    """Writes dq, and dk and dv unless they are None, of users of 1 to `SHORT_USER` tokens.

    Args: as `launch_short_forward` takes them; d_o likewise, other gradients contiguous.
        bias_slots: where the bias' gradients are left, of all users in the last of its rows.
    """
    bias = bias or NO_BIAS
    users = offsets.shape[0] - 1
    first_slot = None if bias_slots is None else bias_slots.rows - users
    plan = _plan(call, bias["BIAS"], meeting.constants)
    constants = {**plan.constants, "D_SCORE": meeting.constants.d_score}
    launch(
        _short_backward_kernel,
        users * plan.programs,
        (q, k, v, d_o, lse2, d_lse2, dq, dk, dv, offsets.contiguous(), bias["bias"], bias_slots,
         first_slot, meeting.arguments, call.scale, plan.scale_log2, left, right),
        constants,
        **plan.options,
    )  # fmt: skip


@lru_cache(PLANS)
def _plan(call: Call, BIAS: BiasShape, meets: MeetShape) -> LaunchPlan:
    """Programs are those of a user."""
    shape = call.shape(tile=SHORT_USER, block=SHORT_USER)
    programs = shape.HEADS if call.d_o is None else call.k[0]
    row_bytes = max(shape.PAD_D, shape.PAD_DV) * call.element_size
    warps = short_warps(row_bytes, biased=BIAS.ADDS)
    # One stage: the walk over heads that share keys would fill shared memory.
    options = {"num_warps": warps, "num_stages": 1}
    return call.plan(programs, shape, options, BIAS=BIAS, WEIGHT=meets.weight)


@triton.jit(do_not_specialize=["left", "right"])
def _short_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse2_ptr, offsets_ptr, bias, meets, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    user, start, end, head = _user(offsets_ptr, S.HEADS)
    by = (bias, place_of_user(bias, user, head, BIAS), meets)
    q_ptr += head * S.Q_STRIDE_H
    k_ptr += (head // S.GROUP) * S.K_STRIDE_H
    v_ptr += (head // S.GROUP) * S.V_STRIDE_H
    o_ptr += head * S.DV
    if lse2_ptr is not None:
        lse2_ptr += head
    HALF: tl.constexpr = S.TILE // 2
    length = end - start
    bad = False
    if (length > 0) & (length <= HALF):
        bad = _forward(
            q_ptr, k_ptr, v_ptr, o_ptr, lse2_ptr, start, end, head, by, scale_log2, left, right,
            S, NEGATE, BIAS, WEIGHT, HALF,
        )  # fmt: skip
    if (length > HALF) & (length <= S.TILE):
        bad = _forward(
            q_ptr, k_ptr, v_ptr, o_ptr, lse2_ptr, start, end, head, by, scale_log2, left, right,
            S, NEGATE, BIAS, WEIGHT, S.TILE,
        )  # fmt: skip
    if S.MASKED and BIAS.LOOKS_UP and bad:
        # Once for both tiles: with tables it is long, and takes long to compile. (Where it is
        # short, ptxas has fewer spills with one for each tile.)
        tl.debug_barrier()
        attend_by_token(
            q_ptr, k_ptr, v_ptr, o_ptr, lse2_ptr, start, end, head, by, scale_log2, left, right,
            S, NEGATE, BIAS, WEIGHT,
        )  # fmt: skip


@triton.jit
def _user(offsets_ptr, HEADS: tl.constexpr):
    """(user, start, end, head) of a program."""
    user, head = tl.program_id(0) // HEADS, (tl.program_id(0) % HEADS).to(tl.int64)
    start = tl.load(offsets_ptr + user).to(tl.int32)
    return user, start, tl.load(offsets_ptr + user + 1).to(tl.int32), head


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse2_ptr, start, end, head, by, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Whether sums are not finite, where something is hidden and biases have tables: then
    the caller attends by token.

    by: (bias, place, meets).
    """
    bias, place, meets = by
    PRECISION: tl.constexpr = S.PRECISION
    q = load_columns(q_ptr, start, end, S.Q_STRIDE_T, TILE, S.D, S.PAD_D, PRECISION, NEGATE)
    k = load_columns(k_ptr, start, end, S.K_STRIDE_T, TILE, S.D, S.PAD_D, PRECISION)
    v = load_block(v_ptr, start, end, S.V_STRIDE_T, TILE, S.DV, S.PAD_DV)
    scores = scores_of(factors(q, PRECISION), factors(k, PRECISION), PRECISION)
    unit = scale_log2
    if BIAS.ANY:
        token = start + tl.arange(0, TILE)
        q_token, k_token = token[:, None], token[None, :]
        scores, _ = add_bias(
            scores * scale_log2, bias, place, q_token, k_token, end, end, 0, head, BIAS, S.HEADS
        )
        unit = 1.0
    inside = visible(start, start, end, 0, left, right, S.HAS_LEFT, S.HAS_RIGHT, TILE, TILE)
    if WEIGHT is None:
        scores = tl.where(inside, scores, float("-inf"))
        top = tl.max(scores, 1)
        if BIAS.ADDS:
            top = finite(top)  # a bias may be -inf for all keys
        # Subtract before scaling: exact, so no weight passes 1 however large the scores are.
        weights = tl.exp2((scores - top[:, None]) * unit)
        total = tl.sum(weights, 1)
    else:
        weights = tl.where(inside, WEIGHT(scores * (unit * _LN2)), 0.0)
    if BIAS.DROPS:
        weights *= keep_block(bias, place, q_token, k_token)
    weights = factor(weights.to(v.dtype), PRECISION)
    acc = dot_factors(weights, factor(v, PRECISION), PRECISION)
    acc = weighted_mean(acc, total) if WEIGHT is None else acc * factor_of(meets, start, end)
    if S.MASKED:
        # Behind the user's end may be queries that see nothing: 0 / 0.
        own = start + tl.arange(0, TILE) < end
        sizes = tl.where(own, size_of_sums(acc), 0.0)
    store_block(o_ptr, acc, start, end, S.HEADS * S.DV, TILE, S.DV, S.PAD_DV)
    if lse2_ptr is not None:
        store_numbers(lse2_ptr, lse2_of(top * unit, total), start, end, S.HEADS, TILE)
    bad = False
    if S.MASKED:
        bad = is_bad(sizes)
    if S.MASKED and not BIAS.LOOKS_UP and bad:
        # Not before other threads have written what is written again.
        tl.debug_barrier()
        attend_by_token(
            q_ptr, k_ptr, v_ptr, o_ptr, lse2_ptr, start, end, head, by, scale_log2, left, right,
            S, NEGATE, BIAS, WEIGHT,
        )  # fmt: skip
    return bad


@triton.jit(do_not_specialize=["first_slot", "left", "right"])
def _short_backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, d_lse2_ptr, dq_ptr, dk_ptr, dv_ptr, offsets_ptr,
    bias, slots, first_slot, meets, scale, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
    D_SCORE: tl.constexpr,
):  # fmt: skip
    user, start, end, kv_head = _user(offsets_ptr, S.HEADS // S.GROUP)
    head = kv_head * S.GROUP
    q_ptr += head * S.Q_STRIDE_H
    k_ptr += kv_head * S.K_STRIDE_H
    v_ptr += kv_head * S.V_STRIDE_H
    do_ptr += head * S.DO_STRIDE_H
    if WEIGHT is None:
        lse2_ptr += head
    if d_lse2_ptr is not None:
        d_lse2_ptr += head
    dq_ptr += head * S.D
    if dk_ptr is not None:
        dk_ptr += kv_head * S.D
        dv_ptr += kv_head * S.DV
    slot = 0
    if BIAS.ADDS:
        slot = first_slot + user
    by = (bias, slots, slot, meets)
    HALF: tl.constexpr = S.TILE // 2
    length = end - start
    bad = False
    if (length > 0) & (length <= HALF):
        bad = _backward(
            q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, d_lse2_ptr, dq_ptr, dk_ptr, dv_ptr,
            user, start, end, head, by, scale, scale_log2, left, right,
            S, NEGATE, BIAS, WEIGHT, D_SCORE, HALF,
        )  # fmt: skip
    if (length > HALF) & (length <= S.TILE):
        bad = _backward(
            q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, d_lse2_ptr, dq_ptr, dk_ptr, dv_ptr,
            user, start, end, head, by, scale, scale_log2, left, right,
            S, NEGATE, BIAS, WEIGHT, D_SCORE, S.TILE,
        )  # fmt: skip
    if BIAS.ADDS and ((length == 0) | (length > S.TILE)):
        for member in range(S.GROUP):
            d_position, d_time, d_slope = zero_sums(slots, slot, head + member, BIAS, S.HEADS)
            store_sums(d_position, d_time, d_slope, slots, slot, head + member, BIAS, S.HEADS)
    if S.MASKED and BIAS.LOOKS_UP and bad:
        # Once for both tiles, as in the forward.
        tl.debug_barrier()
        differentiate_by_token(
            q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, d_lse2_ptr, dq_ptr, dk_ptr, dv_ptr,
            user, start, end, head, (bias, meets), scale, scale_log2, left, right,
            S, NEGATE, BIAS, WEIGHT, D_SCORE, S.TILE,
        )  # fmt: skip


@triton.jit
def _backward(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, d_lse2_ptr, dq_ptr, dk_ptr, dv_ptr,
    user, start, end, head, by, scale, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
    D_SCORE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Returns what `_forward` does.

    Delta is the sum of P * dP along a query's keys, which are all here: o is not needed.

    Args:
        head: the first of the group.
        by: (bias, slots, slot, meets).
    """
    bias, slots, slot, meets = by
    PRECISION: tl.constexpr = S.PRECISION
    KV_HEADS: tl.constexpr = S.HEADS // S.GROUP
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    PAD_D: tl.constexpr = S.PAD_D
    PAD_DV: tl.constexpr = S.PAD_DV
    k = load_columns(k_ptr, start, end, S.K_STRIDE_T, TILE, S.D, PAD_D, PRECISION)
    v = load_block(v_ptr, start, end, S.V_STRIDE_T, TILE, S.DV, PAD_DV)
    k, v = factors(k, PRECISION), factor(v, PRECISION)
    inside = visible(start, start, end, 0, left, right, S.HAS_LEFT, S.HAS_RIGHT, TILE, TILE)
    if BIAS.ANY:
        token = start + tl.arange(0, TILE)
        q_token, k_token = token[:, None], token[None, :]
        inside = inside & (q_token < end)
    dk = zero_columns(TILE, S.D, PAD_D, PRECISION)
    dv = tl.zeros([TILE, PAD_DV], tl.float32)
    bad = False
    for member in range(S.GROUP):
        q = load_columns(
            q_ptr + member * S.Q_STRIDE_H, start, end, S.Q_STRIDE_T, TILE, S.D, PAD_D, PRECISION
        )
        d_o = load_block(
            do_ptr + member * S.DO_STRIDE_H, start, end, S.DO_STRIDE_T, TILE, S.DV, PAD_DV
        )
        if WEIGHT is None:
            lse2 = load_numbers(lse2_ptr + member, start, end, S.HEADS, TILE)
        q, d_o = factors(q, PRECISION), factor(d_o, PRECISION)
        scores = scores_of(q, k, PRECISION) * scale_log2
        if NEGATE:
            scores = -scores
        if BIAS.ANY:
            place = place_of_user(bias, user, head + member, BIAS)
            scores, bucket = add_bias(
                scores, bias, place, q_token, k_token, end, end, 0, head + member, BIAS, S.HEADS
            )
        if WEIGHT is None:
            if BIAS.ADDS:
                lse2 = finite(lse2)
            scores = tl.where(inside, scores, float("-inf"))
            weights = probability(scores, lse2[:, None], True)
        d_weights = dot_factors(d_o, transposed(v, PRECISION), PRECISION)
        if BIAS.DROPS:
            d_weights *= keep_block(bias, place, q_token, k_token)
        if BIAS.ADDS:
            # What is hidden is in no sum of a bias' gradient: it is not made again by token.
            d_weights = tl.where(inside, d_weights, 0.0)
        if WEIGHT is None:
            delta = tl.sum(weights * d_weights, 1)
            d_lse = None
            if d_lse2_ptr is not None:
                of_lse = load_numbers(d_lse2_ptr + member, start, end, S.HEADS, TILE) * _LOG2_E
                if dtype == tl.float32:
                    d_lse = of_lse[:, None]
                else:
                    delta -= of_lse
            d_scores = score_gradients(weights, d_weights, delta[:, None], d_lse)
        else:
            scores *= _LN2
            factor_n = factor_of(meets, start, end)
            weights = tl.where(inside, WEIGHT(scores) * factor_n, 0.0)
            d_scores = tl.where(inside, D_SCORE(scores, d_weights * factor_n), 0.0)
        if BIAS.ADDS:
            d_scores = tl.where(inside, d_scores, 0.0)
            d_position, d_time, d_slope = zero_sums(slots, slot, head + member, BIAS, S.HEADS)
            d_position, d_time, d_slope = add_to_sums(
                d_position, d_time, d_slope, d_scores, slots, slot, bias, place, bucket,
                start, start, end, end, 0, head + member, BIAS, S.HEADS,
            )  # fmt: skip
            store_sums(d_position, d_time, d_slope, slots, slot, head + member, BIAS, S.HEADS)
        d_scores = factor(d_scores.to(dtype), PRECISION)
        dq = times(each_product(d_scores, k, PRECISION), scale)
        if S.MASKED:
            bad = bad | is_bad(size_of_pieces(dq))
        store_columns(
            dq_ptr + member * S.D, dq, start, end, S.HEADS * S.D, TILE, S.D, PAD_D, PRECISION
        )
        if dk_ptr is not None:
            if BIAS.DROPS:
                weights *= keep_block(bias, place, q_token, k_token)
            kept = factor(weights.to(dtype), PRECISION)
            dk = add_to_each(dk, transposed(d_scores, PRECISION), q, dtype, PRECISION)
            dv = add_factors(dv, transposed(kept, PRECISION), d_o, dtype, PRECISION)
    if S.MASKED:
        bad = bad | is_bad(size_of_pieces(dk) + size_of_sums(dv))
    if dk_ptr is not None:
        store_columns(
            dk_ptr, times(dk, scale), start, end, KV_HEADS * S.D, TILE, S.D, PAD_D, PRECISION
        )
        store_block(dv_ptr, dv, start, end, KV_HEADS * S.DV, TILE, S.DV, PAD_DV)
    if S.MASKED and not BIAS.LOOKS_UP and bad:
        # Not before other threads have written what is written again.
        tl.debug_barrier()
        differentiate_by_token(
            q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, d_lse2_ptr, dq_ptr, dk_ptr, dv_ptr,
            user, start, end, head, (bias, meets), scale, scale_log2, left, right,
            S, NEGATE, BIAS, WEIGHT, D_SCORE, TILE,
        )  # fmt: skip
    return bad
