"""The forward of few queries over long histories: programs walk spans of equal cost.

A program takes its span of the partition (LeanAttention, arXiv 2405.10480) for one group of heads,
row after row. A row that lies in the span whole is finished at once; of a row that is cut, each
program keeps its online softmax state, and a second launch merges them. Weights that are a function
of each score alone have no such state: the pieces are sums, and are added up. Keys and values are
read once, whatever the number of queries and of heads that share them: one after another, or from
where the pages of a cache say.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.blocks import band, finite, lse2_of, weighted_mean
from jagged_kernels.attention.meeting import RANGES, Meeting, MeetShape
from jagged_kernels.attention.plans import PLANS, Call, LaunchPlan, empty_lse
from jagged_kernels.attention.scores.bias_launch import NO_BIAS, BiasShape, launch_options
from jagged_kernels.attention.scores.triton_bias import add_bias, bias_place, keep_block
from jagged_kernels.attention.seen.triton_sums import SEEN_BLOCK, add_weighted, is_bad, size_of_sums
from jagged_kernels.attention.split.blocks import (
    ends_of_walk,
    heads_of_pack,
    load_pack,
    load_span,
    slot_of,
    start_of_block,
    store_pack,
    store_pack_numbers,
    store_partial,
)
from jagged_kernels.attention.split.merge import merge_states, merge_sums
from jagged_kernels.attention.split.pages import load_slots, slots_of_block
from jagged_kernels.attention.triton_meeting import factor_of_user
from jagged_kernels.core.backends import has_small_memory
from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import LaunchConfig
from jagged_kernels.device.arithmetic import LN2
from jagged_kernels.device.float32 import dot_factors, factor, transposed
from jagged_kernels.device.memory import load_block
from jagged_kernels.schedule.row_access import load_row, load_user
from jagged_kernels.schedule.spans import (
    Partition,
    members_in_tile,
    pack_size,
    paged_config,
    split_forward_config,
)

_LN2 = tl.constexpr(LN2)


def launch_split_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    partition: Partition,
    *,
    tile_q: int,
    left: int,
    right: int,
    scale: float,
    with_lse: bool = True,
    bias: dict[str, Any] | None = None,
    meeting: Meeting = RANGES,
    listed: int = 0,
    pages: Tensor | None = None,
    page_size: int = 0,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """o [Tq, H, Dv] in q's dtype, and log2 of the sum of exponentials [Tq, H], float32.

    Gives what `launch_forward` gives for the same rows, for any rows; made for those where keys
    are many and queries few.

    Args:
        with_lse: compute the latter too; else it is None.
        bias: from `scores.bias_launch.bias_arguments`, or None.
        meeting: which keys, where not the rows' ranges, and what a score becomes, where not its
            exponential. Heads that share keys have one list.
        listed: tokens of a block of lists, no less than the queries of a user.
        partition: of `rows`, with `partition.block` keys a block.
        pages: [users, G, P] int32, where keys and values lie in k and v, pages of `page_size`
            tokens, G lists for all key heads or one for each (`cache.slots`). Rows then count keys
            as if those of all users lay one after another, and there is no limit on the left.
        config: launch options in place of the rule's; its block is not used.
    """
    q, k, v = rows_of_dims(q), rows_of_dims(k), rows_of_dims(v)
    tokens, heads, _ = q.shape
    dim_v = v.shape[2]
    o = torch.empty((tokens, heads, dim_v), dtype=q.dtype, device=q.device)
    lse2 = empty_lse(q) if with_lse else None
    if tokens == 0:
        return o, lse2
    call = Call.of(q, k, v, left=left, right=right, scale=scale)
    paged = None if pages is None else _Paged(page_size, pages.shape[1], has_small_memory(q.device))
    bias = bias or NO_BIAS
    BIAS: BiasShape = bias["BIAS"]
    tiles = (tile_q, max(listed // tile_q, 1))
    plan, pack = _plan(call, tiles, partition.block, paged, BIAS, meeting.constants, config)
    groups, programs = plan.programs, partition.programs
    pointwise = meeting.constants.weight is not None
    # Two states a program: of the row it goes on with and of the one it begins.
    numbers = dim_v if pointwise else dim_v + 2
    slots = (programs if partition.cuts else 0, 2, groups, pack * numbers)
    states = torch.empty(slots, dtype=torch.float32, device=q.device)
    scale_log2 = plan.scale_log2
    page_count, page_limit = None, None
    if pages is not None:
        page_count, page_limit = pages.shape[2], k.shape[0] // page_size
    launch(
        _split_forward_kernel,
        programs * groups,
        (q, k, v, o, lse2, states, rows, partition.spans, bias["bias"], meeting.arguments,
         scale_log2, left, right, pages, page_count, page_limit),
        plan.constants,
        **plan.options,
    )  # fmt: skip
    if partition.cuts and programs > 1:
        tile = {"members": heads // groups, "tile": tile_q}
        if pointwise:
            merge_sums(states, o, rows, partition, **tile, scale=1.0)
        else:
            # Scores to which a bias was added are scaled.
            unit = 1.0 if BIAS.ADDS else scale_log2
            merge_states(states, o, lse2, rows, partition, **tile, scale_log2=unit)
    return o, lse2


class _Paged(NamedTuple):
    """Keys and values in pages of `page_size` tokens, for `small_memory` of `has_small_memory`."""

    page_size: int
    lists: int
    small_memory: bool


@lru_cache(PLANS)
def _plan(
    call: Call, tiles: tuple[int, int], block: int, paged: _Paged | None, BIAS: BiasShape,
    meets: MeetShape, config: LaunchConfig | None,
) -> tuple[LaunchPlan, int]:  # fmt: skip
    """With the rows of a query tile; programs are those of a span. tiles: queries, and how many
    times as many a list's tile has."""
    tile, parts = tiles
    heads, kv_heads = call.q[0], call.k[0]
    members = members_in_tile(heads, kv_heads, tile)
    pack = pack_size(members, tile)
    if config is None:
        config = split_forward_config(call.pad_dim, call.element_size, pack)
        if paged is not None:
            config = paged_config(config, call.element_size, pack, paged.small_memory)
    shape = call.shape(tile=tile * parts, parts=parts, block=block, meets=meets)
    options = launch_options(BIAS, config, call.element_size)
    if shape.PAD_DV < 32:
        # Of 16 columns two warp groups take 8 each. Of float32 behind a mask ptxas (of Triton 3.6
        # and 3.7.1, for an H100) then made the second one's descriptors from registers that nobody
        # has written: results were wrong, or addresses.
        options["num_warps"] = min(options["num_warps"], 4)
    page, lists = (0, 0) if paged is None else paged[:2]
    constants: dict[str, Any] = {"MEMBERS": members, "PACK": pack, "PAGE": page, "LISTS": lists}
    constants |= {"BIAS": BIAS, "WEIGHT": meets.weight}
    return call.plan(heads // members, shape, options, **constants), pack


@triton.jit(do_not_specialize=["left", "right", "page_count", "page_limit"])
def _split_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse2_ptr, states_ptr, rows_ptr, spans_ptr, bias, meets,
    scale_log2, left, right, pages_ptr, page_count, page_limit,
    S: tl.constexpr, NEGATE: tl.constexpr, MEMBERS: tl.constexpr, PACK: tl.constexpr,
    PAGE: tl.constexpr, LISTS: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = S.HEADS
    TILE: tl.constexpr = S.TILE
    DV: tl.constexpr = S.DV
    PAD_DV: tl.constexpr = S.PAD_DV
    PRECISION: tl.constexpr = S.PRECISION
    GROUPS: tl.constexpr = HEADS // MEMBERS
    span, group = tl.program_id(0) // GROUPS, (tl.program_id(0) % GROUPS).to(tl.int64)
    first_row, first_block, last_row, last_block = load_span(spans_ptr, span)
    row_count = last_row + (last_block > 0).to(tl.int32) - first_row
    if row_count == 0:
        return
    head = group * MEMBERS
    q_ptr += head * S.Q_STRIDE_H
    k_ptr += (head // S.GROUP) * S.K_STRIDE_H
    v_ptr += (head // S.GROUP) * S.V_STRIDE_H
    o_ptr += head * DV
    if lse2_ptr is not None:
        lse2_ptr += head

    # One stage: Triton's pipeliner must leave the walk over rows alone.
    for index in tl.range(0, row_count, num_stages=1):
        row = first_row + index
        q_start, q_end, k_start, k_end, shift = load_row(rows_ptr, row)
        q = load_pack(
            q_ptr, q_start, q_end, S.Q_STRIDE_T, S.Q_STRIDE_H, MEMBERS, TILE, PACK, S.D, S.PAD_D
        )
        if NEGATE:
            q = -q
        q = factor(q, PRECISION)
        place, q_token, heads, first = 0, 0, 0, 0
        if BIAS.ANY:
            q_token, heads = heads_of_pack(q_start, q_end, head, MEMBERS, TILE, PACK)
            q_token, heads = q_token[:, None], heads[:, None]
            place = bias_place(bias, rows_ptr, row, heads, BIAS)
        list_ptr = None
        if PAGE > 0:
            first = k_start
            page_list = load_user(rows_ptr, row).to(tl.int64) * LISTS + (head // S.GROUP) % LISTS
            list_ptr = pages_ptr + page_list * page_count
            # A list has its user's keys alone, from place 0 on.
            shift -= k_start
            k_end -= k_start
            k_start = k_start * 0
            # Of a schedule for longer users than the cache has, nothing behind the list is read.
            k_end = tl.minimum(k_end, page_count * PAGE)
        from_block = tl.where(index == 0, first_block, 0)
        is_cut = row == last_row
        start, end, begin = ends_of_walk(
            meets, rows_ptr, row, q_start, k_start, k_end, shift, head, from_block, last_block,
            is_cut, S,
        )  # fmt: skip
        if PAGE > 0:
            end = tl.minimum(end, k_end)
        by = (bias, place, q_token, q_end, heads, first, meets, begin, k_start)
        acc, top, total = _attend_span(
            q, k_ptr, v_ptr, start, end, q_start, k_end, shift, scale_log2, left, right, by,
            list_ptr, page_limit, S, PACK, PAGE, BIAS, WEIGHT, False,
        )  # fmt: skip
        if S.MASKED and is_bad(size_of_sums(acc)):
            acc, top, total = _attend_span(
                q, k_ptr, v_ptr, start, end, q_start, k_end, shift, scale_log2, left, right, by,
                list_ptr, page_limit, S, PACK, PAGE, BIAS, WEIGHT, True,
            )  # fmt: skip
        if WEIGHT is not None:
            acc *= factor_of_user(meets, rows_ptr, row)
        if is_cut | (from_block > 0):
            slot = slot_of(span, (from_block == 0).to(tl.int32), group, GROUPS)
            if WEIGHT is None:
                state_ptr = states_ptr + slot * (PACK * (DV + 2))
                store_partial(state_ptr, acc, PACK, DV, PAD_DV)
                numbers_ptr = state_ptr + PACK * DV + tl.arange(0, PACK)
                tl.store(numbers_ptr, top)
                tl.store(numbers_ptr + PACK, total)
            else:
                store_partial(states_ptr + slot * (PACK * DV), acc, PACK, DV, PAD_DV)
        else:
            if WEIGHT is None:
                acc = weighted_mean(acc, total)
            store_pack(o_ptr, acc, q_start, q_end, HEADS * DV, DV, MEMBERS, TILE, PACK, DV, PAD_DV)
            if lse2_ptr is not None:
                lse2 = lse2_of(top if BIAS.ADDS else top * scale_log2, total)
                store_pack_numbers(lse2_ptr, lse2, q_start, q_end, HEADS, MEMBERS, TILE, PACK)


@triton.jit
def _attend_span(
    q, k_ptr, v_ptr, start, end, q_start, k_end, shift, scale_log2, left, right, by,
    list_ptr, page_limit, S: tl.constexpr, PACK: tl.constexpr, PAGE: tl.constexpr,
    BIAS: tl.constexpr, WEIGHT: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key blocks that start in [start, end): (acc, top, total), or weights
    by a policy, without 1 / n, which leave the last two alone. q as `factor` makes it; with SEEN,
    sums over what is seen alone (`triton_sums`).

    One loop with the mask in every block: the memory, not the arithmetic, is what takes time here,
    and a second loop for the last block would wait for its keys with nothing in flight.

    Args:
        start, end: or numbers of blocks of a list of keys.
        by: (bias, place, [PACK, 1] queries, their end, heads, what makes places in a list of pages
            tokens of the batch, meets, begin of the list of keys, the user's first key).
    """
    BLOCK: tl.constexpr = SEEN_BLOCK if SEEN else S.BLOCK
    PRECISION: tl.constexpr = S.PRECISION
    seen_from = (q_start + shift + tl.arange(0, PACK) % S.TILE)[:, None]
    top = tl.full([PACK], float("-inf"), tl.float32)
    total = tl.zeros([PACK], tl.float32)
    PAD_DV: tl.constexpr = S.PAD_DV
    acc = tl.zeros([PACK, PAD_DV], tl.float32)
    bias, place, q_token, q_end, heads, first, meets, begin, k_start = by
    # Of a list the walk counts blocks, which may be smaller than the spans'.
    STEP: tl.constexpr = 1 if S.GROUPS else BLOCK
    if S.GROUPS:
        start, end = start * (S.BLOCK // BLOCK), end * (S.BLOCK // BLOCK)
    for at in tl.range(start, end, STEP, num_stages=1 if SEEN else None):
        block_start = start_of_block(at, meets, begin, k_start, k_end, S, BLOCK)
        if PAGE > 0:
            slot, there = slots_of_block(list_ptr, block_start, k_end, page_limit, PAGE, BLOCK)
            k = load_slots(k_ptr, slot, there, S.K_STRIDE_T, S.D, S.PAD_D)
        else:
            k = load_block(k_ptr, block_start, k_end, S.K_STRIDE_T, BLOCK, S.D, S.PAD_D)
        k = transposed(factor(k, PRECISION), PRECISION)
        scores = dot_factors(q, k, PRECISION)
        token = (block_start + tl.arange(0, BLOCK))[None, :]
        unit = scale_log2
        k_token = token + first
        if BIAS.ADDS:
            scores, _bucket = add_bias(
                scores * scale_log2, bias, place, q_token, k_token, q_end, k_end + first,
                shift + first, heads, BIAS, S.HEADS,
            )  # fmt: skip
            unit = 1.0
        inside = band(seen_from, token, k_end, left, right, S.HAS_LEFT, S.HAS_RIGHT)
        if PAGE > 0:
            inside = inside & there[None, :]
        if WEIGHT is None:
            scores = tl.where(inside, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            finite_top = finite(new_top)
            # Subtract before scaling: exact, so no weight passes 1 however large the scores are.
            weights = tl.exp2((scores - finite_top[:, None]) * unit)
            correction = tl.exp2((top - finite_top) * unit)
            total = total * correction + tl.sum(weights, 1)
        else:
            weights = tl.where(inside, WEIGHT(scores * (unit * _LN2)), 0.0)
        if BIAS.DROPS:
            weights *= keep_block(bias, place, q_token, k_token)
        if PAGE > 0:
            v = load_slots(v_ptr, slot, there, S.V_STRIDE_T, S.DV, S.PAD_DV)
        else:
            v = load_block(v_ptr, block_start, k_end, S.V_STRIDE_T, BLOCK, S.DV, S.PAD_DV)
        if WEIGHT is None:
            acc = acc * correction[:, None]
            top = new_top
        acc = add_weighted(acc, weights, v, inside if SEEN else None, PRECISION)
    return acc, top, total
