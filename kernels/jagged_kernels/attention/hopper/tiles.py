"""The tiles of a program that stays, one after another: of a consumer, and of the loading warp.

What is done with a tile is the kernel's own: a function that it passes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jagged_kernels.attention.hopper.blocks import (
    hand_out,
    handed_out,
    next_slot,
    place_of,
    row_fields,
)


@gluon.jit
def attend_tiles(
    args, S: gl.constexpr, C: gl.constexpr, NEGATE: gl.constexpr, WEIGHT: gl.constexpr,
    ME: gl.constexpr, ATTEND: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """One consumer: part ME of every tile's queries.

    Args:
        args: the kernel's; number 3 and 4 are the rows and how many there are. Of tiles that are
            counted out, (those, dealing).
        ATTEND: (rings, row, place, args, S, C, NEGATE, WEIGHT, ME) -> (sums, rings) of a tile;
            rings are four numbers, 0 at first: stage, its phase, and two more phases.
        STORE: (sums, row, place, count, args, S, C, WEIGHT, ME) puts sums where they belong.
    """
    if C.counted:
        args, dealing = args
    rows_ptr, row_count = args[3:5]
    stage = 0
    phase = 0
    q_phase = 0
    clean_phase = 0
    count = row_count * S.HEADS
    place = place_of(0)
    row = row_fields(rows_ptr, place, count, S.HEADS)
    if C.counted:
        side = 0
        side_phase = 0
        while place < count:
            rings = (stage, phase, q_phase, clean_phase)
            sums, rings = ATTEND(rings, row, place, args, S, C, NEGATE, WEIGHT, ME)
            stage, phase, q_phase, clean_phase = rings
            next_place = handed_out(dealing, side, side_phase, C.warps)
            side, side_phase = next_slot(side, side_phase, 2)
            ahead = row_fields(rows_ptr, next_place, count, S.HEADS)
            STORE(sums, row, place, count, args, S, C, WEIGHT, ME)
            place = next_place
            row = ahead
    else:
        for step in range(gl.cdiv(count, gl.num_programs(0))):
            rings = (stage, phase, q_phase, clean_phase)
            sums, rings = ATTEND(rings, row, place_of(step), args, S, C, NEGATE, WEIGHT, ME)
            stage, phase, q_phase, clean_phase = rings
            # Not at the top as in `load_tiles`: registers are scarce in between, and it is cached.
            ahead = row_fields(rows_ptr, place_of(step + 1), count, S.HEADS)
            STORE(sums, row, place_of(step), count, args, S, C, WEIGHT, ME)
            row = ahead


@gluon.jit
def load_tiles(args, S: gl.constexpr, C: gl.constexpr, LOAD: gl.constexpr):
    """The loading warp.

    Args:
        args: as of `attend_tiles`; of tiles that are counted out, (those, counter, dealing).
        LOAD: ((stage, phase, q_phase), row, args, S, C) -> those three after a tile.
    """
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
            rings = (stage, phase, q_phase)
            stage, phase, q_phase = LOAD(rings, row, args, S, C)
            row = ahead
    else:
        for step in range(gl.cdiv(count, gl.num_programs(0))):
            ahead = row_fields(rows_ptr, place_of(step + 1), count, S.HEADS)
            rings = (stage, phase, q_phase)
            stage, phase, q_phase = LOAD(rings, row, args, S, C)
            row = ahead
