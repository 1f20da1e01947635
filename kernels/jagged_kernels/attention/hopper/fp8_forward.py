"""The forward for Hopper of numbers in FP8 (e4m3): head_dims 64 and 128.

FlashAttention-3 (arXiv 2407.08608, section 3.3), laid out as `hopper.forward` is. Products of FP8
read both factors with what is added up side by side in memory, so V comes transposed. Weights are
the left factor of their product in the registers that scores were in: V^T has its keys in the order
in which a thread then has them (`attention.fp8_numbers`). A block's product with V is added to the
sums in float32: tensor cores keep about 14 bits of a sum of FP8 products (arXiv 2412.19437, section
3.3.2), too few for thousands of keys.
"""

# Partitions get tuples, and take out of them what they need.
# ruff: noqa: RUF059

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jagged_kernels.attention.fp8_numbers import ORDERED_KEYS
from jagged_kernels.attention.hopper.blocks import (
    by_row,
    counter,
    for_mask,
    mask_block,
    new_dealing,
    next_slot,
    one_barrier,
    plan,
    programs,
    ring_of_barriers,
    row_blocks,
    token_blocks,
    whole_blocks,
)
from jagged_kernels.attention.hopper.heads import boxes, bring, product_with_transpose
from jagged_kernels.attention.hopper.softmax import online_softmax, store_mean
from jagged_kernels.attention.hopper.tiles import attend_tiles, load_tiles
from jagged_kernels.attention.meeting import RANGES
from jagged_kernels.attention.plans import PLANS, Call, empty_lse, scale_argument
from jagged_kernels.core.launch import launch
from jagged_kernels.schedule.policy.hopper import HopperConfig, fp8_config
from jagged_kernels.schedule.row_layout import ROW_FIELDS, ROW_WIDTH

_ORDERED_KEYS = gl.constexpr(ORDERED_KEYS)
_ROW_WIDTH = gl.constexpr(ROW_WIDTH)
_USER = gl.constexpr(ROW_FIELDS.index("user"))
# The largest weight is 2 ** LIFT of e4m3's 448, so that small ones are not below its range.
_LIFT = gl.constexpr(8)


