"""The forward kernel for Hopper: long histories in half precision at head_dim 64 and 128.

FlashAttention-3 (arXiv 2407.08608, section 3) over the rows of the schedule, written in Gluon. One
warp brings K and V blocks by TMA into a ring of buffers; each of the consumers, a warpgroup or
two, holds 64 or 128 of the tile's queries, and its softmax of one block runs beside its products of
the block before. Programs stay, one a multiprocessor, and take every n-th (row, head), so that the
loads of the next tile run beside the end of this one.
"""

# Gluon's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
# Tuples are taken apart whole, also where a function needs a part.
# ruff: noqa: RUF059
# What compile-time branches define is there where they use it.
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

from __future__ import annotations

from dataclasses import dataclass

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

from jagged_kernels.attention.gluon_blocks import (
    by_row,
    left_factor,
    mask_scores,
    multiprocessors,
    next_slot,
    one_barrier,
    product_with_transpose,
    register_split,
    ring_of_barriers,
    row_fields,
    store_tile,
    tma_reads,
    token_blocks,
    whole_blocks,
    zero_tail,
)
from jagged_kernels.attention.rows import NO_LIMIT
from jagged_kernels.attention.triton_blocks import LOG2_E


@dataclass(frozen=True)
class HopperConfig:
    """How the forward kernel is laid out.

    Attributes:
        consumers: groups of warps that hold queries, 1 to 3.
        warps: of each consumer, 4 or 8; a warp holds 16 queries.
        block: keys taken at a time.
        stages: buffers for K and for V.
        in_turns: the consumers' products wait for each other, so that the softmax of one runs
            beside the products of the other.
        residents: programs on a multiprocessor at a time.
    """

    consumers: int = 2
    warps: int = 4
    block: int = 128
    stages: int = 2
    in_turns: bool = True
    residents: int = 1

    @property
    def tile_q(self) -> int:
        return 16 * self.warps * self.consumers

    @property
    def registers(self) -> tuple[int, int]:
        return register_split(self.consumers * self.warps // 4, self.residents)


@dataclass(frozen=True)
class KernelShape:
    """What the kernel is compiled for: heads, `HopperConfig`, and what the mask and scale need."""

    HEADS: int
    GROUP: int
    D: int
    ROWS: int
    CONSUMERS: int
    WARPS: int
    BLOCK: int
    STAGES: int
    IN_TURNS: bool
    REGISTERS: int
    NEGATE: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool


def hopper_forward_fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Can `launch_forward` read these?"""
    dim = q.shape[2]
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device)[0] == 9
        and q.dtype in (torch.float16, torch.bfloat16)
        and dim in (64, 128)
        and v.shape[2] == dim
        and q.shape[0] > 0
        and k.shape[0] > 0
        and all(tma_reads(x) for x in (q, k, v))
    )


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    *,
    left: int,
    right: int,
    scale: float,
    config: HopperConfig,
) -> tuple[Tensor, Tensor]:
    """`triton_forward.launch_forward` for what `hopper_forward_fits`, and rows of tiles of
    `config.tile_q` queries."""
    tokens, heads, dim = q.shape
    o = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    lse2 = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    start_registers, registers = config.registers
    programs = min(multiprocessors(q.device.index) * config.residents, rows.shape[0] * heads)
    shape = KernelShape(
        HEADS=heads, GROUP=heads // k.shape[1], D=dim,
        ROWS=16 * config.warps, CONSUMERS=config.consumers, WARPS=config.warps,
        BLOCK=config.block, STAGES=config.stages, IN_TURNS=config.in_turns, REGISTERS=registers,
        NEGATE=scale < 0, HAS_LEFT=left != NO_LIMIT, HAS_RIGHT=right != NO_LIMIT,
    )  # fmt: skip
    with torch.cuda.device_of(q):
        _forward_kernel[(programs,)](
            token_blocks(q, 16 * config.warps),
            token_blocks(k, config.block),
            token_blocks(v, config.block),
            o, lse2, rows, rows.shape[0], q.stride(1), k.stride(1), v.stride(1),
            max(abs(scale) * LOG2_E, 1e-37), left, right, shape,
            num_warps=config.warps, maxnreg=start_registers,
        )  # fmt: skip
    return o, lse2


@gluon.jit(do_not_specialize=["row_count", "left", "right"])
def _forward_kernel(
    q_blocks, k_blocks, v_blocks, o_ptr, lse2_ptr, rows_ptr, row_count,
    q_stride_h, k_stride_h, v_stride_h, scale_log2, left, right, SHAPE: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_blocks.dtype
    buffers = (
        gl.allocate_shared_memory(dtype, [SHAPE.CONSUMERS, SHAPE.ROWS, SHAPE.D], q_blocks.layout),
        gl.allocate_shared_memory(dtype, [SHAPE.STAGES, SHAPE.BLOCK, SHAPE.D], k_blocks.layout),
        gl.allocate_shared_memory(dtype, [SHAPE.STAGES, SHAPE.BLOCK, SHAPE.D], v_blocks.layout),
    )
    barriers = (
        one_barrier(1),  # Q is there
        one_barrier(SHAPE.CONSUMERS),  # Q may be overwritten
        ring_of_barriers(SHAPE.STAGES, 1),  # K is there
        ring_of_barriers(SHAPE.STAGES, SHAPE.CONSUMERS),
        ring_of_barriers(SHAPE.STAGES, 1),  # V is there
        ring_of_barriers(SHAPE.STAGES, SHAPE.CONSUMERS),
        one_barrier(SHAPE.CONSUMERS),  # V's last block holds nothing of the next user
        ring_of_barriers(SHAPE.CONSUMERS, 1),  # this consumer's turn
    )
    fence_async_shared()
    load = (
        q_blocks, k_blocks, v_blocks, rows_ptr, row_count, q_stride_h, k_stride_h, v_stride_h,
        buffers, barriers,
    )  # fmt: skip
    attend = (
        o_ptr, lse2_ptr, rows_ptr, row_count, scale_log2, left, right, buffers, barriers,
    )  # fmt: skip
    if SHAPE.CONSUMERS == 1:
        gl.warp_specialize(
            [(_attend, (attend, SHAPE, 0)), (_load, (load, SHAPE))],
            [1],
            [24],
        )
    elif SHAPE.CONSUMERS == 2:
        gl.warp_specialize(
            [(_attend, (attend, SHAPE, 0)), (_attend, (attend, SHAPE, 1)), (_load, (load, SHAPE))],
            [SHAPE.WARPS, 1],
            [SHAPE.REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (attend, SHAPE, 0)),
                (_attend, (attend, SHAPE, 1)),
                (_attend, (attend, SHAPE, 2)),
                (_load, (load, SHAPE)),
            ],
            [SHAPE.WARPS, SHAPE.WARPS, 1],
            [SHAPE.REGISTERS, SHAPE.REGISTERS, 24],
        )


@gluon.jit
def _load(args, SHAPE: gl.constexpr):
    """Brings each tile's Q, and its K and V from the last block to the first."""
    q_blocks, k_blocks, v_blocks, rows_ptr, row_count = args[:5]
    q_stride_h, k_stride_h, v_stride_h, buffers, barriers = args[5:]
    q_buffer, k_buffer, v_buffer = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleaned, turn = barriers
    CONSUMERS: gl.constexpr = SHAPE.CONSUMERS
    stage = 0
    phase = 0
    q_phase = 0
    count = row_count * SHAPE.HEADS
    head, q_start, q_end, k_start, k_end, shift = row_fields(rows_ptr, 0, count, SHAPE.HEADS)
    for step in range(gl.cdiv(count, gl.num_programs(0))):
        ahead = row_fields(rows_ptr, step + 1, count, SHAPE.HEADS)
        if k_start < k_end:
            mbarrier.wait(q_empty, q_phase ^ 1)
            mbarrier.expect(q_full, CONSUMERS * q_blocks.block_type.nbytes)
            for consumer in gl.static_range(CONSUMERS):
                tma.async_copy_global_to_shared(
                    q_blocks,
                    [q_start + consumer * SHAPE.ROWS, head * q_stride_h],
                    q_full,
                    q_buffer.index(consumer),
                )
            q_phase ^= 1
            blocks = gl.cdiv(k_end - k_start, SHAPE.BLOCK)
            k_column = head // SHAPE.GROUP * k_stride_h
            v_column = head // SHAPE.GROUP * v_stride_h
            for block in range(blocks):
                start = k_start + (blocks - 1 - block) * SHAPE.BLOCK
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), k_blocks.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    k_blocks, [start, k_column], k_full.index(stage), k_buffer.index(stage)
                )
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), v_blocks.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    v_blocks, [start, v_column], v_full.index(stage), v_buffer.index(stage)
                )
                stage, phase = next_slot(stage, phase, SHAPE.STAGES)
        head, q_start, q_end, k_start, k_end, shift = ahead


