"""What the loading warp of `hopper.forward` brings, where rows see ranges of keys."""

# Tuples are taken apart whole, also where a function needs a part.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jagged_kernels.attention.hopper.blocks import next_slot
from jagged_kernels.attention.hopper.heads import bring
from jagged_kernels.attention.hopper.tiles import load_tiles


@gluon.jit
def load_keys(args, S: gl.constexpr, C: gl.constexpr):
    """Brings each tile's Q, and its K and V from the last block to the first."""
    load_tiles(args, S, C, _load_tile)


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
