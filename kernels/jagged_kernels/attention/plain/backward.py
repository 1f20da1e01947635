"""The backward kernels: dQ over the rows, then dK and dV over the rows of the transpose.

Probabilities are recomputed from lse (FlashAttention-2, arXiv 2307.08691, section 3.1.2). Every
output element is written by one program in one order, so there are no atomics, no float32 copy
of dQ in memory, and results do not change from run to run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.blocks import finite, probability, visible, whole_blocks
from jagged_kernels.attention.plain.short import launch_short_backward
from jagged_kernels.attention.plans import PLANS, Call, LaunchPlan
from jagged_kernels.attention.scores.bias_launch import (
    NO_BIAS,
    BiasShape,
    BiasSlots,
    launch_options,
)
from jagged_kernels.attention.scores.triton_bias import (
    add_bias,
    add_to_sums,
    bias_place,
    keep_block,
    store_sums,
    zero_sums,
)
from jagged_kernels.attention.seen.triton_sums import SEEN_BLOCK, add_weighted, is_bad, size_of_sums
from jagged_kernels.core.backends import has_small_memory
from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import LaunchConfig
from jagged_kernels.device.arithmetic import LOG2_E
from jagged_kernels.device.float32 import dot_factors, factor, transposed
from jagged_kernels.device.memory import (
    load_block,
    load_number_pairs,
    load_numbers,
    store_block,
    store_numbers,
)
from jagged_kernels.schedule.policy.plain import (
    SHORT_HISTORY,
    dkv_config,
    dq_config,
    parts_of_tile,
    short_dq_config,
    small_dkv_config,
)
from jagged_kernels.schedule.row_access import load_part
from jagged_kernels.schedule.rows import rows_to_walk, users_of_rows

_LOG2_E = tl.constexpr(LOG2_E)


def launch_backward(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor,
    rows: Tensor,
    rows_t: Tensor,
    *,
    tile_q: int,
    tile_k: int,
    left: int,
    right: int,
    scale: float,
    wanted_kv: bool = True,
    bias: dict[str, Any] | None = None,
    bias_slots: BiasSlots | None = None,
    short_offsets: Tensor | None = None,
    configs: tuple[LaunchConfig, LaunchConfig] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, in the dtypes of q, k and v. `o` and `lse2` are the forward's.

    Args:
        wanted_kv: False leaves out dk and dv: [0]. dq's launch also makes the delta of dk.
        bias: from `bias_launch.bias_arguments`, or None; its gradients are left in `bias_slots`.
        short_offsets: the users' offsets where `plain.short` takes the short ones, else None.
        configs: launch options of dQ and of dK and dV, in place of the rule's.
    """
    q_config, k_config = configs or (None, None)
    # Once for all launches: a gradient often comes in a layout that they cannot read.
    q, k, v, d_o = rows_of_dims(q), rows_of_dims(k), rows_of_dims(v), rows_of_dims(d_o)
    d_lse2 = None if d_lse2 is None else d_lse2.contiguous()
    call = Call.of(q, k, v, d_o, left=left, right=right, scale=scale)
    band: dict[str, Any] = {"left": left, "right": right}
    options: dict[str, Any] = {**band, "bias": bias, "skips": short_offsets is not None}
    dq, delta = launch_dq(
        d_o, d_lse2, q, k, v, o, lse2, rows, call,
        tile=tile_q, **options, bias_slots=bias_slots, config=q_config,
    )  # fmt: skip
    dk = dv = None
    if wanted_kv:
        dk, dv = launch_dkv(
            d_o, q, k, v, lse2, delta, rows_t, call, tile=tile_k, **options, config=k_config
        )
    if short_offsets is not None:
        launch_short_backward(d_o, d_lse2, q, k, v, lse2, dq, dk, dv, short_offsets, call, **band)
    if dk is None or dv is None:
        return dq, k.new_empty(0), v.new_empty(0)
    return dq, dk, dv


