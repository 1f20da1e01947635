"""Warps that add to dQ what consumers of `hopper.one_pass` leave them, so that these need not wait.

Shares of dQ stand in a ring in shared memory, in the order in which a product leaves them in
registers: so they do in the sums in memory, and a warp moves 16 bytes a lane from one to the other.
Two warps take blocks by turns: each waits for the tile's turn at its block, adds, and announces it.
"""

# Tuples are taken apart whole, also where a function needs a part.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from jagged_kernels.attention.hopper.blocks import LANES, handed_out, next_slot
from jagged_kernels.attention.hopper.one_pass_sums import ADD, ALONE, LAST, STORE, flat
from jagged_kernels.attention.hopper.one_pass_warps import (
    DONE,
    announce,
    count_at,
    counted_out,
    tile_at,
    turn_at,
    walk_of_tile,
    wanted,
)

# Blocks whose shares stand in shared memory.
SLOTS = gl.constexpr(4)
ADDERS = gl.constexpr(2)
# Numbers that a warp moves at a time.
_PIECE = gl.constexpr(256)


@gluon.jit
def ring_of_shares(S: gl.constexpr, C: gl.constexpr):
    """Shared memory for the shares of each consumer of `SLOTS` blocks, side by side."""
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    PART: gl.constexpr = S.BLOCK * S.PAD_D // C.consumers
    return gl.allocate_shared_memory(gl.float32, [SLOTS * C.consumers, PART], PLAIN)


@gluon.jit
def hand_over(dq, shares, barriers, slot, phase, C: gl.constexpr, ME: gl.constexpr):
    """Leaves a consumer's share of a block."""
    full, empty = barriers[7], barriers[8]
    FLAT: gl.constexpr = gl.BlockedLayout([4], [LANES], [C.warps], [0])
    mbarrier.wait(empty.index(slot), phase ^ 1)
    shares.index(slot * C.consumers + ME).store(flat(dq, FLAT))
    mbarrier.arrive(full.index(slot))


@gluon.jit
def add_shares(args, S: gl.constexpr, C: gl.constexpr, ME: gl.constexpr):
    """One warp of `ADDERS`: every so many of the program's blocks, in the order in which consumers
    leave them.

    The last of a user's blocks may be missing to whole tiles: it is counted all the same, so that
    whoever is to use its place in the ring may wait for it. So are all blocks of a user of one
    tile, which need no place.
    """
    counts_ptr, tables, ring, out, shares, barriers, dealing = args
    rows_ptr, offsets_ptr, row_count, left, right = tables
    full, empty = barriers[7], barriers[8]
    RATIO: gl.constexpr = C.tile_q // S.BLOCK
    PIECES: gl.constexpr = S.BLOCK * S.PAD_D // _PIECE
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pieces = shares._reinterpret(gl.float32, [SLOTS * PIECES, _PIECE], PLAIN)
    slot = 0
    phase = 0
    mine = ME == 0
    side = 0
    side_phase = 0
    place = gl.program_id(0)
    head, tile, tiles, start, length, before = tile_at(tables, place, S, C)
    while tiles > 0:
        if not counted_out(S):
            place += gl.num_programs(0)
            ahead = tile_at(tables, place, S, C)
        first, count, start_block, in_round = walk_of_tile(
            tables, tile, tiles, before, length, S, C
        )
        for member in range(S.GROUP):
            base = (before * S.GROUP + member * tiles) * RATIO
            step_block = start_block
            for _ in range(count):
                if mine:
                    block = first + step_block
                    turn, turns = turn_at(tables, tile, tiles, in_round, block, S, C)
                    what = gl.where(turn == 0, STORE, ADD)
                    if turn + 1 == turns:
                        what = gl.where(turn == 0, ALONE, LAST)
                    number = base + block
                    at, least = wanted(number, turn, ring)
                    while count_at(counts_ptr + at) < least:
                        pass
                    mbarrier.wait(full.index(slot), phase)
                    where = (start + block * S.BLOCK, start + length, head * S.GROUP + member)
                    _move(pieces, slot, number % ring, what, where, out, S, C)
                    mbarrier.arrive(empty.index(slot))
                    announce(counts_ptr, number, gl.where(turn + 1 == turns, DONE, 1))
                mine = mine == 0
                slot, phase = next_slot(slot, phase, SLOTS)
                step_block = gl.where(step_block + 1 == count, 0, step_block + 1)
        if ME == 0:
            for member in range(S.GROUP):
                # Of one tile: the last.
                for block in range(gl.cdiv(length, S.BLOCK), (tile + 1) * RATIO):
                    number = (before * S.GROUP + member * tiles) * RATIO + block
                    at, least = wanted(number, 0, ring)
                    while count_at(counts_ptr + at) < least:
                        pass
                    announce(counts_ptr, number, DONE)
        if counted_out(S):
            place = handed_out(dealing, side, side_phase, 1)
            side, side_phase = next_slot(side, side_phase, 2)
            ahead = tile_at(tables, place, S, C)
        head, tile, tiles, start, length, before = ahead


@gluon.jit
def _move(pieces, slot, place, what, where, out, S: gl.constexpr, C: gl.constexpr):
    """A block's shares into its sums, or with what these hold into dQ."""
    dq_ptr, alarm_ptr, sums_ptr, scale = out
    q_start, end, head = where
    PIECES: gl.constexpr = S.BLOCK * S.PAD_D // _PIECE
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [LANES], [1], [0])
    lane = gl.arange(0, _PIECE, LAYOUT)
    sums = sums_ptr + place.to(gl.int64) * (S.BLOCK * S.PAD_D)
    if what == ADD:
        for piece in range(PIECES):
            share = pieces.index(slot * PIECES + piece).load(LAYOUT)
            gl.atomic_add(sums + piece * _PIECE + lane, share, sem="relaxed")
    elif what == STORE:
        for piece in range(PIECES):
            share = pieces.index(slot * PIECES + piece).load(LAYOUT)
            gl.store(sums + piece * _PIECE + lane, share)
    else:
        for piece in range(PIECES):
            share = pieces.index(slot * PIECES + piece).load(LAYOUT)
            if what == LAST:
                share += gl.load(sums + piece * _PIECE + lane, cache_modifier=".cg")
            row, column = _place_in_block(piece * _PIECE + lane, S, C)
            token = q_start + row
            own = (token < end) & (column < S.D)
            rounded = (share * scale).to(dq_ptr.dtype.element_ty)
            gl.store(
                dq_ptr + (token.to(gl.int64) * S.HEADS + head) * S.D + column, rounded, mask=own
            )
            if alarm_ptr is not None:
                bad = ~(gl.abs(rounded.to(gl.float32)) < float("inf"))
                gl.store(alarm_ptr + 0 * lane, 1, mask=bad & own)


@gluon.jit
def _place_in_block(number, S: gl.constexpr, C: gl.constexpr):
    """(row, column) of a number of a block's shares: `one_pass_sums.flat` undone."""
    PART: gl.constexpr = S.BLOCK * S.PAD_D // C.consumers
    share = number // PART
    four = number % PART // 4  # those of a thread
    thread = four % (LANES * C.warps)
    row = thread // LANES * 16 + thread % LANES // 4 + number % 4 // 2 * 8
    column = four // (LANES * C.warps) * 8 + thread % 4 * 2 + number % 2
    if C.turned:
        return share * (S.BLOCK // C.consumers) + column, row
    return row, share * (S.PAD_D // C.consumers) + column
