"""The two warps beside the consumers of `hopper.one_pass`: one brings what they read, the other
waits for turns."""

# Tuples are taken apart whole, also where a function needs a part.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jagged_kernels.attention.hopper import one_pass_order as order
from jagged_kernels.attention.hopper.blocks import (
    LANES,
    hand_out,
    handed_out,
    load_numbers,
    next_slot,
    tell,
    whole_blocks,
    zero_rows,
)
from jagged_kernels.attention.hopper.heads import bring, bring_queries
from jagged_kernels.attention.hopper.one_pass_sums import (
    ADD,
    ALONE,
    LAST,
    STORE,
)

# What a block's count of adds becomes when it was the last.
_DONE = gl.constexpr(1 << 30)

# They take no layouts, and so they are the same in Gluon.
_blocks_of_tile = gluon.jit(order.blocks_of_tile.fn)
_tile_of_place = gluon.jit(order.tile_of_place.fn)
_start_of_tile = gluon.jit(order.start_of_tile.fn)
_turn_of_tile = gluon.jit(order.turn_of_tile.fn)


@gluon.constexpr_function
def _around(S):
    """Whether tiles walk around their blocks, as `one_pass_order` says, and a program takes every
    n-th number; else it takes the next one that nobody has, of a counter.

    At head_dim 64 heads that take turns were faster from 4,096 tokens on (`docs/performance.md`).
    """
    return S.PAD_D == 128 and not (S.HAS_LEFT or S.HAS_RIGHT)


@gluon.jit
def _tile(tables, place, S: gl.constexpr, C: gl.constexpr):
    """`tile_of_place`; without a tile there is none at later places either."""
    rows_ptr, offsets_ptr, row_count, ring, left, right = tables
    KV_HEADS: gl.constexpr = S.HEADS // S.GROUP
    return _tile_of_place(
        rows_ptr, offsets_ptr, place, row_count, ring, gl.num_programs(0), left, right,
        KV_HEADS, S.GROUP, S.HAS_LEFT, S.HAS_RIGHT, _around(S), C.tile_q, S.BLOCK,
    )  # fmt: skip


@gluon.jit
def _walk_of_tile(tables, tile, tiles, length, S: gl.constexpr, C: gl.constexpr):
    """(first, count) of the tile's blocks, and the one of these that it starts with."""
    rows_ptr, offsets_ptr, row_count, ring, left, right = tables
    first, count = _blocks_of_tile(
        tile, length, left, right, S.HAS_LEFT, S.HAS_RIGHT, C.tile_q, S.BLOCK
    )
    start_block = _start_of_tile(tile, tiles, gl.num_programs(0), _around(S), C.tile_q, S.BLOCK)
    return first, count, start_block


