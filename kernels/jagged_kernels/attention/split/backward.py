"""The backward of few queries over long histories: one pass over keys and values.

Where one tile holds all of a user's queries, no other program adds to the dK and dV of a key block
that a program walks: they are written at once, summed over the heads that share the keys by the
matrix product itself (their queries stand in one tile). dQ is summed along the row, and over the
pieces of a row that was cut by a second launch, in order. So K and V are read once and dK and dV
written once; probabilities are recomputed from lse (FlashAttention-2, arXiv 2307.08691, 3.1.2), and
weights by a policy from scores alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.blocks import band, finite, probability
from jagged_kernels.attention.meeting import RANGES, Meeting, MeetShape
from jagged_kernels.attention.plans import PLANS, Call, LaunchPlan
from jagged_kernels.attention.scores.bias_launch import (
    NO_BIAS,
    BiasShape,
    BiasSlots,
    launch_options,
)
from jagged_kernels.attention.scores.triton_bias import add_bias, bias_place, keep_block
from jagged_kernels.attention.seen.triton_sums import SEEN_BLOCK, add_seen, is_bad, size_of_sums
from jagged_kernels.attention.split.bias_sums import sum_by_bias
from jagged_kernels.attention.split.blocks import (
    ends_of_walk,
    heads_of_pack,
    load_pack,
    load_pack_numbers,
    load_span,
    places,
    slot_of,
    start_of_block,
    store_pack,
    store_partial,
)
from jagged_kernels.attention.split.merge import merge_sums
from jagged_kernels.attention.split.unseen import zero_unseen
from jagged_kernels.attention.triton_meeting import factor_of_user
from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import empty_as, rows_of_dims
from jagged_kernels.core.sizes import LaunchConfig
from jagged_kernels.device.arithmetic import LN2, LOG2_E, add_factors
from jagged_kernels.device.float32 import dot_factors, factor, transposed
from jagged_kernels.device.memory import load_block, store_block
from jagged_kernels.schedule.row_access import load_row
from jagged_kernels.schedule.spans import (
    Partition,
    pack_size,
    split_backward_config,
    split_backward_fits,
)

_LOG2_E = tl.constexpr(LOG2_E)
_LN2 = tl.constexpr(LN2)


def launch_split_backward(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor | None,
    rows: Tensor,
    partition: Partition,
    *,
    rows_t: Tensor | None,
    tile_q: int,
    tile_k: int,
    left: int,
    right: int,
    scale: float,
    bias: dict[str, Any] | None = None,
    bias_slots: BiasSlots | None = None,
    queries: int = 0,
    meeting: Meeting = RANGES,
    listed: int = 0,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, in the dtypes of q, k and v. `o` and `lse2` are the forward's, and
    not read where weights are no softmax.

    Only for rows of which no user has more than one (at most `tile_q` queries a user), and heads
    that fit one tile (`split_backward_fits`): otherwise several programs would write one dK.

    Args:
        partition: of `rows`, with `partition.block` keys a block.
        rows_t, tile_k: the transpose's rows and their tile, to zero dK and dV of keys that no
            query sees; None where it is known that every key is seen (every user has a query,
            and there is no window). Not read where keys are listed: what is not is 0.
        bias: from `bias_launch.bias_arguments`, or None; its gradients are left in `bias_slots`, in
            rows one for each of `partition.programs`.
        queries: the most that a user has, `tile_q` if 0: gradients of a bias take memory for so
            many scores of each key and head.
        meeting, listed: as the forward's.
        config: launch options in place of the rule's; its block is not used.

    Raises:
        ValueError: the heads that share keys do not fit one tile.
    """
    q, k, v, d_o = rows_of_dims(q), rows_of_dims(k), rows_of_dims(v), rows_of_dims(d_o)
    tokens, heads, dim = q.shape
    kv_heads, dim_v = v.shape[1:]
    head_dim = max(dim, dim_v)
    if not split_backward_fits(heads, kv_heads, tile_q, head_dim, q.element_size(), q.device):
        raise ValueError(
            f"{heads // kv_heads} heads of {tile_q} queries and head_dim {head_dim} do not fit one "
            "tile; was the schedule built for this head_dim?"
        )
    dq = empty_as(q)
    has_lists = meeting.constants.groups > 0
    allocate = torch.zeros if has_lists else torch.empty
    dk = allocate(k.shape, dtype=k.dtype, device=k.device)
    dv = allocate(v.shape, dtype=v.dtype, device=v.device)
    d_lse2 = None if d_lse2 is None else d_lse2.contiguous()
    call = Call.of(q, k, v, d_o, left=left, right=right, scale=scale)
    bias = bias or NO_BIAS
    tiles = (tile_q, max(listed // tile_q, 1))
    plan, pack = _plan(call, tiles, partition.block, bias["BIAS"], meeting.constants, config)
    slots = (partition.programs if partition.cuts else 0, 2, kv_heads, pack, dim)
    partials = torch.empty(slots, dtype=torch.float32, device=q.device)
    if rows_t is not None and k.shape[0] and not has_lists:
        zero_unseen(dk, dv, rows_t, tile_k=tile_k, left=left, right=right)
    d_scores, lines = None, (None, None)
    if bias_slots is not None and any(slot is not None for slot in bias_slots):
        lines = (queries or tile_q, k.shape[0])
        d_scores = torch.empty((heads, *lines), dtype=torch.float32, device=q.device)
    if tokens:
        launch(
            _split_backward_kernel,
            partition.programs * kv_heads,
            (q, k, v, o, d_o, lse2, d_lse2, dq, dk, dv, partials, rows, partition.spans,
             bias["bias"], d_scores, *lines, meeting.arguments,
             scale, plan.scale_log2, left, right),
            plan.constants,
            **plan.options,
        )  # fmt: skip
        if partition.cuts and partition.programs > 1:
            members = heads // kv_heads
            merge_sums(partials, dq, rows, partition, members=members, tile=tile_q, scale=scale)
    if d_scores is not None and bias_slots is not None:
        sum_by_bias(d_scores, rows, partition, bias, bias_slots, meeting, plan.constants["S"])
    return dq, dk, dv


@lru_cache(PLANS)
def _plan(
    call: Call, tiles: tuple[int, int], block: int, BIAS: BiasShape, meets: MeetShape,
    config: LaunchConfig | None,
) -> tuple[LaunchPlan, int]:  # fmt: skip
    """With the rows of a query tile; programs are those of a span. `tiles` as the forward's."""
    tile, parts = tiles
    heads, kv_heads = call.q[0], call.k[0]
    pack = pack_size(heads // kv_heads, tile)
    config = config or split_backward_config(call.pad_dim, call.element_size, pack)
    shape = call.shape(tile=tile * parts, parts=parts, block=block, meets=meets)
    options = launch_options(BIAS, config, call.element_size)
    constants = {"PACK": pack, "BIAS": BIAS, "WEIGHT": meets.weight, "D_SCORE": meets.d_score}
    return call.plan(kv_heads, shape, options, **constants), pack


@triton.jit(do_not_specialize=["queries", "k_tokens", "left", "right"])
def _split_backward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse2_ptr, d_lse2_ptr, dq_ptr, dk_ptr, dv_ptr,
    partial_ptr, rows_ptr, spans_ptr, bias, d_scores_ptr, queries, k_tokens, meets,
    scale, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, PACK: tl.constexpr, BIAS: tl.constexpr,
    WEIGHT: tl.constexpr, D_SCORE: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = S.HEADS
    MEMBERS: tl.constexpr = S.GROUP
    D: tl.constexpr = S.D
    DV: tl.constexpr = S.DV
    KV_HEADS: tl.constexpr = HEADS // MEMBERS
    span, kv_head = tl.program_id(0) // KV_HEADS, (tl.program_id(0) % KV_HEADS).to(tl.int64)
    first_row, first_block, last_row, last_block = load_span(spans_ptr, span)
    row_count = last_row + (last_block > 0).to(tl.int32) - first_row
    if row_count == 0:
        return
    head = kv_head * MEMBERS
    q_ptr += head * S.Q_STRIDE_H
    do_ptr += head * S.DO_STRIDE_H
    o_ptr += head * DV
    if WEIGHT is None:
        lse2_ptr += head
    if d_lse2_ptr is not None:
        d_lse2_ptr += head
    dq_ptr += head * D
    k_ptr += kv_head * S.K_STRIDE_H
    v_ptr += kv_head * S.V_STRIDE_H
    dk_ptr += kv_head * D
    dv_ptr += kv_head * DV

    for index in tl.range(0, row_count, num_stages=1):
        row = first_row + index
        q_start, q_end, k_start, k_end, shift = load_row(rows_ptr, row)
        q, d_o, of_query = _load_queries(
            q_ptr, do_ptr, o_ptr, lse2_ptr, d_lse2_ptr, q_start, q_end, S, PACK, WEIGHT
        )
        if WEIGHT is not None:
            of_query = (factor_of_user(meets, rows_ptr, row), 0.0)
        place, q_token, heads = 0, 0, 0
        if BIAS.ANY:
            q_token, heads = heads_of_pack(q_start, q_end, head, MEMBERS, S.TILE, PACK)
            q_token, heads = q_token[None, :], heads[None, :]
            place = bias_place(bias, rows_ptr, row, heads, BIAS)
        by = (bias, place, q_token, heads, d_scores_ptr, queries, k_tokens)
        if S.MASKED:
            # dK and dV of many blocks are not looked at. All that could touch them comes from the
            # queries, or touches dQ, too.
            bad = is_bad(size_of_sums(q.to(tl.float32)) + size_of_sums(d_o.to(tl.float32)))
            if WEIGHT is None:
                bad = bad | is_bad(tl.abs(of_query[0]) + tl.abs(of_query[1]))
        from_block = tl.where(index == 0, first_block, 0)
        is_cut = row == last_row
        start, end, begin = ends_of_walk(
            meets, rows_ptr, row, q_start, k_start, k_end, shift, head, from_block, last_block,
            is_cut, S,
        )  # fmt: skip
        of_list = (meets, begin, k_start)
        dq = _walk_span(
            q, d_o, of_query, k_ptr, v_ptr, dk_ptr, dv_ptr, start, end, q_start, q_end, k_end,
            shift, scale, scale_log2, left, right, by, of_list, S, NEGATE, PACK, BIAS, WEIGHT,
            D_SCORE, False,
        )  # fmt: skip
        if S.MASKED and (bad | is_bad(size_of_sums(dq))):
            # Not before other threads have written what is written again.
            tl.debug_barrier()
            dq = _walk_span(
                q, d_o, of_query, k_ptr, v_ptr, dk_ptr, dv_ptr, start, end, q_start, q_end, k_end,
                shift, scale, scale_log2, left, right, by, of_list, S, NEGATE, PACK, BIAS, WEIGHT,
                D_SCORE, True,
            )  # fmt: skip
        if is_cut | (from_block > 0):
            slot = slot_of(span, (from_block == 0).to(tl.int32), kv_head, KV_HEADS)
            store_partial(partial_ptr + slot * (PACK * D), dq, PACK, D, S.PAD_D)
        else:
            store_pack(
                dq_ptr, dq * scale, q_start, q_end, HEADS * D, D,
                MEMBERS, S.TILE, PACK, D, S.PAD_D,
            )  # fmt: skip


@triton.jit
def _load_queries(
    q_ptr, do_ptr, o_ptr, lse2_ptr, d_lse2_ptr, start, end, S: tl.constexpr, PACK: tl.constexpr,
    WEIGHT: tl.constexpr,
):  # fmt: skip
    """(q, dO, (lse2, delta)) of a row's queries, for the heads of a tile; delta is
    rowsum(o * dO) - d_lse. Weights by a policy have neither."""
    HEADS: tl.constexpr = S.HEADS
    MEMBERS: tl.constexpr = S.GROUP
    TILE: tl.constexpr = S.TILE
    DV: tl.constexpr = S.DV
    q = load_pack(q_ptr, start, end, S.Q_STRIDE_T, S.Q_STRIDE_H, MEMBERS, TILE, PACK, S.D, S.PAD_D)
    d_o = load_pack(
        do_ptr, start, end, S.DO_STRIDE_T, S.DO_STRIDE_H, MEMBERS, TILE, PACK, DV, S.PAD_DV
    )
    of_query = (0.0, 0.0)
    if WEIGHT is None:
        o = load_pack(o_ptr, start, end, HEADS * DV, DV, MEMBERS, TILE, PACK, DV, S.PAD_DV)
        lse2 = load_pack_numbers(lse2_ptr, start, end, HEADS, MEMBERS, TILE, PACK)
        if d_lse2_ptr is not None:
            d_lse2 = load_pack_numbers(d_lse2_ptr, start, end, HEADS, MEMBERS, TILE, PACK)
        lse2 = finite(lse2)
        delta = tl.sum(o.to(tl.float32) * d_o.to(tl.float32), 1)
        if d_lse2_ptr is not None:
            delta -= d_lse2 * _LOG2_E
        of_query = (lse2, delta)
    return q, d_o, of_query


@triton.jit
def _walk_span(
    q_numbers, do_numbers, of_query, k_ptr, v_ptr, dk_ptr, dv_ptr, start, end, q_start, q_end,
    k_end, shift, scale, scale_log2, left, right, by, of_list,
    S: tl.constexpr, NEGATE: tl.constexpr, PACK: tl.constexpr, BIAS: tl.constexpr,
    WEIGHT: tl.constexpr, D_SCORE: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """dK and dV of the key blocks that start in [start, end), stored; returns dQ / scale.

    Keys stand in the rows of the scores: they are many, and dK and dV come out as they are stored.
    With SEEN, sums over what is seen alone (`triton_sums`).

    Args:
        of_query: (lse2, delta), or (1 / n, 0) of weights by a policy.
        by: (bias, place, [1, PACK] queries, heads, where the scores' gradients are left for
            `bias_sums` or None, and how that is shaped).
        of_list: (meets, begin, the user's first key), where `start` and `end` are numbers of blocks
            of a list.
    """
    KV_HEADS: tl.constexpr = S.HEADS // S.GROUP
    PRECISION: tl.constexpr = S.PRECISION
    BLOCK: tl.constexpr = SEEN_BLOCK if SEEN else S.BLOCK
    D: tl.constexpr = S.D
    DV: tl.constexpr = S.DV
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    seen_from = (q_start + shift + tl.arange(0, PACK) % S.TILE)[None, :]
    _, _, exists = places(q_start, q_end, S.GROUP, S.TILE, PACK)
    exists = exists[None, :]
    bias, place, q_token, heads, d_scores_ptr, queries, k_tokens = by
    PAD_D: tl.constexpr = S.PAD_D
    PAD_DV: tl.constexpr = S.PAD_DV
    dq = tl.zeros([PACK, PAD_D], tl.float32)
    q, d_o = factor(q_numbers, PRECISION), factor(do_numbers, PRECISION)
    meets, begin, k_start = of_list
    # Of a list the walk counts blocks, which may be smaller than the spans'.
    STEP: tl.constexpr = 1 if S.GROUPS else BLOCK
    if S.GROUPS:
        start, end = start * (S.BLOCK // BLOCK), end * (S.BLOCK // BLOCK)
    for at in tl.range(start, end, STEP, num_stages=1 if SEEN else None):
        block_start = start_of_block(at, meets, begin, k_start, k_end, S, BLOCK)
        k_numbers = load_block(k_ptr, block_start, k_end, S.K_STRIDE_T, BLOCK, D, S.PAD_D)
        v = load_block(v_ptr, block_start, k_end, S.V_STRIDE_T, BLOCK, DV, S.PAD_DV)
        k, v = factor(k_numbers, PRECISION), factor(v, PRECISION)
        unit = scale_log2 if WEIGHT is None or BIAS.ADDS else scale_log2 * _LN2
        scores = dot_factors(k, transposed(q, PRECISION), PRECISION) * unit
        if NEGATE:
            scores = -scores
        token = (block_start + tl.arange(0, BLOCK))[:, None]
        inside = band(seen_from, token, k_end, left, right, S.HAS_LEFT, S.HAS_RIGHT)
        if BIAS.ADDS:
            scores, _bucket = add_bias(
                scores, bias, place, q_token, token, q_end, k_end, shift, heads, BIAS, S.HEADS
            )
            if WEIGHT is not None:
                scores *= _LN2
        if BIAS.ADDS or WEIGHT is not None:
            # A place without a query has a score of 0, of which a policy may make anything.
            inside = inside & exists
        if WEIGHT is None:
            scores = tl.where(inside, scores, float("-inf"))
            weights = probability(scores, of_query[0][None, :], True)
        else:
            weights = tl.where(inside, WEIGHT(scores), 0.0)
        kept = weights
        if BIAS.DROPS:
            keep = keep_block(bias, place, q_token, token)
            kept *= keep
        kept = kept.to(dtype)
        if SEEN:
            dv = tl.zeros([BLOCK, PAD_DV], tl.float32)
            dv = add_seen(dv, kept, do_numbers, inside, PRECISION)
        else:
            dv = dot_factors(factor(kept, PRECISION), d_o, PRECISION)
        if WEIGHT is not None:
            dv *= of_query[0]
        store_block(dv_ptr, dv, block_start, k_end, KV_HEADS * DV, BLOCK, DV, S.PAD_DV)
        d_weights = dot_factors(v, transposed(d_o, PRECISION), PRECISION)
        if BIAS.DROPS:
            d_weights *= keep
        if WEIGHT is None:
            d_scores = weights * (d_weights - of_query[1][None, :])
        else:
            d_scores = tl.where(inside, D_SCORE(scores, d_weights * of_query[0]), 0.0)
        if BIAS.ADDS:
            # What is hidden is in no sum of a bias' gradient: these sums are not looked at.
            d_scores = tl.where(inside, d_scores, 0.0)
            if d_scores_ptr is not None:
                line = heads * queries + (q_token - q_start)
                address = d_scores_ptr + line * k_tokens + token
                tl.store(address, d_scores, mask=(q_token < q_end) & (token < k_end))
        d_scores = d_scores.to(dtype)
        if SEEN:
            dk = tl.zeros([BLOCK, PAD_D], tl.float32)
            dk = add_seen(dk, d_scores, q_numbers, inside, PRECISION)
        else:
            d_scores_left = factor(d_scores, PRECISION)
            dk = dot_factors(d_scores_left, q, PRECISION)
        store_block(dk_ptr, dk * scale, block_start, k_end, KV_HEADS * D, BLOCK, D, S.PAD_D)
        if SEEN:
            seen = tl.trans(inside)
            dq = add_seen(dq, tl.trans(d_scores), k_numbers, seen, PRECISION)
        else:
            dq = add_factors(dq, transposed(d_scores_left, PRECISION), k, dtype, PRECISION)
    return dq
