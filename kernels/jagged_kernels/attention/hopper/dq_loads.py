"""What the loading warp of `hopper.dq` brings: tiles of queries, and the keys that they see."""

# Tuples are taken apart whole, also where a function needs a part.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jagged_kernels.attention.hopper.blocks import (
    hand_out,
    next_slot,
    place_of,
    row_fields,
    zero_rows,
)
from jagged_kernels.attention.hopper.heads import bring
from jagged_kernels.attention.hopper.listed import (
    ends_of_list,
    note_blocks,
    note_of_part,
    note_rule,
    parts_of_list,
    token_of_note,
    token_to_load,
    write_note,
)


@gluon.jit
def load_keys(args, S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr):
    """Brings each tile's Q, dO and, of a softmax, O; and its K and V."""
    if C.counted:
        args, taken_ptr, dealing = args
    meets = 0
    if S.GROUPS:
        args, meets = args
    rows_ptr, row_count = args[1:3]
    stage = 0
    phase = 0
    tile_phase = 0
    tail_phase = 0
    count = row_count * S.HEADS
    place = place_of(0)
    row = row_fields(rows_ptr, place, count, S.HEADS)
    ends = (0, 0)
    if S.GROUPS:
        ends = _ends(meets, rows_ptr, place, count, row, S)
    if C.counted:
        side = 0
        side_phase = 0
        while place < count:
            next_place = hand_out(taken_ptr, dealing, side, side_phase)
            side, side_phase = next_slot(side, side_phase, 2)
            ahead = row_fields(rows_ptr, next_place, count, S.HEADS)
            state = (stage, phase, tile_phase, tail_phase)
            state = _load_tile(state, row, ends, place, count, args, meets, S, C, WEIGHT)
            stage, phase, tile_phase, tail_phase = state
            place = next_place
            row = ahead
    else:
        for step in range(gl.cdiv(count, gl.num_programs(0))):
            next_place = place_of(step + 1)
            ahead = row_fields(rows_ptr, next_place, count, S.HEADS)
            state = (stage, phase, tile_phase, tail_phase)
            state = _load_tile(state, row, ends, place_of(step), count, args, meets, S, C, WEIGHT)
            stage, phase, tile_phase, tail_phase = state
            row = ahead
            if S.GROUPS:
                ends = _ends(meets, rows_ptr, next_place, count, row, S)


@gluon.jit
def _ends(meets, rows_ptr, place, count, row, S: gl.constexpr):
    head, q_start, q_end, k_start, k_end, shift = row
    return ends_of_list(meets, rows_ptr, place, count, q_start, k_end, shift, head, S.HEADS, S)


@gluon.jit
def _load_tile(
    rings, row, ends, place, count, args, meets,
    S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr,
):  # fmt: skip
    descriptors, rows_ptr, row_count, buffers, barriers = args
    q_blocks, do_blocks, o_blocks, k_blocks, v_blocks = descriptors
    q_buffer, do_buffer, o_buffer = buffers[:3]
    tile_full, tile_empty, k_full, k_empty, v_full, v_empty, landed = barriers
    head, q_start, q_end, k_start, k_end, shift = row
    begin, end = ends
    stage, phase, tile_phase, tail_phase = rings
    CONSUMERS: gl.constexpr = C.consumers
    SIDES: gl.constexpr = 3 if WEIGHT is None else 2
    TILE_BYTES: gl.constexpr = SIDES * CONSUMERS * q_blocks.block_type.nbytes
    if S.GROUPS:
        notes = buffers[-1]
    if k_start < k_end:
        mbarrier.wait(tile_empty, tile_phase ^ 1)
        if S.GROUPS:
            blocks = parts_of_list(begin, end, S.TILE, S.BLOCK)
            note_blocks(notes, blocks)
            if S.RULED:
                note_rule(
                    notes, meets, rows_ptr, place, count, k_start, k_end, shift, S.HEADS, False
                )
        mbarrier.expect(tile_full, TILE_BYTES)
        for consumer in gl.static_range(CONSUMERS):
            start = q_start + consumer * C.part_q
            bring(q_blocks, start, head, tile_full, q_buffer.index(consumer), S.Q_STRIDE_H)
            bring(do_blocks, start, head, tile_full, do_buffer.index(consumer), S.DO_STRIDE_H)
            if WEIGHT is None:
                bring(o_blocks, start, head, tile_full, o_buffer.index(consumer), S.D)
        tile_phase ^= 1
        keys = (head // S.GROUP, k_end)
        state = (stage, phase, tail_phase)
        if S.GROUPS:
            note = note_of_part(meets.col, begin, end, 0, k_start, k_end, S.TILE, S.BLOCK)
            for block in range(blocks):
                # The next one's entry is on its way while buffers are waited for.
                ahead_note = note_of_part(
                    meets.col, begin, end, block + 1, k_start, k_end, S.TILE, S.BLOCK
                )
                start = token_of_note(note)
                state = _load_block(
                    state, k_blocks, v_blocks, buffers, barriers, start, keys, note, S, C
                )
                note = ahead_note
        else:
            for start in range(k_start, k_end, S.BLOCK):
                state = _load_block(
                    state, k_blocks, v_blocks, buffers, barriers, start, keys, 0, S, C
                )
        stage, phase, tail_phase = state
    return stage, phase, tile_phase, tail_phase


@gluon.jit
def _load_block(
    state, k_blocks, v_blocks, buffers, barriers, start, keys, note,
    S: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """The keys from `start`; keys: (their head, where they end). `note` where they are listed."""
    k_buffer, v_buffer = buffers[3:5]
    tile_full, tile_empty, k_full, k_empty, v_full, v_empty, landed = barriers
    stage, phase, tail_phase = state
    kv_head, k_end = keys
    k = k_buffer.index(stage)
    tail = start + S.BLOCK > k_end
    at = start
    if S.GROUPS:
        tail = tail & (start < k_end)
        at = token_to_load(start, k_end, S.BLOCK)
    mbarrier.wait(k_empty.index(stage), phase ^ 1)
    if S.GROUPS:
        write_note(buffers[-1], stage, note)
    if tail:
        mbarrier.expect(landed, k_blocks.block_type.nbytes)
        bring(k_blocks, at, kv_head, landed, k, S.K_STRIDE_H)
    else:
        k_there = k_full.index(stage)
        mbarrier.expect(k_there, k_blocks.block_type.nbytes)
        bring(k_blocks, at, kv_head, k_there, k, S.K_STRIDE_H)
    mbarrier.wait(v_empty.index(stage), phase ^ 1)
    mbarrier.expect(v_full.index(stage), v_blocks.block_type.nbytes)
    bring(v_blocks, at, kv_head, v_full.index(stage), v_buffer.index(stage), S.V_STRIDE_H)
    if tail:
        mbarrier.wait(landed, tail_phase)
        tail_phase ^= 1
        zero_rows(k, k_end - start)
        mbarrier.arrive(k_full.index(stage))
    stage, phase = next_slot(stage, phase, C.stages)
    return stage, phase, tail_phase
