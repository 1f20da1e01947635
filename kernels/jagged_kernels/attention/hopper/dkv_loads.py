"""What the loading warp of `hopper.dkv` brings: tiles of keys, and the queries that see them."""

# Tuples are taken apart whole, also where a function needs a part.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jagged_kernels.attention.hopper.blocks import (
    hand_out,
    load_numbers,
    next_slot,
    place_of,
    row_fields,
)
from jagged_kernels.attention.hopper.heads import bring, bring_queries
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
def load_queries(args, S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr):
    """Brings each tile's K and V, and Q, dO, lse2 and delta of its queries, head by head.

    Weights by a policy know neither lse2 nor delta.
    """
    if C.counted:
        args, taken_ptr, dealing = args
    meets = 0
    if S.GROUPS:
        args, meets = args
    rows_ptr, row_count = args[3:5]
    KV_HEADS: gl.constexpr = S.HEADS // S.GROUP
    stage = 0
    phase = 0
    tile_phase = 0
    tail_phase = 0
    count = row_count * KV_HEADS
    place = place_of(0)
    row = row_fields(rows_ptr, place, count, KV_HEADS)
    if C.counted:
        side = 0
        side_phase = 0
        while place < count:
            next_place = hand_out(taken_ptr, dealing, side, side_phase)
            side, side_phase = next_slot(side, side_phase, 2)
            ahead = row_fields(rows_ptr, next_place, count, KV_HEADS)
            state = (stage, phase, tile_phase, tail_phase)
            state = _load_tile(state, row, place, count, args, meets, S, C, WEIGHT)
            stage, phase, tile_phase, tail_phase = state
            place = next_place
            row = ahead
    else:
        for step in range(gl.cdiv(count, gl.num_programs(0))):
            ahead = row_fields(rows_ptr, place_of(step + 1), count, KV_HEADS)
            state = (stage, phase, tile_phase, tail_phase)
            state = _load_tile(state, row, place_of(step), count, args, meets, S, C, WEIGHT)
            stage, phase, tile_phase, tail_phase = state
            row = ahead


@gluon.jit
def _load_tile(
    rings, row, place, count, args, meets, S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr
):  # fmt: skip
    descriptors, lse2_ptr, delta_ptr, rows_ptr, row_count, buffers, barriers = args
    k_blocks, v_blocks, q_blocks, do_blocks = descriptors
    k_buffer, v_buffer, q_buffer, do_buffer = buffers[:4]
    tile_full, tile_empty, q_full, q_empty, do_full, do_empty, landed = barriers
    head, k_start, k_end, q_start, q_end, shift = row
    stage, phase, tile_phase, tail_phase = rings
    listed = (place, count, k_start, q_start, q_end, shift, head)
    CONSUMERS: gl.constexpr = C.consumers
    KV_HEADS: gl.constexpr = S.HEADS // S.GROUP
    TILE_BYTES: gl.constexpr = 2 * CONSUMERS * k_blocks.block_type.nbytes
    if q_start < q_end:
        if S.GROUPS:
            blocks = _count_blocks(meets, rows_ptr, listed, S)
        mbarrier.wait(tile_empty, tile_phase ^ 1)
        if S.GROUPS:
            note_blocks(buffers[-1], blocks)
            if S.RULED:
                note_rule(
                    buffers[-1], meets, rows_ptr, place, count, q_start, q_end, shift,
                    KV_HEADS, True,
                )  # fmt: skip
        mbarrier.expect(tile_full, TILE_BYTES)
        for consumer in gl.static_range(CONSUMERS):
            start = k_start + consumer * C.part_q
            bring(k_blocks, start, head, tile_full, k_buffer.index(consumer), S.K_STRIDE_H)
            bring(v_blocks, start, head, tile_full, v_buffer.index(consumer), S.V_STRIDE_H)
        tile_phase ^= 1
        for member in range(S.GROUP):
            q_head = head * S.GROUP + member
            state = (stage, phase, tail_phase)
            if S.GROUPS:
                state = _load_list(
                    state, descriptors, lse2_ptr, delta_ptr, meets, rows_ptr, listed, q_head,
                    buffers, barriers, S, C, WEIGHT,
                )  # fmt: skip
            else:
                for start in range(q_start, q_end, S.BLOCK):
                    state = _load_block(
                        state, descriptors, lse2_ptr, delta_ptr, start, q_end, q_head, 0,
                        buffers, barriers, S, C, WEIGHT,
                    )  # fmt: skip
            stage, phase, tail_phase = state
    return stage, phase, tile_phase, tail_phase