@gluon.jit
def _attend(args, SHAPE: gl.constexpr, ME: gl.constexpr):
    """One consumer: the queries from ME * ROWS to (ME + 1) * ROWS of every tile.

    Block j's scores are in the making while block j - 1's softmax goes into its product with V;
    a product with V ends under the next softmax.
    """
    o_ptr, lse2_ptr, rows_ptr, row_count, scale_log2, left, right, buffers, barriers = args
    q_buffer, k_buffer, v_buffer = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleaned, turn = barriers
    SCORES: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [SHAPE.WARPS, 1], [16, SHAPE.BLOCK, 16]
    )
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [SHAPE.WARPS, 1], [16, SHAPE.D, 16])
    ROWS: gl.constexpr = SHAPE.ROWS
    D: gl.constexpr = SHAPE.D
    dtype: gl.constexpr = q_buffer.dtype
    q = q_buffer.index(ME)
    stage = 0
    phase = 0
    q_phase = 0
    clean_phase = 0
    turn_phase = 1 if ME == 0 else 0
    count = row_count * SHAPE.HEADS
    head, q_start, q_end, k_start, k_end, shift = row_fields(rows_ptr, 0, count, SHAPE.HEADS)
    for step in range(gl.cdiv(count, gl.num_programs(0))):
        ahead = row_fields(rows_ptr, step + 1, count, SHAPE.HEADS)
        first_q = q_start + ME * SHAPE.ROWS
        acc = gl.zeros([ROWS, D], gl.float32, OUTPUT)
        total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
        top = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        if k_start < k_end:
            blocks = gl.cdiv(k_end - k_start, SHAPE.BLOCK)
            last_k = k_start + (blocks - 1) * SHAPE.BLOCK
            whole_start, whole_end = whole_blocks(
                q_start,
                q_end,
                k_start,
                k_end,
                shift,
                left,
                right,
                SHAPE.HAS_LEFT,
                SHAPE.HAS_RIGHT,
                SHAPE.BLOCK,
            )
            masked_until = gl.maximum(blocks - (whole_end - k_start) // SHAPE.BLOCK, 1)
            whole_until = gl.maximum(blocks - (whole_start - k_start) // SHAPE.BLOCK, masked_until)

            mbarrier.wait(q_full, q_phase)
            q_phase ^= 1
            mbarrier.wait(k_full.index(stage), phase)
            scores = product_with_transpose(q, k_buffer.index(stage), SCORES)
            scores = warpgroup_mma_wait(0, deps=[scores])
            mbarrier.arrive(k_empty.index(stage))
            if SHAPE.NEGATE:
                scores = -scores
            scores = mask_scores(
                scores, first_q, last_k, k_end, shift, left, right, SHAPE.HAS_LEFT, SHAPE.HAS_RIGHT
            )
            weights, correction, top, total = _softmax(scores, top, total, scale_log2, True)
            if last_k + SHAPE.BLOCK > k_end:
                mbarrier.wait(v_full.index(stage), phase)
                zero_tail(
                    v_buffer.index(stage), k_end - last_k, cleaned, clean_phase, SHAPE.CONSUMERS, ME
                )
                clean_phase ^= 1

            ahead_stage, ahead_phase = next_slot(stage, phase, SHAPE.STAGES)
            mbarrier.wait(k_full.index(ahead_stage), ahead_phase, pred=blocks > 1)

            state = (acc, total, top, weights, stage, phase, turn_phase)
            if SHAPE.HAS_RIGHT:
                state = _walk(
                    state, q, buffers, barriers, 1, masked_until, blocks, first_q, last_k, k_end,
                    shift, left, right, scale_log2, SHAPE, ME, SCORES, True,
                )  # fmt: skip
            state = _walk(
                state, q, buffers, barriers, masked_until, whole_until, blocks, first_q, last_k,
                k_end, shift, left, right, scale_log2, SHAPE, ME, SCORES, False,
            )  # fmt: skip
            if SHAPE.HAS_LEFT:
                state = _walk(
                    state, q, buffers, barriers, whole_until, blocks, blocks, first_q, last_k,
                    k_end, shift, left, right, scale_log2, SHAPE, ME, SCORES, True,
                )  # fmt: skip
            acc, total, top, weights, stage, phase, turn_phase = state

            mbarrier.arrive(q_empty)
            p = left_factor(weights, acc, dtype)
            mbarrier.wait(v_full.index(stage), phase)
            acc = warpgroup_mma(p, v_buffer.index(stage), acc, is_async=True)
            acc, p = warpgroup_mma_wait(0, deps=[acc, p])
            mbarrier.arrive(v_empty.index(stage))
            stage, phase = next_slot(stage, phase, SHAPE.STAGES)
        if first_q < q_end:
            _store(acc, total, top, o_ptr, lse2_ptr, first_q, q_end, head, SHAPE.HEADS)
        head, q_start, q_end, k_start, k_end, shift = ahead


@gluon.jit
def _walk(
    state, q, buffers, barriers, first, last, blocks, first_q, last_k, k_end, shift, left, right,
    scale_log2, SHAPE: gl.constexpr, ME: gl.constexpr, SCORES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The blocks number [first, last), counted from the end of the keys; the first's K is there."""
    q_buffer, k_buffer, v_buffer = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleaned, turn = barriers
    acc, total, top, weights, stage, phase, turn_phase = state
    for block in range(first, last):
        v_stage = stage
        v_phase = phase
        stage, phase = next_slot(stage, phase, SHAPE.STAGES)
        # Not at the end of the loop: halves carried around it are taken apart and packed again.
        p = left_factor(weights, acc, q.dtype)
        if SHAPE.IN_TURNS:
            mbarrier.wait(turn.index(ME), turn_phase)
            turn_phase ^= 1
        scores = product_with_transpose(q, k_buffer.index(stage), SCORES)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        running = warpgroup_mma(p, v_buffer.index(v_stage), acc, is_async=True)
        if SHAPE.IN_TURNS:
            mbarrier.arrive(turn.index((ME + 1) % SHAPE.CONSUMERS))
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(k_empty.index(stage))
        if SHAPE.NEGATE:
            scores = -scores
        if MASKED:
            scores = mask_scores(
                scores, first_q, last_k - block * SHAPE.BLOCK, k_end, shift, left, right,
                SHAPE.HAS_LEFT, SHAPE.HAS_RIGHT,
            )  # fmt: skip
        weights, correction, top, total = _softmax(scores, top, total, scale_log2, MASKED)
        # The next block's K is waited for here because that wait is a loop: across it the assembler
        # does not move the end of the product with V up to before the softmax.
        ahead_stage, ahead_phase = next_slot(stage, phase, SHAPE.STAGES)
        mbarrier.wait(k_full.index(ahead_stage), ahead_phase, pred=block < blocks - 1)
        acc, p = warpgroup_mma_wait(0, deps=[running, p])
        mbarrier.arrive(v_empty.index(v_stage))
        acc = acc * by_row(correction, acc)
    return acc, total, top, weights, stage, phase, turn_phase


@gluon.jit
def _softmax(scores, top, total, scale_log2, MASKED: gl.constexpr):
    """(weights, correction of what was summed before, top, total); `top` is scaled already.

    Weights are relative to the rounded top, everywhere the same one, so its rounding cancels.
    """
    new_top = gl.maximum(top, gl.max(scores, 1) * scale_log2)
    # -inf - -inf is NaN: a query that has seen nothing yet subtracts 0.
    shift = gl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(shift, 1))
    correction = gl.exp2(top - shift)
    return weights, correction, new_top, total * correction + gl.sum(weights, 1)


@gluon.jit
def _store(
    acc, total, top, o_ptr, lse2_ptr, q_start, q_end, head, HEADS: gl.constexpr
):  # fmt: skip
    """A query that saw nothing has total 0: its output is 0 and its lse -inf."""
    ROWS: gl.constexpr = acc.shape[0]
    divisor = gl.where(total == 0.0, 1.0, total)
    lse2 = gl.where(total == 0.0, float("-inf"), top + gl.log2(divisor))
    token = q_start + gl.arange(0, ROWS, lse2.type.layout)
    gl.store(lse2_ptr + token.to(gl.int64) * HEADS + head, lse2, mask=token < q_end)

    store_tile(o_ptr, acc * by_row(1.0 / divisor, acc), q_start, q_end, head, HEADS)
