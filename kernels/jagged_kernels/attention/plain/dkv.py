"""dK and dV: one program walks the queries that see a tile of keys, for the heads that share it."""

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
from jagged_kernels.attention.scores.bias_launch import NO_BIAS
from jagged_kernels.attention.scores.triton_bias import add_bias, bias_place, keep_block
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
    scores_of,
    store_columns,
    times,
    zero_columns,
)
from jagged_kernels.device.memory import load_number_pairs, load_numbers
from jagged_kernels.schedule.policy.plain import dkv_config, small_dkv_config
from jagged_kernels.schedule.row_access import load_part
from jagged_kernels.schedule.rows import rows_to_walk

_LOG2_E = tl.constexpr(LOG2_E)
_LN2 = tl.constexpr(LN2)


def launch_dkv(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse2: Tensor | None,
    delta: Tensor | None,
    rows_t: Tensor,
    call: Call,
    *,
    tile: int,
    left: int,
    right: int,
    bias: dict[str, Any] | None = None,
    meeting: Meeting = RANGES,
    skips: bool = False,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(dk, dv); `left`, `right` and `call` are those of the queries, all else is as for
    `launch_dq`."""
    dk, dv = empty_as(k), empty_as(v)
    if k.shape[0] == 0:
        return dk, dv
    bias = bias or NO_BIAS
    if q.dtype != torch.float32:
        d_lse2 = None  # delta has it
    small_memory = has_small_memory(k.device)
    rule = small_dkv_config if small_memory else dkv_config
    plan = backward_plan(
        call.mirrored, rule, k.shape[1], tile, bias["BIAS"], meeting.constants, config,
        small_memory, skips,
    )  # fmt: skip
    if count := rows_to_walk(rows_t, k.shape[0], tile, skips=skips):
        launch(
            _dkv_kernel,
            count * plan.programs,
            (q, k, v, d_o, lse2, d_lse2, delta, dk, dv, rows_t, bias["bias"],
             meeting.arguments_t, call.scale, plan.scale_log2, right, left),
            plan.constants,
            **plan.options,
        )  # fmt: skip
    return dk, dv


@triton.jit(do_not_specialize=["left", "right"])
def _dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, d_lse2_ptr, delta_ptr, dk_ptr, dv_ptr, rows_ptr,
    bias, meets, scale, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
    D_SCORE: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, summed over the heads of its group in order."""
    KV_HEADS: tl.constexpr = S.HEADS // S.GROUP
    TILE: tl.constexpr = S.TILE
    slot, kv_head = tl.program_id(0) // KV_HEADS, (tl.program_id(0) % KV_HEADS).to(tl.int64)
    row = slot // S.PARTS
    k_start, k_end, q_start, q_end, shift = load_part(
        rows_ptr, row, slot % S.PARTS, left, right, S.NARROWS_LEFT, S.NARROWS_RIGHT, TILE, S.PARTS,
        S.SKIPS,
    )  # fmt: skip
    if k_start == k_end:
        return
    k_ptr += kv_head * S.K_STRIDE_H
    v_ptr += kv_head * S.V_STRIDE_H
    PRECISION: tl.constexpr = S.PRECISION
    k = load_columns(k_ptr, k_start, k_end, S.K_STRIDE_T, TILE, S.D, S.PAD_D, PRECISION, NEGATE)
    v = load_columns(v_ptr, k_start, k_end, S.V_STRIDE_T, TILE, S.DV, S.PAD_DV, PRECISION)
    k, v = factors(k, PRECISION), factors(v, PRECISION)
    row_ends = (k_start, k_end, q_start, q_end, shift)
    factor_n = 1.0
    if WEIGHT is not None:
        factor_n = factor_of_user(meets, rows_ptr, row)
    rule = 0
    if S.RULED:
        rule = rule_of_row(meets, rows_ptr, row, q_start, q_end, shift, True)
    by = (bias, meets, rule, factor_n)
    dk, dv = dkv_walk(
        k, v, q_ptr, do_ptr, lse2_ptr, d_lse2_ptr, delta_ptr, row_ends, kv_head,
        scale_log2, left, right, rows_ptr, row, by, S, BIAS, WEIGHT, D_SCORE, False,
    )  # fmt: skip
    if S.MASKED and is_bad(size_of_pieces(dk) + size_of_pieces(dv)):
        dk, dv = dkv_walk(
            k, v, q_ptr, do_ptr, lse2_ptr, d_lse2_ptr, delta_ptr, row_ends, kv_head,
            scale_log2, left, right, rows_ptr, row, by, S, BIAS, WEIGHT, D_SCORE, True,
        )  # fmt: skip
    dk_ptr += kv_head * S.D
    dv_ptr += kv_head * S.DV
    store_columns(
        dk_ptr, times(dk, scale), k_start, k_end, KV_HEADS * S.D, TILE, S.D, S.PAD_D, PRECISION
    )
    if WEIGHT is not None:
        dv = times(dv, factor_n)
    store_columns(dv_ptr, dv, k_start, k_end, KV_HEADS * S.DV, TILE, S.DV, S.PAD_DV, PRECISION)


@triton.jit
def dkv_walk(
    k, v, q_ptr, do_ptr, lse2_ptr, d_lse2_ptr, delta_ptr, row_ends, kv_head,
    scale_log2, left, right, rows_ptr, row, by,
    S: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr, D_SCORE: tl.constexpr,
    SEEN: tl.constexpr,
):  # fmt: skip
    """`_dkv_walk` for the heads of a group, one after another: dK, and dV without 1 / n of a
    policy, in pieces of columns.

    Args:
        by: (bias, meets, rule, 1 / n).
    """
    TILE: tl.constexpr = S.TILE
    PRECISION: tl.constexpr = S.PRECISION
    dk = zero_columns(TILE, S.D, S.PAD_D, PRECISION)
    dv = zero_columns(TILE, S.DV, S.PAD_DV, PRECISION)
    for member in range(S.GROUP):
        head = kv_head * S.GROUP + member
        place = 0  # a tuple cannot hold None
        if BIAS.ANY:
            place = bias_place(by[0], rows_ptr, row, head, BIAS)
        ends = (row_ends[2], row_ends[3])
        if S.GROUPS:
            ends = list_ends(by[1], rows_ptr, row, row_ends[0], row_ends[3], row_ends[4], head, S)
        dk, dv = _dkv_walk(
            dk, dv, k, v, q_ptr, do_ptr, lse2_ptr, d_lse2_ptr, delta_ptr, row_ends, ends, head,
            scale_log2, left, right, by, place, S, BIAS, WEIGHT, D_SCORE, SEEN,
        )  # fmt: skip
    return dk, dv


@triton.jit
def _dkv_walk(
    dk, dv, k, v, q_ptr, do_ptr, lse2_ptr, d_lse2_ptr, delta_ptr, row_ends, ends, head,
    scale_log2, left, right, by, place,
    S: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr, D_SCORE: tl.constexpr,
    SEEN: tl.constexpr,
):  # fmt: skip
    """Keys stand in the rows here: the scores are transposed. k and v are `factors`; with SEEN,
    sums over what is seen alone (`triton_sums`). `ends`: of the row's entries where it has a list.
    """
    BLOCK: tl.constexpr = SEEN_BLOCK if SEEN else S.BLOCK
    k_start, k_end, first, q_end, shift = row_ends
    q_ptr += head * S.Q_STRIDE_H
    do_ptr += head * S.DO_STRIDE_H
    if S.GROUPS:
        LISTED: tl.constexpr = S.TILE * S.PARTS
        PER_ENTRY: tl.constexpr = LISTED // BLOCK
        begin, end = ends
        for index in tl.range(0, (end - begin) * PER_ENTRY, num_stages=1 if SEEN else None):
            q_start, cut = listed_block(by[1], begin, index, first, q_end, LISTED, BLOCK)
            dk, dv = _dkv_block(
                dk, dv, k, v, q_ptr, do_ptr, lse2_ptr, d_lse2_ptr, delta_ptr, q_start, cut,
                row_ends, head, scale_log2, left, right, by, place, S, BIAS, WEIGHT, D_SCORE,
                BLOCK, SEEN,
            )  # fmt: skip
    else:
        whole = whole_blocks(
            k_start, k_end, first, q_end, shift, left, right, S.HAS_LEFT, S.HAS_RIGHT, BLOCK
        )
        for q_start in tl.range(first, q_end, BLOCK, num_stages=1 if SEEN else None):
            dk, dv = _dkv_block(
                dk, dv, k, v, q_ptr, do_ptr, lse2_ptr, d_lse2_ptr, delta_ptr, q_start, whole,
                row_ends, head, scale_log2, left, right, by, place, S, BIAS, WEIGHT, D_SCORE,
                BLOCK, SEEN,
            )  # fmt: skip
    return dk, dv


@triton.jit
def _dkv_block(
    dk, dv, k, v, q_ptr, do_ptr, lse2_ptr, d_lse2_ptr, delta_ptr, q_start, whole, row_ends, head,
    scale_log2, left, right, by, place,
    S: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr, D_SCORE: tl.constexpr,
    BLOCK: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """`_dkv_walk` over one block of queries.

    whole: from where to where blocks are visible whole; of a list, whether this one is not.
    """
    TILE: tl.constexpr = S.TILE
    PRECISION: tl.constexpr = S.PRECISION
    ROUNDS: tl.constexpr = BIAS.ANY or q_ptr.dtype.element_ty == tl.float32
    SCALES: tl.constexpr = BIAS.ANY or WEIGHT is not None
    k_start, k_end, _, q_end, shift = row_ends
    bias, _, rule, factor_n = by
    q = load_columns(q_ptr, q_start, q_end, S.Q_STRIDE_T, BLOCK, S.D, S.PAD_D, PRECISION)
    d_o = load_columns(do_ptr, q_start, q_end, S.DO_STRIDE_T, BLOCK, S.DV, S.PAD_DV, PRECISION)
    if WEIGHT is None:
        lse2, delta = load_number_pairs(
            lse2_ptr + head, delta_ptr + head, q_start, q_end, S.HEADS, BLOCK
        )
    scores = scores_of(k, factors(q, PRECISION), PRECISION, True)
    if SCALES:
        scores *= scale_log2
    if BIAS.ANY:
        q_token = (q_start + tl.arange(0, BLOCK))[None, :]
        k_token = (k_start + tl.arange(0, TILE))[:, None]
        # The shift of a transposed row goes from keys to queries.
        scores, _ = add_bias(
            scores, bias, place, q_token, k_token, q_end, k_end, -shift, head, BIAS, S.HEADS
        )
    if WEIGHT is None:
        if SEEN or is_cut(q_start, whole, S):
            # A query that sees nothing is in no whole block.
            lse2 = finite(lse2)
            inside = inside_block(
                rule, k_start, q_start, q_end, shift, left, right, S, TILE, BLOCK, True
            )
            scores = tl.where(inside, scores, float("-inf"))
        if not SCALES:
            scores *= scale_log2
        weights = probability(scores, lse2[None, :], ROUNDS)
    else:
        scores *= _LN2
        weights = WEIGHT(scores)
        if SEEN or is_cut(q_start, whole, S):
            inside = inside_block(
                rule, k_start, q_start, q_end, shift, left, right, S, TILE, BLOCK, True
            )
            weights = tl.where(inside, weights, 0.0)
    kept = weights
    if BIAS.DROPS:
        keep = keep_block(bias, place, q_token, k_token)
        kept = weights * keep
    dv = add_weighted_pieces(dv, kept, d_o, inside if SEEN else None, PRECISION)
    if PRECISION == "bf16x6":
        # Again: parts that both products have would stay in registers, and spill.
        d_o = load_columns(do_ptr, q_start, q_end, S.DO_STRIDE_T, BLOCK, S.DV, S.PAD_DV, PRECISION)
    d_weights = scores_of(v, factors(d_o, PRECISION), PRECISION, True)
    if BIAS.DROPS:
        d_weights *= keep
    if WEIGHT is None:
        d_lse = None
        if d_lse2_ptr is not None:
            d_lse = load_numbers(d_lse2_ptr + head, q_start, q_end, S.HEADS, BLOCK)
            d_lse = (d_lse * _LOG2_E)[None, :]
        d_scores = score_gradients(weights, d_weights, delta[None, :], d_lse)
    else:
        d_scores = D_SCORE(scores, d_weights * factor_n)
        if SEEN or is_cut(q_start, whole, S):
            inside = inside_block(
                rule, k_start, q_start, q_end, shift, left, right, S, TILE, BLOCK, True
            )
            d_scores = tl.where(inside, d_scores, 0.0)
    dk = add_weighted_pieces(dk, d_scores, q, inside if SEEN else None, PRECISION)
    return dk, dv