@gluon.jit
def _count_blocks(meets, rows_ptr, listed, S: gl.constexpr):
    """Of the lists of a tile's heads, all together; listed: as in `_load_tile`."""
    place, count, k_start, q_start, q_end, shift, head = listed
    blocks = 0
    for member in range(S.GROUP):
        begin, end = ends_of_list(
            meets, rows_ptr, place, count, k_start, q_end, shift, head * S.GROUP + member,
            S.HEADS // S.GROUP, S,
        )  # fmt: skip
        blocks += parts_of_list(begin, end, S.TILE, S.BLOCK)
    return blocks


@gluon.jit
def _load_list(
    state, descriptors, lse2_ptr, delta_ptr, meets, rows_ptr, listed, q_head, buffers, barriers,
    S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr,
):  # fmt: skip
    """`_load_block` for the list of one head."""
    place, count, k_start, q_start, q_end, shift, head = listed
    begin, end = ends_of_list(
        meets, rows_ptr, place, count, k_start, q_end, shift, q_head, S.HEADS // S.GROUP, S
    )
    note = note_of_part(meets.col, begin, end, 0, q_start, q_end, S.TILE, S.BLOCK)
    for block in range(parts_of_list(begin, end, S.TILE, S.BLOCK)):
        # The next one's entry is on its way while buffers are waited for.
        ahead_note = note_of_part(meets.col, begin, end, block + 1, q_start, q_end, S.TILE, S.BLOCK)
        start = token_of_note(note)
        state = _load_block(
            state, descriptors, lse2_ptr, delta_ptr, start, q_end, q_head, note, buffers, barriers,
            S, C, WEIGHT,
        )  # fmt: skip
        note = ahead_note
    return state


@gluon.jit
def _load_block(
    state, descriptors, lse2_ptr, delta_ptr, start, q_end, q_head, note, buffers, barriers,
    S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr,
):  # fmt: skip
    """The queries from `start`. `note` where they are listed."""
    k_blocks, v_blocks, q_blocks, do_blocks = descriptors
    q_buffer, do_buffer = buffers[2:4]
    tile_full, tile_empty, q_full, q_empty, do_full, do_empty, landed = barriers
    stage, phase, tail_phase = state
    tail = start + S.BLOCK > q_end
    at = start
    if S.GROUPS:
        tail = tail & (start < q_end)
        at = token_to_load(start, q_end, S.BLOCK)
    mbarrier.wait(q_empty.index(stage), phase ^ 1)
    mbarrier.wait(do_empty.index(stage), phase ^ 1)
    q = q_buffer.index(stage)
    d_o = do_buffer.index(stage)
    q_there = q_full.index(stage)
    do_there = do_full.index(stage)
    if S.GROUPS:
        write_note(buffers[-1], stage, note)
    if WEIGHT is None:
        lse2_buffer, delta_buffer = buffers[4:6]
        load_numbers(
            lse2_ptr + q_head, delta_ptr + q_head, start, q_end,
            lse2_buffer.index(stage), delta_buffer.index(stage), q_there, S.HEADS,
        )  # fmt: skip
    tail_phase = bring_queries(
        (q_blocks, q, q_there), (do_blocks, d_o, do_there), at, q_head, tail, q_end - start,
        landed, tail_phase, S,
    )  # fmt: skip
    stage, phase = next_slot(stage, phase, C.stages)
    return stage, phase, tail_phase
