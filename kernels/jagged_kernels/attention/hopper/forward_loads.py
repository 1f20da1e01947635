"""What the loading warp of `hopper.forward` brings, where rows see ranges of keys."""

# Tuples are taken apart whole, also where a function needs a part.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jagged_kernels.attention.hopper.blocks import hand_out, next_slot, place_of, row_fields
from jagged_kernels.attention.hopper.heads import bring


@gluon.jit
def load_keys(args, S: gl.constexpr, C: gl.constexpr):
    """Brings each tile's Q, and its K and V from the last block to the first."""
    if C.counted:
        args, taken_ptr, dealing = args
    rows_ptr, row_count = args[3:5]
    stage = 0
    phase = 0
    q_phase = 0
    count = row_count * S.HEADS
    place = place_of(0)
    row = row_fields(rows_ptr, place, count, S.HEADS)
    if C.counted:
        side = 0
        side_phase = 0
        while place < count:
            place = hand_out(taken_ptr, dealing, side, side_phase)
            side, side_phase = next_slot(side, side_phase, 2)
            ahead = row_fields(rows_ptr, place, count, S.HEADS)
            state = (stage, phase, q_phase)
            stage, phase, q_phase = _load_tile(state, row, args, S, C)
            row = ahead
    else:
        for step in range(gl.cdiv(count, gl.num_programs(0))):
            ahead = row_fields(rows_ptr, place_of(step + 1), count, S.HEADS)
            state = (stage, phase, q_phase)
            stage, phase, q_phase = _load_tile(state, row, args, S, C)
            row = ahead


@gluon.jit
def _load_tile(state, row, args, S: gl.constexpr, C: gl.constexpr):
    q_blocks, k_blocks, v_blocks, rows_ptr, row_count, buffers, barriers = args
    q_buffer, k_buffer, v_buffer = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleaned = barriers
    head, q_start, q_end, k_start, k_end, shift = row
    stage, phase, q_phase = state
    CONSUMERS: gl.constexpr = C.consumers
    BLOCK: gl.constexpr = S.BLOCK
    if k_start < k_end:
        mbarrier.wait(q_empty, q_phase ^ 1)
        mbarrier.expect(q_full, CONSUMERS * q_blocks.block_type.nbytes)
        for consumer in gl.static_range(CONSUMERS):
            bring(
                q_blocks,
                q_start + consumer * C.part_q,
                head,
                q_full,
                q_buffer.index(consumer),
                S.Q_STRIDE_H,
            )
        q_phase ^= 1
        blocks = gl.cdiv(k_end - k_start, BLOCK)
        kv_head = head // S.GROUP
        for block in range(blocks):
            start = k_start + (blocks - 1 - block) * BLOCK
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), k_blocks.block_type.nbytes)
            bring(
                k_blocks, start, kv_head, k_full.index(stage), k_buffer.index(stage), S.K_STRIDE_H
            )
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), v_blocks.block_type.nbytes)
            bring(
                v_blocks, start, kv_head, v_full.index(stage), v_buffer.index(stage), S.V_STRIDE_H
            )
            stage, phase = next_slot(stage, phase, C.stages)
    return stage, phase, q_phase
