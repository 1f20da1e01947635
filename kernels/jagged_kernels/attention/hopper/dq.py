"""dQ for Hopper, and what dK and dV need of each query; see `hopper.backward`."""

# Tuples are taken apart whole, also where a function needs a part.
# ruff: noqa: RUF059

from __future__ import annotations

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

from jagged_kernels.attention.hopper.blocks import (
    factor_of_place,
    left_factor,
    mask_block,
    next_slot,
    one_barrier,
    plan,
    product_with_transpose,
    ring_of_barriers,
    row_fields,
    store_tile,
    token_blocks,
    whole_blocks,
    zero_rows,
)
from jagged_kernels.attention.hopper.policies import backward_constants, natural_scores
from jagged_kernels.attention.meeting import RANGES, Meeting
from jagged_kernels.attention.plans import Call
from jagged_kernels.core.backends import multiprocessors
from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import empty_as
from jagged_kernels.device.arithmetic import LOG2_E
from jagged_kernels.schedule.policy.hopper import DQ_CONFIG, HopperConfig

_LOG2_E = gl.constexpr(LOG2_E)


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
    alarm: Tensor | None,
    *,
    left: int,
    right: int,
    meeting: Meeting = RANGES,
    config: HopperConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`plain.dq.launch_dq` for what `choice.HOPPER_DQ` takes.

    Args:
        o, lse2: not read where weights are by a policy; lse2 is a tensor, [0] is enough.
        rows: tiles of `config.tile_q` queries.
        alarm: int32, becomes 1 where a part of dq may have to be computed again
            (`hopper.exact_backward`); None where that cannot be.
        config: in place of the rule's.
    """
    config = config or DQ_CONFIG
    dq = empty_as(q)
    softmax = meeting.constants.weight is None
    delta = torch.empty_like(lse2) if softmax else None
    part_q, block = config.part_q, config.block
    constants, options = plan(call, config)
    launch(
        _dq_kernel,
        min(multiprocessors(q.device) * config.residents, rows.shape[0] * q.shape[1]),
        (
            lse2, d_lse2, delta, dq, alarm, rows, rows.shape[0],
            token_blocks(q, part_q), token_blocks(d_o, part_q),
            token_blocks(o, part_q) if softmax else None,
            token_blocks(k, block), token_blocks(v, block),
            meeting.arguments, call.scale, call.scale * LOG2_E, left, right,
        ),
        {**constants, **backward_constants(meeting)},
        **options,
    )  # fmt: skip
    return dq, delta


@gluon.jit(do_not_specialize=["row_count", "left", "right"])
def _dq_kernel(
    lse2_ptr, d_lse2_ptr, delta_ptr, dq_ptr, alarm_ptr, rows_ptr, row_count,
    q_blocks, do_blocks, o_blocks, k_blocks, v_blocks, meets,
    scale, scale_log2, left, right,
    S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr, D_SCORE: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_blocks.dtype
    TILE: gl.constexpr = [C.consumers, C.part_q, S.D]
    RING: gl.constexpr = [C.stages, S.BLOCK, S.D]
    q_buffer = gl.allocate_shared_memory(dtype, TILE, q_blocks.layout)
    do_buffer = gl.allocate_shared_memory(dtype, TILE, do_blocks.layout)
    o_buffer = do_buffer  # a tuple cannot hold None
    if WEIGHT is None:
        o_buffer = gl.allocate_shared_memory(dtype, TILE, o_blocks.layout)
    buffers = (
        q_buffer,
        do_buffer,
        o_buffer,
        gl.allocate_shared_memory(dtype, RING, k_blocks.layout),
        gl.allocate_shared_memory(dtype, RING, v_blocks.layout),
    )
    barriers = (
        one_barrier(1),  # the tile's Q, dO and O are there
        one_barrier(C.consumers),  # they may be overwritten
        ring_of_barriers(C.stages, 1),  # K is there
        ring_of_barriers(C.stages, C.consumers),
        ring_of_barriers(C.stages, 1),  # V is there
        ring_of_barriers(C.stages, C.consumers),
        one_barrier(1),  # K's last block is there, with rows of the next user
    )
    fence_async_shared()
    descriptors = (q_blocks, do_blocks, o_blocks, k_blocks, v_blocks)
    load = (descriptors, rows_ptr, row_count, buffers, barriers)
    differentiate = (
        lse2_ptr, d_lse2_ptr, delta_ptr, dq_ptr, alarm_ptr, rows_ptr, row_count, meets,
        scale, scale_log2, left, right, buffers, barriers,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_differentiate, (differentiate, S, C, WEIGHT, D_SCORE, 0)),
            (_differentiate, (differentiate, S, C, WEIGHT, D_SCORE, 1)),
            (_load, (load, S, C, WEIGHT)),
        ],
        [C.warps, 1],
        [C.registers, 24],
    )


@gluon.jit
def _load(args, S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr):
    """Brings each tile's Q, dO and, of a softmax, O; and its K and V."""
    descriptors, rows_ptr, row_count, buffers, barriers = args
    q_blocks, do_blocks, o_blocks, k_blocks, v_blocks = descriptors
    q_buffer, do_buffer, o_buffer, k_buffer, v_buffer = buffers
    tile_full, tile_empty, k_full, k_empty, v_full, v_empty, landed = barriers
    CONSUMERS: gl.constexpr = C.consumers
    SIDES: gl.constexpr = 3 if WEIGHT is None else 2
    TILE_BYTES: gl.constexpr = SIDES * CONSUMERS * q_blocks.block_type.nbytes
    stage = 0
    phase = 0
    tile_phase = 0
    tail_phase = 0
    count = row_count * S.HEADS
    head, q_start, q_end, k_start, k_end, shift = row_fields(rows_ptr, 0, count, S.HEADS)
    for step in range(gl.cdiv(count, gl.num_programs(0))):
        ahead = row_fields(rows_ptr, step + 1, count, S.HEADS)
        if k_start < k_end:
            mbarrier.wait(tile_empty, tile_phase ^ 1)
            mbarrier.expect(tile_full, TILE_BYTES)
            for consumer in gl.static_range(CONSUMERS):
                start = q_start + consumer * C.part_q
                tma.async_copy_global_to_shared(
                    q_blocks, [start, head * S.Q_STRIDE_H], tile_full, q_buffer.index(consumer)
                )
                tma.async_copy_global_to_shared(
                    do_blocks, [start, head * S.DO_STRIDE_H], tile_full, do_buffer.index(consumer)
                )
                if WEIGHT is None:
                    tma.async_copy_global_to_shared(
                        o_blocks, [start, head * S.D], tile_full, o_buffer.index(consumer)
                    )
            tile_phase ^= 1
            k_column = head // S.GROUP * S.K_STRIDE_H
            v_column = head // S.GROUP * S.V_STRIDE_H
            for start in range(k_start, k_end, S.BLOCK):
                k = k_buffer.index(stage)
                tail = start + S.BLOCK > k_end
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                if tail:
                    mbarrier.expect(landed, k_blocks.block_type.nbytes)
                    tma.async_copy_global_to_shared(k_blocks, [start, k_column], landed, k)
                else:
                    k_there = k_full.index(stage)
                    mbarrier.expect(k_there, k_blocks.block_type.nbytes)
                    tma.async_copy_global_to_shared(k_blocks, [start, k_column], k_there, k)
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), v_blocks.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    v_blocks, [start, v_column], v_full.index(stage), v_buffer.index(stage)
                )
                if tail:
                    mbarrier.wait(landed, tail_phase)
                    tail_phase ^= 1
                    zero_rows(k, k_end - start)
                    mbarrier.arrive(k_full.index(stage))
                stage, phase = next_slot(stage, phase, C.stages)
        head, q_start, q_end, k_start, k_end, shift = ahead


