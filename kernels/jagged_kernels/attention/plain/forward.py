"""The forward kernel: one program walks one row of the schedule for one head.

FlashAttention-2 (arXiv 2307.08691, section 3.1) with online softmax in base 2. What differs from
a padded kernel is the grid: programs are the tiles that exist, long users first. Blocks that the
mask leaves whole are computed without it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.blocks import (
    FAR,
    finite,
    lse2_of,
    weighted_mean,
    whole_blocks,
)
from jagged_kernels.attention.meeting import RANGES, Meeting, MeetShape
from jagged_kernels.attention.plain.short import launch_short_forward
from jagged_kernels.attention.plans import PLANS, Call, LaunchPlan, empty_lse
from jagged_kernels.attention.scores.bias_launch import NO_BIAS, BiasShape, launch_options
from jagged_kernels.attention.scores.triton_bias import add_bias, bias_place, keep_block
from jagged_kernels.attention.seen.triton_sums import SEEN_BLOCK, add_weighted, size_of_sums
from jagged_kernels.attention.triton_meeting import (
    factor_of_user,
    inside_block,
    list_ends,
    listed_block,
    rule_of_row,
)
from jagged_kernels.core.backends import has_small_memory
from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import empty_as, rows_of_dims
from jagged_kernels.core.sizes import LaunchConfig
from jagged_kernels.device.arithmetic import LN2
from jagged_kernels.device.columns import factors, load_columns, scores_of
from jagged_kernels.device.memory import load_block, store_block, store_numbers
from jagged_kernels.schedule.policy.plain import config_of, forward_config, parts_of_tile
from jagged_kernels.schedule.row_access import load_part
from jagged_kernels.schedule.rows import rows_to_walk

_FAR = tl.constexpr(FAR)
_LN2 = tl.constexpr(LN2)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    *,
    tile_q: int,
    left: int,
    right: int,
    scale: float,
    bias: dict[str, Any] | None = None,
    meeting: Meeting = RANGES,
    with_lse: bool = True,
    short_offsets: Tensor | None = None,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """o [Tq, H, Dv] in q's dtype, and log2 of the sum of exponentials [Tq, H], float32.

    Args:
        with_lse: compute the latter too; else it is None.
        bias: from `scores.bias_launch.bias_arguments`, or None.
        meeting: which keys, where not the rows' ranges, and what a score becomes, where not its
            exponential.
        short_offsets: the users' offsets where `plain.short` takes the short ones, else None.
        config: launch options in place of the rule's.
    """
    q, k, v = rows_of_dims(q), rows_of_dims(k), rows_of_dims(v)
    tokens, heads, dim = q.shape
    dim_v = v.shape[2]
    o = empty_as(q)
    if dim_v != dim:
        o = torch.empty((tokens, heads, dim_v), dtype=q.dtype, device=q.device)
    lse2 = empty_lse(q) if with_lse else None
    if tokens == 0:
        return o, lse2
    bias = bias or NO_BIAS
    skips = short_offsets is not None
    call = Call.of(q, k, v, left=left, right=right, scale=scale)
    small_memory = has_small_memory(q.device)
    plan = _plan(call, tile_q, bias["BIAS"], meeting.constants, config, small_memory, skips)
    if count := rows_to_walk(rows, tokens, tile_q, skips=skips):
        launch(
            _forward_kernel,
            count * plan.programs,
            (q, k, v, o, lse2, rows, bias["bias"], meeting.arguments, plan.scale_log2, left, right),
            plan.constants,
            **plan.options,
        )
    if short_offsets is not None:
        band = {"left": left, "right": right}
        options = {"bias": bias, "meeting": meeting}
        launch_short_forward(q, k, v, o, lse2, short_offsets, call, **band, **options)
    return o, lse2


@lru_cache(PLANS)
def _plan(
    call: Call, tile: int, BIAS: BiasShape, meets: MeetShape, config: LaunchConfig | None,
    small_memory: bool, skips: bool,
) -> LaunchPlan:  # fmt: skip
    numbers = (call.pad_dim, call.element_size, call.precision)
    config = config or config_of(forward_config, *numbers, listed=bool(meets.groups))
    parts = parts_of_tile(tile, call.pad_dim, call.element_size, small_memory)
    block = meets.block_of(tile, config.block)
    shape = call.shape(tile=tile, parts=parts, block=block, skips=skips, meets=meets)
    constants = {"BIAS": BIAS, "WEIGHT": meets.weight}
    options = launch_options(BIAS, config, call.element_size)
    return call.plan(parts * shape.HEADS, shape, options, **constants)


@triton.jit(do_not_specialize=["left", "right"])
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse2_ptr, rows_ptr, bias, meets, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = S.HEADS
    TILE: tl.constexpr = S.TILE
    BLOCK: tl.constexpr = S.BLOCK
    PRECISION: tl.constexpr = S.PRECISION
    slot, head = tl.program_id(0) // HEADS, (tl.program_id(0) % HEADS).to(tl.int64)
    row = slot // S.PARTS
    q_start, q_end, k_start, k_end, shift = load_part(
        rows_ptr, row, slot % S.PARTS, left, right, S.NARROWS_LEFT, S.NARROWS_RIGHT, TILE, S.PARTS,
        S.SKIPS,
    )  # fmt: skip
    if q_start == q_end:
        return
    q_ptr += head * S.Q_STRIDE_H
    k_ptr += (head // S.GROUP) * S.K_STRIDE_H
    v_ptr += (head // S.GROUP) * S.V_STRIDE_H
    q = load_columns(q_ptr, q_start, q_end, S.Q_STRIDE_T, TILE, S.D, S.PAD_D, PRECISION, NEGATE)
    q = factors(q, PRECISION)
    place = 0  # a tuple cannot hold None
    if BIAS.ANY:
        place = bias_place(bias, rows_ptr, row, head, BIAS)
    ends = (k_start, k_end)
    if S.GROUPS:
        ends = list_ends(meets, rows_ptr, row, q_start, k_end, shift, head, S)
    rule = 0
    if S.RULED:
        rule = rule_of_row(meets, rows_ptr, row, k_start, k_end, shift, False)
    by = (bias, place, meets, rule)
    scale = 1.0
    if WEIGHT is not None:
        scale = factor_of_user(meets, rows_ptr, row)
    row = (q_start, q_end, k_start, k_end, shift, head)
    acc, top, total, reach = nothing_seen(TILE, S.PAD_DV)
    if S.GROUPS:
        acc, top, total, reach = walk(
            q, k_ptr, v_ptr, row, ends, scale_log2, left, right, by, S, BIAS, WEIGHT, False
        )
    elif k_end - k_start <= BLOCK:
        # Most users: no walk, and everything is asked of the memory at once.
        k = load_columns(k_ptr, k_start, k_end, S.K_STRIDE_T, BLOCK, S.D, S.PAD_D, PRECISION)
        v = load_block(v_ptr, k_start, k_end, S.V_STRIDE_T, BLOCK, S.DV, S.PAD_DV)
        acc, top, total, reach = _attend(
            acc, top, total, reach, q, k, v, k_start, True, row, scale_log2, left, right, by,
            S, BIAS, WEIGHT, False,
        )  # fmt: skip
    else:
        acc, top, total, reach = walk(
            q, k_ptr, v_ptr, row, ends, scale_log2, left, right, by, S, BIAS, WEIGHT, False
        )
    if S.MASKED:
        reach = tl.where(size_of_sums(acc) < float("inf"), reach, float("inf"))
    SCALES: tl.constexpr = BIAS.ANY or WEIGHT is not None or k_ptr.dtype.element_ty == tl.float32
    if (S.MASKED or not SCALES) and tl.max(reach, 0) > _FAR:
        acc, top, total, reach = walk(
            q, k_ptr, v_ptr, row, ends, scale_log2, left, right, by, S, BIAS, WEIGHT, True
        )

    if WEIGHT is None:
        store_tile(acc, top, total, o_ptr, lse2_ptr, row, S)
    else:
        o_ptr += head * S.DV
        store_block(o_ptr, acc * scale, q_start, q_end, HEADS * S.DV, TILE, S.DV, S.PAD_DV)


@triton.jit
def store_tile(acc, top, total, o_ptr, lse2_ptr, row, S: tl.constexpr):
    """o and lse of a tile; of a query that saw nothing 0 and -inf."""
    q_start, q_end, _, _, _, head = row
    acc = weighted_mean(acc, total)
    store_block(o_ptr + head * S.DV, acc, q_start, q_end, S.HEADS * S.DV, S.TILE, S.DV, S.PAD_DV)
    if lse2_ptr is not None:
        store_numbers(lse2_ptr + head, lse2_of(top, total), q_start, q_end, S.HEADS, S.TILE)


@triton.jit
def nothing_seen(TILE: tl.constexpr, PAD_DV: tl.constexpr):
    """Before the first key: the sum of weights * v, what weights are relative to (log2), the sum
    of weights, and the largest |scaled score| so far."""
    acc = tl.zeros([TILE, PAD_DV], tl.float32)
    top = tl.full([TILE], float("-inf"), tl.float32)
    return acc, top, tl.zeros([TILE], tl.float32), tl.zeros([TILE], tl.float32)


@triton.jit
def walk(
    q, k_ptr, v_ptr, row, ends, scale_log2, left, right, by,
    S: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """`_attend` for all key blocks of the row; q as `factors` makes it.

    Args:
        ends: of the row's entries where it has a list.
        by: (bias, place, meets, rule).
    """
    SEEN: tl.constexpr = EXACT and S.MASKED
    BLOCK: tl.constexpr = SEEN_BLOCK if SEEN else S.BLOCK
    PRECISION: tl.constexpr = S.PRECISION
    q_start, q_end, first, k_end, shift, _ = row
    acc, top, total, reach = nothing_seen(S.TILE, S.PAD_DV)
    if S.GROUPS:
        _, _, meets, _ = by
        LISTED: tl.constexpr = S.TILE * S.PARTS
        PER_ENTRY: tl.constexpr = LISTED // BLOCK
        begin, end = ends
        for index in tl.range(0, (end - begin) * PER_ENTRY, num_stages=1 if SEEN else None):
            k_start, cut = listed_block(meets, begin, index, first, k_end, LISTED, BLOCK)
            k = load_columns(k_ptr, k_start, k_end, S.K_STRIDE_T, BLOCK, S.D, S.PAD_D, PRECISION)
            v = load_block(v_ptr, k_start, k_end, S.V_STRIDE_T, BLOCK, S.DV, S.PAD_DV)
            acc, top, total, reach = _attend(
                acc, top, total, reach, q, k, v, k_start, cut, row, scale_log2, left, right, by,
                S, BIAS, WEIGHT, EXACT,
            )  # fmt: skip
    else:
        whole_start, whole_end = whole_blocks(
            q_start, q_end, first, k_end, shift, left, right, S.HAS_LEFT, S.HAS_RIGHT, BLOCK
        )
        for k_start in tl.range(first, k_end, BLOCK, num_stages=1 if SEEN else None):
            k = load_columns(k_ptr, k_start, k_end, S.K_STRIDE_T, BLOCK, S.D, S.PAD_D, PRECISION)
            v = load_block(v_ptr, k_start, k_end, S.V_STRIDE_T, BLOCK, S.DV, S.PAD_DV)
            cut = (k_start < whole_start) | (k_start >= whole_end)
            acc, top, total, reach = _attend(
                acc, top, total, reach, q, k, v, k_start, cut, row, scale_log2, left, right, by,
                S, BIAS, WEIGHT, EXACT,
            )  # fmt: skip
    return acc, top, total, reach


@triton.jit
def _attend(
    acc, top, total, reach, q, k, v, k_start, cut, row, scale_log2, left, right, by,
    S: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Online softmax over one key block, or its weights by a policy.

    Weights are exp2(scores * scale - top) in one instruction. Rounding of top = max * scale moves
    all weights of a query alike and cancels, but where top is enormous it could move them out of
    range; EXACT then rounds both products and subtracts nothing but equals at the top. It also
    sums over what is seen alone, where something is hidden. float32 rounds both always: of one key
    the weight is 1 and o is its v, to the bit, which the backward builds on.
    """
    TILE: tl.constexpr = S.TILE
    PRECISION: tl.constexpr = S.PRECISION
    BLOCK: tl.constexpr = v.shape[0]
    SEEN: tl.constexpr = EXACT and S.MASKED
    ROUNDS: tl.constexpr = EXACT or v.dtype == tl.float32
    SCALES: tl.constexpr = BIAS.ANY or ROUNDS or WEIGHT is not None
    bias, place, _, rule = by
    q_start, q_end, _, k_end, shift, head = row
    scores = scores_of(q, factors(k, PRECISION), PRECISION)
    if SCALES:
        # `fma` with 0, because a plain product would be fused with what comes next.
        scales = tl.zeros(scores.shape, tl.float32) + scale_log2
        scores = tl.fma(scores, scales, tl.zeros(scores.shape, tl.float32))
    if BIAS.ANY:
        q_token = (q_start + tl.arange(0, TILE))[:, None]
        k_token = (k_start + tl.arange(0, BLOCK))[None, :]
        scores, _ = add_bias(
            scores, bias, place, q_token, k_token, q_end, k_end, shift, head, BIAS, S.HEADS
        )
    if WEIGHT is not None:
        scores = WEIGHT(scores * _LN2)
    if SEEN or cut:
        inside = inside_block(
            rule, q_start, k_start, k_end, shift, left, right, S, TILE, BLOCK, False
        )
        scores = tl.where(inside, scores, float("-inf") if WEIGHT is None else 0.0)
    if WEIGHT is not None:
        weights, new_top = scores, top
    else:
        block_top = tl.max(scores, 1)
        if not SCALES:
            block_top = block_top * scale_log2
        new_top = tl.maximum(top, block_top)
        finite_top = finite(new_top)
        if SCALES:
            weights = tl.exp2(scores - finite_top[:, None])
        else:
            weights = tl.exp2(scores * scale_log2 - finite_top[:, None])
            reach = tl.maximum(reach, tl.abs(finite_top))
        correction = tl.exp2(top - finite_top)
        total = total * correction + tl.sum(weights, 1)
    if BIAS.DROPS:
        weights = weights * keep_block(bias, place, q_token, k_token)
    if WEIGHT is None:
        acc = acc * correction[:, None]
    acc = add_weighted(acc, weights, v, inside if SEEN else None, PRECISION)
    return acc, new_top, total, reach