def launch_fp8_forward(
    q: Tensor,
    k: Tensor,
    v_t: Tensor,
    scales: tuple[Tensor, Tensor, Tensor],
    rows: Tensor,
    *,
    left: int,
    right: int,
    scale: float,
    dtype: torch.dtype,
    with_lse: bool = True,
    config: HopperConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(o [Tq, H, D] of `dtype`, lse2 [Tq, H] float32) of what `attention.fp8_numbers` makes.

    Args:
        q, k: [T, H, D] float8_e4m3fn, contiguous.
        v_t: [Hk, D, Tk rounded up to ORDERED_KEYS] float8_e4m3fn, contiguous; all finite.
        scales: of q [Tq, H], k and v [B, Hk]; float32, contiguous.
        rows: tiles of `config.tile_q` queries.
        dtype: float16 or bfloat16.
        config: in place of the rule's.
    """
    _, heads, dim = q.shape
    meets = RANGES.constants
    config = config or for_mask(fp8_config(dim), q, rows, left, right, meets)
    o = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse2 = empty_lse(q) if with_lse else None
    # V as K is laid out: what is compiled for reads no stride of it.
    call = Call.of(q, k, k, left=left, right=right, scale=scale)
    scale_log2, constants, options = _plan(call, config)
    v_blocks = row_blocks(v_t.view(-1, v_t.shape[2]), dim, config.block)
    launch(
        _fp8_forward_kernel,
        programs(q.device, config, rows.shape[0] * heads),
        (
            o, lse2, scales, rows, rows.shape[0], counter(config, q.device),
            token_blocks(q, config.part_q), token_blocks(k, config.block), v_blocks,
            scale_log2, left, right,
        ),
        constants,
        **options,
    )  # fmt: skip
    return o, lse2


@lru_cache(PLANS)
def _plan(call: Call, config: HopperConfig) -> tuple[float, dict[str, Any], dict[str, int]]:
    """(scale in base 2, compile-time parameters, launch options)."""
    constants, options = plan(call, config, RANGES.constants)
    scale_log2, negate = scale_argument(call.scale)
    return scale_log2, {**constants, "NEGATE": negate}, options


@gluon.jit(do_not_specialize=["row_count", "left", "right"])
def _fp8_forward_kernel(
    o_ptr, lse2_ptr, scales, rows_ptr, row_count, taken_ptr, q_blocks, k_blocks, v_blocks,
    scale_log2, left, right,
    S: gl.constexpr, C: gl.constexpr, NEGATE: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_blocks.dtype
    buffers = (
        boxes(C.consumers, C.part_q, S, dtype),
        boxes(C.stages, S.BLOCK, S, dtype),
        gl.allocate_shared_memory(dtype, [C.stages, S.D, S.BLOCK], v_blocks.layout),
    )
    barriers = (
        one_barrier(1),  # Q is there
        one_barrier(C.consumers),  # Q may be overwritten
        ring_of_barriers(C.stages, 1),  # K is there
        ring_of_barriers(C.stages, C.consumers),
        ring_of_barriers(C.stages, 1),  # V is there
        ring_of_barriers(C.stages, C.consumers),
    )
    load = (q_blocks, k_blocks, v_blocks, rows_ptr, row_count, buffers, barriers)
    attend = (
        o_ptr, lse2_ptr, scales, rows_ptr, row_count, scale_log2, left, right, buffers, barriers
    )  # fmt: skip
    if C.counted:
        dealing = new_dealing(C.consumers)
        load = (load, taken_ptr, dealing)
        attend = (attend, dealing)
    fence_async_shared()
    if C.consumers == 1:
        gl.warp_specialize(
            [(_attend, (attend, S, C, NEGATE, 0)), (_load, (load, S, C))], [1], [24]
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (attend, S, C, NEGATE, 0)),
                (_attend, (attend, S, C, NEGATE, 1)),
                (_load, (load, S, C)),
            ],
            [C.warps, 1],
            [C.registers, 24],
        )


# --- the loading warp -----------------------------------------------------------------------------


@gluon.jit
def _load(args, S: gl.constexpr, C: gl.constexpr):
    load_tiles(args, S, C, _load_tile)


@gluon.jit
def _load_tile(rings, row, args, S: gl.constexpr, C: gl.constexpr):
    """Brings a tile's Q, and its K and V from the last block to the first."""
    q_blocks, k_blocks, v_blocks, rows_ptr, row_count, buffers, barriers = args
    q_buffer, k_buffer, v_buffer = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    head, q_start, q_end, k_start, k_end, shift = row
    stage, phase, q_phase = rings
    CONSUMERS: gl.constexpr = C.consumers
    if k_start < k_end:
        mbarrier.wait(q_empty, q_phase ^ 1)
        mbarrier.expect(q_full, CONSUMERS * q_blocks.block_type.nbytes)
        for consumer in gl.static_range(CONSUMERS):
            part = q_buffer.index(consumer)
            bring(q_blocks, q_start + consumer * C.part_q, head, q_full, part, S.Q_STRIDE_H)
        q_phase ^= 1
        kv_head = head // S.GROUP
        first = _first_key(k_start)
        blocks = gl.cdiv(k_end - first, S.BLOCK)
        for block in range(blocks):
            start = first + (blocks - 1 - block) * S.BLOCK
            k_there = k_full.index(stage)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_there, k_blocks.block_type.nbytes)
            bring(k_blocks, start, kv_head, k_there, k_buffer.index(stage), S.K_STRIDE_H)
            v_there = v_full.index(stage)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_there, v_blocks.block_type.nbytes)
            box = v_buffer.index(stage)
            tma.async_copy_global_to_shared(v_blocks, [kv_head * S.D, start], v_there, box)
            stage, phase = next_slot(stage, phase, C.stages)
    return stage, phase, q_phase


@gluon.jit
def _first_key(k_start):
    """Where the first block begins: TMA wants tokens of V^T at a multiple of 16 bytes, and their
    order is one of so many."""
    return k_start // _ORDERED_KEYS * _ORDERED_KEYS


# --- consumers ------------------------------------------------------------------------------------