@gluon.jit
def load(args, S: gl.constexpr, C: gl.constexpr):
    """Brings each tile's K and V, and Q, dO, lse2 and delta of its queries, head by head.

    Where tiles are counted out, it takes the next one when it has brought all of one, some blocks
    before that is done: later, and consumers would wait for it; earlier, and it would be held by
    who does not begin with it, while others wait for it.

    Notes are, of a tile, (first key, end of its user, kv head, steps), of 0 steps when there is
    none any more; of a block its first token, or -1 minus that if some of it is hidden.
    """
    descriptors, lse2_ptr, delta_ptr, taken_ptr, tables, buffers, notes, barriers, dealing = args
    k_blocks, v_blocks, q_blocks, do_blocks = descriptors
    k_buffer, v_buffer, q_buffer, do_buffer, lse2_buffer, delta_buffer, ds_buffer = buffers
    of_tile, of_block, of_turn = notes
    tile_full, tile_empty, q_full, q_empty, do_full, do_empty = barriers[:6]
    landed = barriers[9]
    rows_ptr, offsets_ptr, row_count, ring, left, right = tables
    TILE: gl.constexpr = C.tile_q
    BLOCK: gl.constexpr = S.BLOCK
    CONSUMERS: gl.constexpr = C.consumers
    TILE_BYTES: gl.constexpr = 2 * CONSUMERS * k_blocks.block_type.nbytes
    NOTE: gl.constexpr = gl.BlockedLayout([1], [LANES], [1], [0])
    stage = 0
    phase = 0
    tile_phase = 0
    tail_phase = 0
    side = 0
    side_phase = 0
    place = gl.program_id(0)
    head, tile, tiles, start, length, base = _tile(tables, place, S, C)
    while tiles > 0:
        if _around(S):
            place += gl.num_programs(0)
            ahead = _tile(tables, place, S, C)
        k_start = start + tile * TILE
        end = start + length
        first, count, start_block = _walk_of_tile(tables, tile, tiles, length, S, C)
        first = start + first * BLOCK
        whole_start, whole_end = whole_blocks(
            k_start, gl.minimum(k_start + TILE, end), first, end, 0, left, right,
            S.HAS_LEFT, S.HAS_RIGHT, BLOCK,
        )  # fmt: skip
        mbarrier.wait(tile_empty, tile_phase ^ 1)
        tile_phase ^= 1
        tell(of_tile, 0, k_start)
        tell(of_tile, 1, end)
        tell(of_tile, 2, head)
        tell(of_tile, 3, S.GROUP * count)
        short = k_start + TILE > end
        if short:
            mbarrier.expect(landed, TILE_BYTES)
            _load_tile(k_blocks, v_blocks, k_start, head, landed, k_buffer, v_buffer, S, C)
            mbarrier.wait(landed, tail_phase)
            tail_phase ^= 1
            # dQ sums over all keys of the tile, and 0 times what the next user may have is not
            # always 0.
            for consumer in gl.static_range(CONSUMERS):
                zero_rows(k_buffer.index(consumer), end - k_start - consumer * C.part_q)
            mbarrier.arrive(tile_full)
            # With keys of the next user nothing is whole.
            whole_end = whole_start
        else:
            mbarrier.expect(tile_full, TILE_BYTES)
            _load_tile(k_blocks, v_blocks, k_start, head, tile_full, k_buffer, v_buffer, S, C)
        for member in range(S.GROUP):
            q_head = head * S.GROUP + member
            block = start_block
            for _ in range(count):
                q_start = first + block * BLOCK
                mbarrier.wait(q_empty.index(stage), phase ^ 1)
                mbarrier.wait(do_empty.index(stage), phase ^ 1)
                q = q_buffer.index(stage)
                d_o = do_buffer.index(stage)
                q_there = q_full.index(stage)
                do_there = do_full.index(stage)
                cut = (q_start < whole_start) | (q_start >= whole_end)
                note = gl.where(cut, -1 - q_start, q_start)
                of_block.index(stage).store(gl.full([1], 0, gl.int32, NOTE) + note)
                load_numbers(
                    lse2_ptr + q_head, delta_ptr + q_head, q_start, end,
                    lse2_buffer.index(stage), delta_buffer.index(stage), q_there, S.HEADS,
                )  # fmt: skip
                tail_phase = bring_queries(
                    (q_blocks, q, q_there), (do_blocks, d_o, do_there), q_start, q_head,
                    q_start + BLOCK > end, end - q_start, landed, tail_phase, S,
                )  # fmt: skip
                stage, phase = next_slot(stage, phase, C.stages)
                block = gl.where(block + 1 == count, 0, block + 1)
        if not _around(S):
            place = hand_out(taken_ptr, dealing, side, side_phase)
            side, side_phase = next_slot(side, side_phase, 2)
            ahead = _tile(tables, place, S, C)
        head, tile, tiles, start, length, base = ahead
    mbarrier.wait(tile_empty, tile_phase ^ 1)
    tell(of_tile, 3, 0)
    mbarrier.arrive(tile_full)