@gluon.jit
def _differentiate(
    args, S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr, D_SCORE: gl.constexpr,
    ME: gl.constexpr,
):  # fmt: skip
    """One consumer: the queries from ME * ROWS to (ME + 1) * ROWS of every tile."""
    lse2_ptr, d_lse2_ptr, delta_ptr, dq_ptr, alarm_ptr, rows_ptr, row_count, meets = args[:8]
    scale, scale_log2, left, right, buffers, barriers = args[8:]
    q_buffer, do_buffer, o_buffer, k_buffer, v_buffer = buffers
    tile_full, tile_empty, k_full, k_empty, v_full, v_empty, landed = barriers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, S.BLOCK, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, S.D, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROWS: gl.constexpr = C.part_q
    BLOCK: gl.constexpr = S.BLOCK
    D: gl.constexpr = S.D
    dtype: gl.constexpr = q_buffer.dtype
    stage = 0
    phase = 0
    tile_phase = 0
    count = row_count * S.HEADS
    head, q_start, q_end, k_start, k_end, shift = row_fields(rows_ptr, 0, count, S.HEADS)
    for step in range(gl.cdiv(count, gl.num_programs(0))):
        ahead = row_fields(rows_ptr, step + 1, count, S.HEADS)
        first_q = q_start + ME * ROWS
        dq = gl.zeros([ROWS, D], gl.float32, OUTPUT)
        if k_start < k_end:
            if WEIGHT is None:
                token = first_q + gl.arange(0, ROWS, ROW)
                own = token < q_end
                place = token.to(gl.int64) * S.HEADS + head
                lse2 = gl.load(lse2_ptr + place, mask=own, other=0.0)
                lse2 = gl.where(lse2 == float("-inf"), 0.0, lse2)
            mbarrier.wait(tile_full, tile_phase)
            tile_phase ^= 1
            if WEIGHT is None:
                delta = _delta(o_buffer.index(ME), do_buffer.index(ME), ROW)
                if d_lse2_ptr is not None:
                    delta -= gl.load(d_lse2_ptr + place, mask=own, other=0.0) * _LOG2_E
                gl.store(delta_ptr + place, delta, mask=own)
                of_query = (lse2, delta)
            else:
                of_query = (factor_of_place(meets, rows_ptr, step, count, S.HEADS), 0.0)
            q = q_buffer.index(ME).load(LEFT)
            d_o = do_buffer.index(ME).load(LEFT)

            whole_start, whole_end = whole_blocks(
                q_start, q_end, k_start, k_end, shift, left, right,
                S.HAS_LEFT, S.HAS_RIGHT, S.BLOCK,
            )  # fmt: skip
            band = (first_q, k_end, whole_start, whole_end, shift, left, right)
            mbarrier.wait(k_full.index(stage), phase)
            state = (dq, gl.zeros([ROWS, BLOCK], gl.float32, SCORES), stage, phase)
            state = _meet(
                state, q, d_o, of_query, buffers, barriers, k_start, band, scale_log2,
                S, C, WEIGHT, D_SCORE, SCORES, True,
            )  # fmt: skip
            # Q and dO are in registers since before these products, which have ended: now they
            # may be overwritten. Right after their loads is too early: TMA does not wait for loads
            # that are on their way.
            mbarrier.arrive(tile_empty)
            for start in range(k_start + S.BLOCK, k_end, S.BLOCK):
                state = _meet(
                    state, q, d_o, of_query, buffers, barriers, start, band, scale_log2,
                    S, C, WEIGHT, D_SCORE, SCORES, False,
                )  # fmt: skip
            dq, d_scores, stage, phase = state
            factor = left_factor(d_scores, dq, dtype)
            dq = warpgroup_mma(factor, k_buffer.index(stage), dq, is_async=True)
            dq, factor = warpgroup_mma_wait(0, deps=[dq, factor])
            mbarrier.arrive(k_empty.index(stage))
            stage, phase = next_slot(stage, phase, C.stages)
        if first_q < q_end:
            store_tile(dq_ptr, dq * scale, first_q, q_end, head, S.HEADS, alarm_ptr)
        head, q_start, q_end, k_start, k_end, shift = ahead