@gluon.jit
def _attend(args, S: gl.constexpr, C: gl.constexpr, NEGATE: gl.constexpr, ME: gl.constexpr):
    """One consumer: part ME of every tile's queries."""
    attend_tiles(args, S, C, NEGATE, None, ME, _attend_tile, _store_part)


@gluon.constexpr_function
def _layout(WARPS, WIDTH):
    """Of scores [queries, WIDTH], and of sums."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 32])


@gluon.jit
def _attend_tile(
    rings, row, place, args, S: gl.constexpr, C: gl.constexpr, NEGATE: gl.constexpr,
    WEIGHT: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """((sums, total, top), rings) of a tile, the same way as `hopper.forward` goes through it."""
    o_ptr, lse2_ptr, scales, rows_ptr = args[:4]
    scale_log2, left, right, buffers, barriers = args[5:]
    q_buffer, k_buffer, v_buffer = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty = barriers
    head, q_start, q_end, k_start, k_end, shift = row
    stage, phase, q_phase, no_phase = rings
    ROWS: gl.constexpr = C.part_q
    BLOCK: gl.constexpr = S.BLOCK
    D: gl.constexpr = S.D
    SCORES: gl.constexpr = _layout(C.warps, BLOCK)
    SUMS: gl.constexpr = _layout(C.warps, D)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    q = q_buffer.index(ME)
    first_q = q_start + ME * ROWS
    acc = gl.zeros([ROWS, D], gl.float32, SUMS)
    total = gl.zeros([ROWS], gl.float32, ROW)
    top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    reach = gl.zeros([ROWS], gl.float32, ROW)
    if k_start < k_end:
        first_k = _first_key(k_start)
        blocks = gl.cdiv(k_end - first_k, BLOCK)
        # The first part of a tile is never empty.
        if (ME == 0) or (first_q < q_end):
            q_scales, k_scale, v_scale = scales
            user = gl.load(rows_ptr + (place // S.HEADS).to(gl.int64) * _ROW_WIDTH + _USER)
            kv_place = user.to(gl.int64) * (S.HEADS // S.GROUP) + head // S.GROUP
            token = first_q + gl.arange(0, ROWS, ROW)
            q_scale = gl.load(
                q_scales + token.to(gl.int64) * S.HEADS + head, mask=token < q_end, other=1.0
            )
            # Not 0 and not inf, times which a hidden score, or one that is 0, would be NaN.
            factor = q_scale * (scale_log2 * gl.load(k_scale + kv_place))
            factor = gl.minimum(gl.maximum(factor, 1e-37), 1e30)

            band = (first_q, first_k + (blocks - 1) * BLOCK, k_start, k_end, shift, left, right)
            whole_start, whole_end = whole_blocks(
                q_start, q_end, first_k, k_end, shift, left, right, S.HAS_LEFT, S.HAS_RIGHT, BLOCK
            )
            # Keys of the user before are hidden as those behind the end are.
            whole_start = gl.maximum(whole_start, first_k + gl.where(first_k < k_start, BLOCK, 0))
            cut_until = blocks - (whole_end - first_k) // BLOCK
            cut_from = blocks - (whole_start - first_k) // BLOCK

            mbarrier.wait(q_full, q_phase)
            q_phase ^= 1
            mbarrier.wait(k_full.index(stage), phase)
            scores = product_with_transpose(q, k_buffer.index(stage), D, SCORES)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage))
            if NEGATE:
                scores = -scores
            scores = _mask(scores, band, 0, S)
            weights, correction, top, total, reach = online_softmax(
                scores, top, total, reach, factor, True, _LIFT, True
            )
            ahead_stage, ahead_phase = next_slot(stage, phase, C.stages)
            mbarrier.wait(k_full.index(ahead_stage), ahead_phase, pred=blocks > 1)
            for block in range(1, blocks):
                v_stage = stage
                v_phase = phase
                stage, phase = next_slot(stage, phase, C.stages)
                # Not at the end of the loop, see `hopper.forward`.
                p = _left_factor(weights, SUMS)
                scores = product_with_transpose(q, k_buffer.index(stage), D, SCORES, weights)
                mbarrier.wait(v_full.index(v_stage), v_phase)
                added = _product(p, v_buffer.index(v_stage), SUMS)
                scores = warpgroup_mma_wait(1, deps=[scores])
                mbarrier.arrive(k_empty.index(stage))
                if NEGATE:
                    scores = -scores
                if (block < cut_until) | (block >= cut_from):
                    scores = _mask(scores, band, block * BLOCK, S)
                weights, next_correction, top, total, reach = online_softmax(
                    scores, top, total, reach, factor, True, _LIFT, True
                )
                # Here because it is a loop, see `hopper.forward`.
                ahead_stage, ahead_phase = next_slot(stage, phase, C.stages)
                mbarrier.wait(k_full.index(ahead_stage), ahead_phase, pred=block < blocks - 1)
                added = warpgroup_mma_wait(0, deps=[added])
                mbarrier.arrive(v_empty.index(v_stage))
                acc = acc * by_row(correction, acc) + added
                correction = next_correction

            mbarrier.arrive(q_empty)
            p = _left_factor(weights, SUMS)
            mbarrier.wait(v_full.index(stage), phase)
            added = _product(p, v_buffer.index(stage), SUMS)
            v_scale = gl.load(v_scale + kv_place)
            added = warpgroup_mma_wait(0, deps=[added])
            mbarrier.arrive(v_empty.index(stage))
            stage, phase = next_slot(stage, phase, C.stages)
            acc = (acc * by_row(correction, acc) + added) * v_scale
        else:
            # The tile ends before this part: the loading warp is kept in step.
            mbarrier.wait(q_full, q_phase)
            q_phase ^= 1
            mbarrier.arrive(q_empty)
            for _ in range(blocks):
                mbarrier.wait(k_full.index(stage), phase)
                mbarrier.arrive(k_empty.index(stage))
                mbarrier.wait(v_full.index(stage), phase)
                mbarrier.arrive(v_empty.index(stage))
                stage, phase = next_slot(stage, phase, C.stages)
    return (acc, total, top), (stage, phase, q_phase, no_phase)


@gluon.jit
def _mask(scores, band, before, S: gl.constexpr):
    """-inf for keys that a query does not see, and for those of the user before.

    Args:
        band: (first query, first key of the last block, range of the keys, shift, left, right).
        before: keys between this block and the last one.
    """
    first_q, last_k, k_start, k_end, shift, left, right = band
    block_start = last_k - before
    scores = mask_block(
        scores, first_q, block_start, k_end, shift, left, right, S.HAS_LEFT, S.HAS_RIGHT
    )
    token = block_start + gl.arange(0, S.BLOCK, gl.SliceLayout(0, scores.type.layout))
    return gl.where(gl.expand_dims(token >= k_start, 0), scores, float("-inf"))


@gluon.jit
def _left_factor(weights, SUMS: gl.constexpr):
    """Weights [queries, BLOCK] as the left factor, without leaving their registers.

    Of every 16 keys a thread has scores of 2c, 2c + 1, 8 + 2c and 9 + 2c (c = 0 ... 3), and of
    every 16 that are added up the product wants 4c ... 4c + 3 from it: V^T has them in this order.
    """
    ROWS: gl.constexpr = weights.shape[0]
    BLOCK: gl.constexpr = weights.shape[1]
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 4)
    p = weights.to(gl.float8e4nv).reshape([ROWS, BLOCK // 16, 2, 4, 2])
    p = p.permute((0, 1, 3, 2, 4)).reshape([ROWS, BLOCK])
    return gl.convert_layout(p, OPERAND, assert_trivial=True)


@gluon.jit
def _product(p, v, SUMS: gl.constexpr):
    """p @ v.T in the making, of nothing before."""
    nothing = gl.full([p.shape[0], v.shape[0]], 0.0, gl.float32, SUMS)
    return warpgroup_mma(p, v.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _store_part(
    sums, row, place, count, args, S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr,
    ME: gl.constexpr,
):  # fmt: skip
    o_ptr, lse2_ptr = args[:2]
    head, q_start, q_end, k_start, k_end, shift = row
    acc, total, top = sums
    first_q = q_start + ME * C.part_q
    if first_q < q_end:
        store_mean((acc,), total, top, o_ptr, lse2_ptr, first_q, q_end, head, S.HEADS, S.D)