@gluon.jit
def _load_tile(
    k_blocks, v_blocks, k_start, head, there, k, v, S: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    CONSUMERS: gl.constexpr = C.consumers
    for consumer in gl.static_range(CONSUMERS):
        start = k_start + consumer * C.part_q
        bring(k_blocks, start, head, there, k.index(consumer), S.K_STRIDE_H)
        bring(v_blocks, start, head, there, v.index(consumer), S.V_STRIDE_H)


@gluon.jit
def take_turns(args, S: gl.constexpr, C: gl.constexpr):
    """Waits for the tile's turn at each block, and announces when it has added.

    Notes are (what to do, place in the ring, first token, query head).

    The last of a user's blocks may be missing to whole tiles: it is counted all the same, so that
    whoever is to use its place in the ring may wait for it. So are all blocks of a user of one
    tile, which need no place.
    """
    counts_ptr, tables, notes, barriers, dealing = args
    rows_ptr, offsets_ptr, row_count, ring, left, right = tables
    of_tile, of_block, of_turn = notes
    my_turn, added = barriers[7], barriers[8]
    TILE: gl.constexpr = C.tile_q
    BLOCK: gl.constexpr = S.BLOCK
    RATIO: gl.constexpr = TILE // BLOCK
    phase = 0
    side = 0
    side_phase = 0
    place = gl.program_id(0)
    head, tile, tiles, start, length, base = _tile(tables, place, S, C)
    while tiles > 0:
        if _around(S):
            place += gl.num_programs(0)
            ahead = _tile(tables, place, S, C)
        first, count, start_block = _walk_of_tile(tables, tile, tiles, length, S, C)
        for member in range(S.GROUP):
            base_of_head = base + member * tiles * RATIO
            block = start_block
            seen = -1
            owed = -1
            more = 1
            for _ in range(count):
                turn, turns = _turn_of_tile(
                    tile, first + block, tiles, gl.num_programs(0), left, right,
                    S.HAS_LEFT, S.HAS_RIGHT, _around(S), TILE, BLOCK,
                )  # fmt: skip
                q_start = start + (first + block) * BLOCK
                number = base_of_head + first + block
                what = gl.where(turn == 0, STORE, ADD)
                if turn + 1 == turns:
                    what = gl.where(turn == 0, ALONE, LAST)
                at, least = _wanted(number, turn, ring)
                if seen < least:
                    # Who waits must not let others wait.
                    _announce(counts_ptr, owed, more)
                    owed = -1
                    while seen < least:
                        seen = _count(counts_ptr + at)
                tell(of_turn, 0, what)
                tell(of_turn, 1, number % ring)
                tell(of_turn, 2, q_start)
                tell(of_turn, 3, head * S.GROUP + member)
                mbarrier.arrive(my_turn)
                block = gl.where(block + 1 == count, 0, block + 1)
                # The add before takes a while to be seen by all; consumers have the next turn
                # meanwhile. What is counted at the block after is on its way then.
                _announce(counts_ptr, owed, more)
                next_turn, _ = _turn_of_tile(
                    tile, first + block, tiles, gl.num_programs(0), left, right,
                    S.HAS_LEFT, S.HAS_RIGHT, _around(S), TILE, BLOCK,
                )  # fmt: skip
                at, least = _wanted(base_of_head + first + block, next_turn, ring)
                seen = _count(counts_ptr + at)
                mbarrier.wait(added, phase)
                phase ^= 1
                owed = number
                more = gl.where(turn + 1 == turns, _DONE, 1)
            _announce(counts_ptr, owed, more)
        for member in range(S.GROUP):
            # Of one tile: the last.
            for block in range(gl.cdiv(length, BLOCK), (tile + 1) * RATIO):
                number = base + member * tiles * RATIO + block
                at, least = _wanted(number, 0, ring)
                while _count(counts_ptr + at) < least:
                    pass
                _announce(counts_ptr, number, _DONE)
        if not _around(S):
            place = handed_out(dealing, side, side_phase, 1)
            side, side_phase = next_slot(side, side_phase, 2)
            ahead = _tile(tables, place, S, C)
        head, tile, tiles, start, length, base = ahead


@gluon.jit
def _wanted(number, turn, ring):
    """(at, least): it is the turn at a block when the count at `at` is `least` or more. The first
    waits for the block that was at the same place of the ring, if there was one."""
    again = (turn == 0) & (number >= ring)
    return gl.where(again, number - ring, number), gl.where(again, _DONE, turn)


@gluon.jit
def _announce(counts_ptr, number, more):
    """That consumers have added to a block; -1: to none."""
    ptr = counts_ptr + gl.maximum(number, 0)
    gl.atomic_add(ptr, more, mask=number >= 0, sem="release", scope="gpu")


@gluon.jit
def _count(ptr):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