@gluon.jit
def _delta(o, d_o, ROW: gl.constexpr):
    D: gl.constexpr = o.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    delta = gl.sum(o.load(LAYOUT).to(gl.float32) * d_o.load(LAYOUT).to(gl.float32), 1)
    return gl.convert_layout(delta, ROW)


@gluon.jit
def _meet(
    state, q, d_o, of_query, buffers, barriers, start, band, scale_log2,
    S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr, D_SCORE: gl.constexpr,
    SCORES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """The block of keys from `start`, whose K is there, gives its dS; the one before adds to dQ.

    So two products are in the making while probabilities are, or the slopes of weights by a policy.

    Args:
        of_query: (lse2, delta), or (1 / n, 0) of weights by a policy.
    """
    k_buffer, v_buffer = buffers[3:]
    tile_full, tile_empty, k_full, k_empty, v_full, v_empty, landed = barriers
    first_q, k_end, whole_start, whole_end, shift, left, right = band
    dq, d_scores, stage, phase = state
    before = stage
    if not FIRST:
        stage, phase = next_slot(stage, phase, C.stages)
    scores = product_with_transpose(q, k_buffer.index(stage), SCORES)
    if not FIRST:
        # Not at the end of the loop: halves carried around it are taken apart and packed again.
        factor = left_factor(d_scores, dq, k_buffer.dtype)
        dq = warpgroup_mma(factor, k_buffer.index(before), dq, is_async=True)
    mbarrier.wait(v_full.index(stage), phase)
    d_weights = product_with_transpose(d_o, v_buffer.index(stage), SCORES)
    scores = warpgroup_mma_wait(1 if FIRST else 2, deps=[scores])
    if WEIGHT is None:
        exponent = scores * scale_log2 - gl.expand_dims(of_query[0], 1)
    else:
        scores = natural_scores(scores, scale_log2)
        slopes = D_SCORE(scores, gl.full_like(scores, of_query[0]))
    cut = (start < whole_start) | (start >= whole_end)
    if WEIGHT is None:
        if cut:
            exponent = mask_block(
                exponent, first_q, start, k_end, shift, left, right, S.HAS_LEFT, S.HAS_RIGHT
            )
        probabilities = gl.exp2(exponent)
    # The next block's K is waited for here because that wait is a loop: across it the assembler
    # does not move the end of the products up to before the probabilities.
    ahead_stage, ahead_phase = next_slot(stage, phase, C.stages)
    mbarrier.wait(k_full.index(ahead_stage), ahead_phase, pred=start + S.BLOCK < k_end)
    if FIRST:
        d_weights = warpgroup_mma_wait(0, deps=[d_weights])
    else:
        dq, factor, d_weights = warpgroup_mma_wait(0, deps=[dq, factor, d_weights])
        mbarrier.arrive(k_empty.index(before))
    mbarrier.arrive(v_empty.index(stage))
    if WEIGHT is None:
        d_scores = probabilities * (d_weights - gl.expand_dims(of_query[1], 1))
    else:
        d_scores = slopes * d_weights
    if cut:
        # What the next user's V made of a weight 0.
        d_scores = mask_block(
            d_scores, first_q, start, k_end, shift, left, right, S.HAS_LEFT, S.HAS_RIGHT,
            0.0,
        )  # fmt: skip
    return dq, d_scores, stage, phase