def launch_dq(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor,
    rows: Tensor,
    call: Call,
    *,
    tile: int,
    left: int,
    right: int,
    bias: dict[str, Any] | None = None,
    bias_slots: BiasSlots | None = None,
    skips: bool = False,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(dq, delta [Tq, H] float32); delta = rowsum(o * dO) - d_lse is for `launch_dkv`.

    Args:
        d_o, q, k, v: read in place (`rows_of_dims`).
        d_lse2: contiguous.
        call: of q, k, v and d_o.
        skips: leave out users of up to `SHORT_USER` tokens.
    """
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    delta = torch.empty_like(lse2)
    if q.shape[0] == 0:
        return dq, delta
    bias = bias or NO_BIAS
    small_memory = has_small_memory(q.device)
    users = users_of_rows(rows, q.shape[0], tile)
    rule = short_dq_config if q.shape[0] < SHORT_HISTORY * users else dq_config
    plan = _plan(call, rule, q.shape[1], tile, bias["BIAS"], config, small_memory, skips)
    if count := rows_to_walk(rows, q.shape[0], tile, skips=skips):
        launch(
            _dq_kernel,
            count * plan.programs,
            (q, k, v, o, d_o, lse2, d_lse2, delta, dq, rows, bias["bias"], bias_slots,
             call.scale, plan.scale_log2, left, right),
            plan.constants,
            **plan.options,
        )  # fmt: skip
    return dq, delta


def launch_dkv(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse2: Tensor,
    delta: Tensor,
    rows_t: Tensor,
    call: Call,
    *,
    tile: int,
    left: int,
    right: int,
    bias: dict[str, Any] | None = None,
    skips: bool = False,
    config: LaunchConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """(dk, dv); `left`, `right` and `call` are those of the queries, all else is as for
    `launch_dq`."""
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if k.shape[0] == 0:
        return dk, dv
    bias = bias or NO_BIAS
    small_memory = has_small_memory(k.device)
    rule = small_dkv_config if small_memory else dkv_config
    plan = _plan(call.mirrored, rule, k.shape[1], tile, bias["BIAS"], config, small_memory, skips)
    if count := rows_to_walk(rows_t, k.shape[0], tile, skips=skips):
        launch(
            _dkv_kernel,
            count * plan.programs,
            (q, k, v, d_o, lse2, delta, dk, dv, rows_t, bias["bias"],
             call.scale, plan.scale_log2, right, left),
            plan.constants,
            **plan.options,
        )  # fmt: skip
    return dk, dv


@lru_cache(PLANS)
def _plan(
    call: Call, rule: Callable[[int, int, str], LaunchConfig], heads: int, tile: int,
    BIAS: BiasShape, config: LaunchConfig | None, small_memory: bool, skips: bool,
) -> LaunchPlan:  # fmt: skip
    """`heads`: of what stands in the rows."""
    config = config or rule(call.pad_dim, call.element_size, call.precision)
    parts = parts_of_tile(tile, call.pad_dim, call.element_size, small_memory)
    shape = call.shape(tile=tile, parts=parts, block=config.block, skips=skips)
    return call.plan(parts * heads, shape, launch_options(BIAS, config), BIAS=BIAS)


@triton.jit(do_not_specialize=["left", "right"])
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse2_ptr, d_lse2_ptr, delta_ptr, dq_ptr, rows_ptr,
    bias, slots, scale, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, and delta = rowsum(o * dO) - d_lse for the other kernel."""
    HEADS: tl.constexpr = S.HEADS
    TILE: tl.constexpr = S.TILE
    slot, head = tl.program_id(0) // HEADS, (tl.program_id(0) % HEADS).to(tl.int64)
    row = slot // S.PARTS
    q_start, q_end, k_start, k_end, shift = load_part(
        rows_ptr, row, slot % S.PARTS, left, right, S.HAS_LEFT, S.HAS_RIGHT, TILE, S.PARTS, S.SKIPS
    )
    d_position, d_time, d_slope = zero_sums(slots, BIAS)
    if q_start == q_end:
        if BIAS.ANY:
            store_sums(d_position, d_time, d_slope, slots, slot, head, BIAS, HEADS)
        return
    q_ptr += head * S.Q_STRIDE_H
    do_ptr += head * S.DO_STRIDE_H
    k_ptr += (head // S.GROUP) * S.K_STRIDE_H
    v_ptr += (head // S.GROUP) * S.V_STRIDE_H
    q = load_block(q_ptr, q_start, q_end, S.Q_STRIDE_T, TILE, S.D, S.PAD_D)
    if NEGATE:
        q = -q
    d_o = load_block(do_ptr, q_start, q_end, S.DO_STRIDE_T, TILE, S.DV, S.PAD_DV)
    o = load_block(o_ptr + head * S.DV, q_start, q_end, HEADS * S.DV, TILE, S.DV, S.PAD_DV)
    delta = tl.sum(o.to(tl.float32) * d_o.to(tl.float32), 1)
    if d_lse2_ptr is not None:
        delta -= load_numbers(d_lse2_ptr + head, q_start, q_end, HEADS, TILE) * _LOG2_E
    store_numbers(delta_ptr + head, delta, q_start, q_end, HEADS, TILE)
    lse2 = load_numbers(lse2_ptr + head, q_start, q_end, HEADS, TILE)
    lse2 = finite(lse2)
    place = None
    if BIAS.ANY:
        place = bias_place(bias, rows_ptr, row, head, BIAS)

    row_ends = (q_start, q_end, k_start, k_end, shift, head)
    PRECISION: tl.constexpr = S.PRECISION
    q, d_o = factor(q, PRECISION), factor(d_o, PRECISION)
    dq, d_position, d_time, d_slope = dq_walk(
        q, d_o, lse2, delta, k_ptr, v_ptr, row_ends, scale_log2, left, right, bias, slots, place,
        S, BIAS, False,
    )  # fmt: skip
    if S.MASKED and is_bad(size_of_sums(dq)):
        # Other threads may have written the bias' gradients that are written again.
        tl.debug_barrier()
        dq, d_position, d_time, d_slope = dq_walk(
            q, d_o, lse2, delta, k_ptr, v_ptr, row_ends, scale_log2, left, right,
            bias, slots, place, S, BIAS, True,
        )  # fmt: skip
    store_block(dq_ptr + head * S.D, dq * scale, q_start, q_end, HEADS * S.D, TILE, S.D, S.PAD_D)
    if BIAS.ANY:
        store_sums(d_position, d_time, d_slope, slots, slot, head, BIAS, HEADS)


@triton.jit
def dq_walk(
    q, d_o, lse2, delta, k_ptr, v_ptr, row_ends, scale_log2, left, right, bias, slots, place,
    S: tl.constexpr, BIAS: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """dQ and the sums of a row's key blocks; with SEEN over what is seen alone (`triton_sums`)."""
    TILE: tl.constexpr = S.TILE
    BLOCK: tl.constexpr = SEEN_BLOCK if SEEN else S.BLOCK
    PRECISION: tl.constexpr = S.PRECISION
    ROUNDS: tl.constexpr = BIAS.ANY or k_ptr.dtype.element_ty == tl.float32
    q_start, q_end, first, k_end, shift, head = row_ends
    whole_start, whole_end = whole_blocks(
        q_start, q_end, first, k_end, shift, left, right, S.HAS_LEFT, S.HAS_RIGHT, BLOCK
    )
    PAD_D: tl.constexpr = S.PAD_D
    dq = tl.zeros([TILE, PAD_D], tl.float32)
    d_position, d_time, d_slope = zero_sums(slots, BIAS)
    for k_start in tl.range(first, k_end, BLOCK, num_stages=1 if SEEN else None):
        k = load_block(k_ptr, k_start, k_end, S.K_STRIDE_T, BLOCK, S.D, S.PAD_D)
        v = load_block(v_ptr, k_start, k_end, S.V_STRIDE_T, BLOCK, S.DV, S.PAD_DV)
        scores = dot_factors(q, transposed(factor(k, PRECISION), PRECISION), PRECISION)
        if BIAS.ANY:
            scores *= scale_log2
            q_token = (q_start + tl.arange(0, TILE))[:, None]
            k_token = (k_start + tl.arange(0, BLOCK))[None, :]
            scores, bucket = add_bias(
                scores, bias, place, q_token, k_token, q_end, k_end, shift, head, BIAS, S.HEADS
            )
        if SEEN or (k_start < whole_start) | (k_start >= whole_end):
            inside = visible(
                q_start, k_start, k_end, shift, left, right, S.HAS_LEFT, S.HAS_RIGHT, TILE, BLOCK
            )
            scores = tl.where(inside, scores, float("-inf"))
        if not BIAS.ANY:
            scores *= scale_log2
        probabilities = probability(scores, lse2[:, None], ROUNDS)
        values = transposed(factor(v, PRECISION), PRECISION)
        d_probabilities = dot_factors(d_o, values, PRECISION)
        if BIAS.DROPS:
            d_probabilities *= keep_block(bias, place, q_token, k_token)
        d_scores = probabilities * (d_probabilities - delta[:, None])
        if SEEN:
            d_scores = tl.where(inside, d_scores, 0.0)
        if BIAS.ANY:
            d_position, d_time, d_slope = add_to_sums(
                d_position, d_time, d_slope, d_scores, slots, bias, place, bucket,
                q_start, k_start, q_end, k_end, shift, head, BIAS, S.HEADS,
            )  # fmt: skip
        dq = add_weighted(dq, d_scores, k, inside if SEEN else None, PRECISION)
    return dq, d_position, d_time, d_slope


@triton.jit(do_not_specialize=["left", "right"])
def _dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, rows_ptr,
    bias, scale, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, summed over the heads of its group in order."""
    KV_HEADS: tl.constexpr = S.HEADS // S.GROUP
    TILE: tl.constexpr = S.TILE
    slot, kv_head = tl.program_id(0) // KV_HEADS, (tl.program_id(0) % KV_HEADS).to(tl.int64)
    row = slot // S.PARTS
    k_start, k_end, q_start, q_end, shift = load_part(
        rows_ptr, row, slot % S.PARTS, left, right, S.HAS_LEFT, S.HAS_RIGHT, TILE, S.PARTS, S.SKIPS
    )
    if k_start == k_end:
        return
    k_ptr += kv_head * S.K_STRIDE_H
    v_ptr += kv_head * S.V_STRIDE_H
    k = load_block(k_ptr, k_start, k_end, S.K_STRIDE_T, TILE, S.D, S.PAD_D)
    if NEGATE:
        k = -k
    v = load_block(v_ptr, k_start, k_end, S.V_STRIDE_T, TILE, S.DV, S.PAD_DV)
    PRECISION: tl.constexpr = S.PRECISION
    k, v = factor(k, PRECISION), factor(v, PRECISION)
    row_ends = (k_start, k_end, q_start, q_end, shift)
    dk, dv = dkv_walk(
        k, v, q_ptr, do_ptr, lse2_ptr, delta_ptr, row_ends, kv_head,
        scale_log2, left, right, rows_ptr, row, bias, S, BIAS, False,
    )  # fmt: skip
    if S.MASKED and is_bad(size_of_sums(dk) + size_of_sums(dv)):
        dk, dv = dkv_walk(
            k, v, q_ptr, do_ptr, lse2_ptr, delta_ptr, row_ends, kv_head,
            scale_log2, left, right, rows_ptr, row, bias, S, BIAS, True,
        )  # fmt: skip
    dk_ptr += kv_head * S.D
    dv_ptr += kv_head * S.DV
    store_block(dk_ptr, dk * scale, k_start, k_end, KV_HEADS * S.D, TILE, S.D, S.PAD_D)
    store_block(dv_ptr, dv, k_start, k_end, KV_HEADS * S.DV, TILE, S.DV, S.PAD_DV)


@triton.jit
def dkv_walk(
    k, v, q_ptr, do_ptr, lse2_ptr, delta_ptr, row_ends, kv_head,
    scale_log2, left, right, rows_ptr, row, bias, S: tl.constexpr, BIAS: tl.constexpr,
    SEEN: tl.constexpr,
):  # fmt: skip
    """`_dkv_walk` for the heads of a group, one after another."""
    TILE: tl.constexpr = S.TILE
    PAD_D: tl.constexpr = S.PAD_D
    PAD_DV: tl.constexpr = S.PAD_DV
    dk = tl.zeros([TILE, PAD_D], tl.float32)
    dv = tl.zeros([TILE, PAD_DV], tl.float32)
    for member in range(S.GROUP):
        head = kv_head * S.GROUP + member
        place = None
        if BIAS.ANY:
            place = bias_place(bias, rows_ptr, row, head, BIAS)
        dk, dv = _dkv_walk(
            dk, dv, k, v, q_ptr, do_ptr, lse2_ptr, delta_ptr, row_ends, head,
            scale_log2, left, right, bias, place, S, BIAS, SEEN,
        )  # fmt: skip
    return dk, dv


@triton.jit
def _dkv_walk(
    dk, dv, k, v, q_ptr, do_ptr, lse2_ptr, delta_ptr, row_ends, head,
    scale_log2, left, right, bias, place, S: tl.constexpr, BIAS: tl.constexpr, SEEN: tl.constexpr,
):  # fmt: skip
    """Keys stand in the rows here: the scores are transposed. k and v as `factor` makes them; with
    SEEN, sums over what is seen alone (`triton_sums`)."""
    TILE: tl.constexpr = S.TILE
    BLOCK: tl.constexpr = SEEN_BLOCK if SEEN else S.BLOCK
    PRECISION: tl.constexpr = S.PRECISION
    ROUNDS: tl.constexpr = BIAS.ANY or q_ptr.dtype.element_ty == tl.float32
    k_start, k_end, first, q_end, shift = row_ends
    q_ptr += head * S.Q_STRIDE_H
    do_ptr += head * S.DO_STRIDE_H
    whole_start, whole_end = whole_blocks(
        k_start, k_end, first, q_end, shift, left, right, S.HAS_LEFT, S.HAS_RIGHT, BLOCK
    )
    for q_start in tl.range(first, q_end, BLOCK, num_stages=1 if SEEN else None):
        q = load_block(q_ptr, q_start, q_end, S.Q_STRIDE_T, BLOCK, S.D, S.PAD_D)
        d_o = load_block(do_ptr, q_start, q_end, S.DO_STRIDE_T, BLOCK, S.DV, S.PAD_DV)
        lse2, delta = load_number_pairs(
            lse2_ptr + head, delta_ptr + head, q_start, q_end, S.HEADS, BLOCK
        )
        queries, d_out = factor(q, PRECISION), factor(d_o, PRECISION)
        scores = dot_factors(k, transposed(queries, PRECISION), PRECISION)
        if BIAS.ANY:
            scores *= scale_log2
            q_token = (q_start + tl.arange(0, BLOCK))[None, :]
            k_token = (k_start + tl.arange(0, TILE))[:, None]
            # The shift of a transposed row goes from keys to queries.
            scores, _ = add_bias(
                scores, bias, place, q_token, k_token, q_end, k_end, -shift, head, BIAS, S.HEADS
            )
        if SEEN or (q_start < whole_start) | (q_start >= whole_end):
            # A query that sees nothing is in no whole block.
            lse2 = finite(lse2)
            inside = visible(
                k_start, q_start, q_end, shift, left, right, S.HAS_LEFT, S.HAS_RIGHT, TILE, BLOCK
            )
            scores = tl.where(inside, scores, float("-inf"))
        if not BIAS.ANY:
            scores *= scale_log2
        probabilities = probability(scores, lse2[None, :], ROUNDS)
        kept = probabilities
        if BIAS.DROPS:
            keep = keep_block(bias, place, q_token, k_token)
            kept = probabilities * keep
        dv = add_weighted(dv, kept, d_o, inside if SEEN else None, PRECISION)
        d_probabilities = dot_factors(v, transposed(d_out, PRECISION), PRECISION)
        if BIAS.DROPS:
            d_probabilities *= keep
        d_scores = probabilities * (d_probabilities - delta[None, :])
        dk = add_weighted(dk, d_scores, q, inside if SEEN else None, PRECISION)
    return dk, dv
