"""Reductions over each user's tokens: the pieces that programs take, and sums over them.

A user's tokens are cut into pieces of a fixed number, counted from the user's first token. The last
piece, which most users have alone, belongs to the program of the user. Full pieces before it belong
to slots, of which there are as many as such pieces fit into all tokens; a search in the offsets
tells whose a slot is, and some stay empty: no schedule. A user of one piece is finished at once; of
a longer one each piece leaves a partial result, and a second launch merges them in order. Pieces
begin where the user does: a result does not depend, to the bit, on where in a batch its user lies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.sizes import cdiv, power_of_two
from jagged_kernels.device.search import search_steps, user_of_slot

# Partial results of one user that a merge reads at a time, and its warps.
MERGE_LANES = 32
MERGE_WARPS = 2


class Cut(NamedTuple):
    """What decides, with the width and the dtype, how users are cut."""

    warps: int  # a program, at most
    bytes: int  # that a thread loads before it waits
    steps: int  # loads of so many bytes that follow each other, at most
    tokens: int  # of a tile, at most
    least_warps: int = 1  # a program, however narrow the rows are
    columns: int = 64  # a program, at most
    # A thread, at most. Told so, the compiler lets all loads of a tile begin before it waits for
    # the first; else it waits in between, so as to need fewer.
    registers: int = 64


class PieceShape(NamedTuple):
    """How a reduction of [T, C] is cut."""

    block: int  # columns a program
    lanes: int  # tokens that are reduced side by side
    tile: int  # tokens that are loaded at once
    piece: int  # tokens a piece
    warps: int
    registers: int


def piece_shape(columns: int, size: int, cut: Cut) -> PieceShape:
    """For numbers of `size` bytes.

    Depends on the width and the dtype alone: the order of a user's sum must not change with the
    batch.
    """
    block = min(power_of_two(columns), cut.columns)
    vector = min(16 // size, block)  # numbers that a thread loads at once
    warps = min(max(block // vector, cut.least_warps), cut.warps)
    lanes = 32 * warps * vector // block  # each of them one thread's, in registers
    tile = min(lanes * (cut.bytes // (vector * size)), cut.tokens)
    return PieceShape(block, lanes, tile, tile * cut.steps, warps, cut.registers)


class Pieces(NamedTuple):
    """The pieces of a batch."""

    shape: PieceShape
    slots: int
    users: int
    blocks: int  # of columns

    def numbers(self) -> tuple[int, int, int]:
        """The arguments (users, slots, steps) of `load_piece`."""
        return self.users, self.slots, search_steps(self.users)

    def constants(self, columns: int) -> dict[str, Any]:
        shape = self.shape
        return {
            "COLUMNS": columns, "BLOCKS": self.blocks, "BLOCK": shape.block, "PIECE": shape.piece
        }  # fmt: skip


def cut_users(x: Tensor, offsets: Tensor, cut: Cut) -> Pieces:
    shape = piece_shape(x.shape[1], x.element_size(), cut)
    users, blocks = offsets.shape[0] - 1, cdiv(x.shape[1], shape.block)
    # A user can be longer than a piece only if all users together are: no slot, no merge.
    return Pieces(shape, x.shape[0] // shape.piece, users, blocks)


@triton.jit
def load_piece(
    offsets_ptr, number, users, slots, steps, PIECE: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    """(user, its first token, its number of tokens, first token of piece `number`, tokens of the
    piece, its row among 2 * slots partial results).

    Numbers below `slots` are those of slots. From there on they are users', or, with CUT, the
    slots once more: each for the last piece of the user whose first slot it is. A number without
    a piece has no tokens.
    """
    is_last = number >= slots
    slot = tl.where(is_last, number - slots, number)
    if CUT:
        user = user_of_slot(offsets_ptr, users, steps, slot, PIECE)
    else:
        user = slot
        if number < slots:
            user = user_of_slot(offsets_ptr, users, steps, slot, PIECE)
    first = tl.load(offsets_ptr + user).to(tl.int32)
    length = tl.load(offsets_ptr + user + 1).to(tl.int32) - first
    full = tl.maximum(length - 1, 0) // PIECE
    place = tl.where(is_last, full, slot - first // PIECE)
    count = tl.where(place < full, PIECE, tl.where(is_last, length - full * PIECE, 0))
    if CUT:
        count = tl.where(is_last & ((slot != first // PIECE) | (full == 0)), 0, count)
    row = tl.where(is_last, slots + first // PIECE, slot)
    return user, first, length, first + place * PIECE, count, row


@triton.jit
def partial_rows(first, length, slots, done, PIECE: tl.constexpr, LANES: tl.constexpr):
    """([LANES] rows of the partial results of a user's pieces from piece `done` on, is there one),
    in their order."""
    full = (length - 1) // PIECE
    place = done + tl.arange(0, LANES)
    slot = first // PIECE
    return tl.where(place < full, slot + place, slots + slot), place <= full


@triton.jit
def tile_addresses(
    left, column, STRIDE: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """([TILE, BLOCK] numbers from the first of a tile's tokens, which of them are among the `left`
    tokens and the columns)."""
    row = tl.arange(0, TILE)
    inside = (row < left)[:, None]
    if COLUMNS % BLOCK != 0:
        inside = inside & (column < COLUMNS)[None, :]
    return row[:, None] * STRIDE + column[None, :], inside


@triton.jit
def by_lane(tile, LANES: tl.constexpr):
    """[TILE, BLOCK] -> [TILE / LANES, LANES, BLOCK]: along the first, each thread has all."""
    return tl.reshape(tile, [tile.shape[0] // LANES, LANES, tile.shape[1]])
