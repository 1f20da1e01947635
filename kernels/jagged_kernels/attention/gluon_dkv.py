"""dK and dV for Hopper, keys standing in the rows; see `gluon_backward`."""

# Gluon's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
# Tuples are taken apart whole, also where a function needs a part.
# ruff: noqa: RUF059
# What compile-time branches define is there where they use it.
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jagged_kernels.attention.gluon_blocks import (
    left_factor,
    mask_block,
    next_slot,
    one_barrier,
    product_with_transpose,
    ring_of_barriers,
    row_fields,
    store_tile,
    token_blocks,
    whole_blocks,
    zero_rows,
)
from jagged_kernels.attention.gluon_pass import (
    BLOCK,
    ROWS,
    START_REGISTERS,
    WARPS,
    pass_shape,
    program_count,
)
from jagged_kernels.attention.triton_blocks import LOG2_E

_STAGES = 4
_LANES = gl.constexpr(32)


def launch_dkv(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numbers: Tensor,
    rows_t: Tensor,
    *,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(dk, dv); `numbers` are those of `launch_dq`, `left` and `right` as there."""
    kv_heads = k.shape[1]
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    # From the keys' side the band is mirrored.
    shape = pass_shape(q, k, heads=kv_heads, left=right, right=left, stages=_STAGES)
    with torch.cuda.device_of(q):
        _dkv_kernel[(program_count(q, rows_t.shape[0] * kv_heads),)](
            token_blocks(k, ROWS),
            token_blocks(v, ROWS),
            token_blocks(q, BLOCK),
            token_blocks(d_o, BLOCK),
            numbers, dk, dv, rows_t, rows_t.shape[0], q.shape[0],
            k.stride(1), v.stride(1), q.stride(1), d_o.stride(1),
            float(scale), scale * LOG2_E, right, left, shape,
            num_warps=WARPS, maxnreg=START_REGISTERS,
        )  # fmt: skip
    return dk, dv


@gluon.jit(do_not_specialize=["row_count", "tokens", "left", "right"])
def _dkv_kernel(
    k_blocks, v_blocks, q_blocks, do_blocks, numbers_ptr, dk_ptr, dv_ptr, rows_ptr, row_count,
    tokens, k_stride_h, v_stride_h, q_stride_h, do_stride_h,
    scale, scale_log2, left, right, SHAPE: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_blocks.dtype
    TILE: gl.constexpr = [SHAPE.CONSUMERS, SHAPE.ROWS, SHAPE.D]
    RING: gl.constexpr = [SHAPE.STAGES, SHAPE.BLOCK, SHAPE.D]
    NUMBERS: gl.constexpr = [SHAPE.STAGES, SHAPE.BLOCK]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    buffers = (
        gl.allocate_shared_memory(dtype, TILE, k_blocks.layout),
        gl.allocate_shared_memory(dtype, TILE, v_blocks.layout),
        gl.allocate_shared_memory(dtype, RING, q_blocks.layout),
        gl.allocate_shared_memory(dtype, RING, do_blocks.layout),
        gl.allocate_shared_memory(gl.float32, NUMBERS, PLAIN),
        gl.allocate_shared_memory(gl.float32, NUMBERS, PLAIN),
    )
    barriers = (
        one_barrier(1),  # the tile's K and V are there
        one_barrier(SHAPE.CONSUMERS),  # they may be overwritten
        ring_of_barriers(SHAPE.STAGES, 1 + _LANES),  # Q is there, and lane by lane lse2 and delta
        ring_of_barriers(SHAPE.STAGES, SHAPE.CONSUMERS),
        ring_of_barriers(SHAPE.STAGES, 1),  # dO is there
        ring_of_barriers(SHAPE.STAGES, SHAPE.CONSUMERS),
        one_barrier(1),  # the last block is there, with rows of the next user
    )
    fence_async_shared()
    descriptors = (k_blocks, v_blocks, q_blocks, do_blocks)
    strides = (k_stride_h, v_stride_h, q_stride_h, do_stride_h)
    load = (descriptors, strides, numbers_ptr, tokens, rows_ptr, row_count, buffers, barriers)
    differentiate = (
        dk_ptr, dv_ptr, rows_ptr, row_count, scale, scale_log2, left, right, buffers, barriers,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (_differentiate, (differentiate, SHAPE, 0)),
            (_differentiate, (differentiate, SHAPE, 1)),
            (_load, (load, SHAPE)),
        ],
        [SHAPE.WARPS, 1],
        [SHAPE.REGISTERS, 24],
    )


@gluon.jit
def _load(args, SHAPE: gl.constexpr):
    """Brings each tile's K and V, and Q, dO, lse2 and delta of its queries, head by head."""
    descriptors, strides, numbers_ptr, tokens, rows_ptr, row_count, buffers, barriers = args
    k_blocks, v_blocks, q_blocks, do_blocks = descriptors
    k_stride_h, v_stride_h, q_stride_h, do_stride_h = strides
    k_buffer, v_buffer, q_buffer, do_buffer, lse2_buffer, delta_buffer = buffers
    tile_full, tile_empty, q_full, q_empty, do_full, do_empty, landed = barriers
    CONSUMERS: gl.constexpr = SHAPE.CONSUMERS
    TILE_BYTES: gl.constexpr = 2 * CONSUMERS * k_blocks.block_type.nbytes
    BLOCK_BYTES: gl.constexpr = q_blocks.block_type.nbytes
    stage = 0
    phase = 0
    tile_phase = 0
    tail_phase = 0
    count = row_count * SHAPE.HEADS
    head, k_start, k_end, q_start, q_end, shift = row_fields(rows_ptr, 0, count, SHAPE.HEADS)
    for step in range(gl.cdiv(count, gl.num_programs(0))):
        ahead = row_fields(rows_ptr, step + 1, count, SHAPE.HEADS)
        if q_start < q_end:
            mbarrier.wait(tile_empty, tile_phase ^ 1)
            mbarrier.expect(tile_full, TILE_BYTES)
            for consumer in gl.static_range(CONSUMERS):
                start = k_start + consumer * SHAPE.ROWS
                tma.async_copy_global_to_shared(
                    k_blocks, [start, head * k_stride_h], tile_full, k_buffer.index(consumer)
                )
                tma.async_copy_global_to_shared(
                    v_blocks, [start, head * v_stride_h], tile_full, v_buffer.index(consumer)
                )
            tile_phase ^= 1
            for member in range(SHAPE.GROUP):
                q_head = head * SHAPE.GROUP + member
                lse2_ptr = numbers_ptr + (2 * q_head).to(gl.int64) * tokens
                q_column = q_head * q_stride_h
                do_column = q_head * do_stride_h
                for start in range(q_start, q_end, SHAPE.BLOCK):
                    tail = start + SHAPE.BLOCK > q_end
                    mbarrier.wait(q_empty.index(stage), phase ^ 1)
                    mbarrier.wait(do_empty.index(stage), phase ^ 1)
                    q = q_buffer.index(stage)
                    d_o = do_buffer.index(stage)
                    q_there = q_full.index(stage)
                    do_there = do_full.index(stage)
                    _load_numbers(
                        lse2_ptr, tokens, start, q_end, lse2_buffer.index(stage),
                        delta_buffer.index(stage), q_there,
                    )  # fmt: skip
                    if tail:
                        mbarrier.expect(landed, 2 * BLOCK_BYTES)
                        tma.async_copy_global_to_shared(q_blocks, [start, q_column], landed, q)
                        tma.async_copy_global_to_shared(do_blocks, [start, do_column], landed, d_o)
                        mbarrier.wait(landed, tail_phase)
                        tail_phase ^= 1
                        zero_rows(q, q_end - start)
                        mbarrier.arrive(q_there)
                        zero_rows(d_o, q_end - start)
                        mbarrier.arrive(do_there)
                    else:
                        mbarrier.expect(q_there, BLOCK_BYTES)
                        tma.async_copy_global_to_shared(q_blocks, [start, q_column], q_there, q)
                        mbarrier.expect(do_there, BLOCK_BYTES)
                        tma.async_copy_global_to_shared(
                            do_blocks, [start, do_column], do_there, d_o
                        )
                    stage, phase = next_slot(stage, phase, SHAPE.STAGES)
        head, k_start, k_end, q_start, q_end, shift = ahead


@gluon.jit
def _load_numbers(lse2_ptr, tokens, start, end, lse2, delta, there):
    """One head's numbers of the block from `start`, 0 from `end` on.

    Not by TMA, which wants the innermost coordinate at a multiple of 16 bytes. Each lane arrives
    at `there` when its own copies have.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [_LANES], [1], [0])
    token = start + gl.arange(0, lse2.shape[0], LAYOUT)
    inside = token < end
    async_copy.async_copy_global_to_shared(lse2, lse2_ptr + token, mask=inside)
    async_copy.async_copy_global_to_shared(delta, lse2_ptr + tokens + token, mask=inside)
    async_copy.mbarrier_arrive(there, increment_count=False)


@gluon.jit
def _differentiate(args, SHAPE: gl.constexpr, ME: gl.constexpr):
    """One consumer: the keys from ME * ROWS to (ME + 1) * ROWS of every tile.

    The queries of the heads of a group follow each other as one long row of blocks.
    """
    dk_ptr, dv_ptr, rows_ptr, row_count, scale, scale_log2, left, right, buffers, barriers = args
    k_buffer, v_buffer, q_buffer, do_buffer, lse2_buffer, delta_buffer = buffers
    tile_full, tile_empty, q_full, q_empty, do_full, do_empty, landed = barriers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [SHAPE.WARPS, 1], [16, SHAPE.BLOCK, 16]
    )
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [SHAPE.WARPS, 1], [16, SHAPE.D, 16])
    ROWS: gl.constexpr = SHAPE.ROWS
    BLOCK: gl.constexpr = SHAPE.BLOCK
    D: gl.constexpr = SHAPE.D
    dtype: gl.constexpr = k_buffer.dtype
    stage = 0
    phase = 0
    tile_phase = 0
    count = row_count * SHAPE.HEADS
    head, k_start, k_end, q_start, q_end, shift = row_fields(rows_ptr, 0, count, SHAPE.HEADS)
    for step in range(gl.cdiv(count, gl.num_programs(0))):
        ahead = row_fields(rows_ptr, step + 1, count, SHAPE.HEADS)
        first_k = k_start + ME * ROWS
        dk = gl.zeros([ROWS, D], gl.float32, OUTPUT)
        dv = gl.zeros([ROWS, D], gl.float32, OUTPUT)
        if q_start < q_end:
            mbarrier.wait(tile_full, tile_phase)
            tile_phase ^= 1
            k = k_buffer.index(ME)
            v = v_buffer.index(ME)

            whole_start, whole_end = whole_blocks(
                k_start, k_end, q_start, q_end, shift, left, right,
                SHAPE.HAS_LEFT, SHAPE.HAS_RIGHT, SHAPE.BLOCK,
            )  # fmt: skip
            band = (first_k, q_end, whole_start, whole_end, shift, left, right)
            mbarrier.wait(q_full.index(stage), phase)
            left_over = SHAPE.GROUP * gl.cdiv(q_end - q_start, SHAPE.BLOCK) - 1
            d_scores = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
            state = (dk, dv, d_scores, stage, phase)
            state = _meet(
                state, k, v, buffers, barriers, q_start, band, left_over > 0, scale_log2,
                SHAPE, SCORES, True,
            )  # fmt: skip
            start = q_start
            for block in range(left_over):
                start += SHAPE.BLOCK
                start = gl.where(start < q_end, start, q_start)
                state = _meet(
                    state, k, v, buffers, barriers, start, band, block + 1 < left_over,
                    scale_log2, SHAPE, SCORES, False,
                )  # fmt: skip
            dk, dv, d_scores, stage, phase = state
            mbarrier.arrive(tile_empty)
            factor = left_factor(d_scores, dk, dtype)
            dk = warpgroup_mma(factor, q_buffer.index(stage), dk, is_async=True)
            dk, factor = warpgroup_mma_wait(0, deps=[dk, factor])
            mbarrier.arrive(q_empty.index(stage))
            stage, phase = next_slot(stage, phase, SHAPE.STAGES)
        if first_k < k_end:
            store_tile(dk_ptr, dk * scale, first_k, k_end, head, SHAPE.HEADS)
            store_tile(dv_ptr, dv, first_k, k_end, head, SHAPE.HEADS)
        head, k_start, k_end, q_start, q_end, shift = ahead


@gluon.jit
def _meet(
    state, k, v, buffers, barriers, start, band, more, scale_log2,
    SHAPE: gl.constexpr, SCORES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """The block of queries from `start`, whose Q is there, adds to dV and gives its dS; the one
    before adds to dK.

    So two products are in the making while probabilities are, and one while dS is.
    """
    q_buffer, do_buffer, lse2_buffer, delta_buffer = buffers[2:]
    tile_full, tile_empty, q_full, q_empty, do_full, do_empty, landed = barriers
    first_k, q_end, whole_start, whole_end, shift, left, right = band
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    dk, dv, d_scores, stage, phase = state
    before = stage
    if not FIRST:
        stage, phase = next_slot(stage, phase, SHAPE.STAGES)
    scores = product_with_transpose(k, q_buffer.index(stage), SCORES)
    if not FIRST:
        # Not at the end of the loop: halves carried around it are taken apart and packed again.
        factor = left_factor(d_scores, dk, q_buffer.dtype)
        dk = warpgroup_mma(factor, q_buffer.index(before), dk, is_async=True)
    mbarrier.wait(do_full.index(stage), phase)
    d_o = do_buffer.index(stage)
    d_probabilities = product_with_transpose(v, d_o, SCORES)
    scores = warpgroup_mma_wait(1 if FIRST else 2, deps=[scores])
    lse2 = gl.expand_dims(lse2_buffer.index(stage).load(COLUMN), 0)
    exponent = scores * scale_log2 - lse2
    cut = (start < whole_start) | (start >= whole_end)
    if cut:
        exponent = mask_block(
            exponent, first_k, start, q_end, shift, left, right, SHAPE.HAS_LEFT, SHAPE.HAS_RIGHT
        )
    probabilities = gl.exp2(exponent)
    if FIRST:
        d_probabilities = warpgroup_mma_wait(0, deps=[d_probabilities])
    else:
        dk, factor, d_probabilities = warpgroup_mma_wait(0, deps=[dk, factor, d_probabilities])
        mbarrier.arrive(q_empty.index(before))
    weights = left_factor(probabilities, dv, q_buffer.dtype)
    dv = warpgroup_mma(weights, d_o, dv, is_async=True)
    delta = gl.expand_dims(delta_buffer.index(stage).load(COLUMN), 0)
    d_scores = probabilities * (d_probabilities - delta)
    if cut:
        # What inf or NaN of a query made of a probability 0.
        d_scores = mask_block(
            d_scores, first_k, start, q_end, shift, left, right, SHAPE.HAS_LEFT, SHAPE.HAS_RIGHT,
            0.0,
        )  # fmt: skip
    # The next block's Q is waited for here because that wait is a loop: across it the assembler
    # does not move the end of the products up to before dS.
    ahead_stage, ahead_phase = next_slot(stage, phase, SHAPE.STAGES)
    mbarrier.wait(q_full.index(ahead_stage), ahead_phase, pred=more)
    dv, weights = warpgroup_mma_wait(0, deps=[dv, weights])
    mbarrier.arrive(do_empty.index(stage))
    return dk, dv, d_scores, stage, phase
