"""Tiles of one user's tokens (and of its matrix), numbered without a table.

A user of n tokens needs ceil(n / TILE) tiles, which is at most n / TILE + 1. So user b gets the
numbers from offsets[b] // TILE + b up to those of user b + 1: enough for every user (an empty one
has a number of its own), T // TILE + B in all, and a search in the offsets tells whose a number is.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Users that one step of the search looks at: few steps, each of which waits for memory.
_WIDTH_LOG2 = 7
_WIDTH = tl.constexpr(1 << _WIDTH_LOG2)
_SHIFT = tl.constexpr(_WIDTH_LOG2)


def tile_count(tokens: int, users: int, tile: int) -> int:
    """How many numbers there are."""
    return tokens // tile + users


def strip_count(tokens: int, users: int, scores: int, rows: int, columns: int) -> int:
    """How many numbers there are for pieces [rows, columns] of the users' matrices.

    A user needs at most (n / rows + 1) * (n / columns + 1): the same reasoning in two dimensions.
    """
    return (scores + (rows + columns) * tokens) // (rows * columns) + users


def search_steps(users: int) -> int:
    """The `steps` of `user_of_tile`, `user_of_slot` and `user_of_strip`."""
    return max(1, -(-(users - 1).bit_length() // _WIDTH_LOG2))


@triton.jit
def first_tile(offsets_ptr, user, TILE: tl.constexpr):
    """The first number of a user, or of each user of a block."""
    return (tl.load(offsets_ptr + user) // TILE).to(tl.int32) + user


@triton.jit
def user_of_tile(offsets_ptr, users, steps, tile, TILE: tl.constexpr):
    """Whose number `tile` is, for a scalar 0 <= tile < tile_count."""
    return _search(offsets_ptr, None, users, steps, tile, TILE, 1, 1)


@triton.jit
def user_of_slot(offsets_ptr, users, steps, slot, PIECE: tl.constexpr):
    """The user with offsets[user] // PIECE <= slot < offsets[user + 1] // PIECE, for a scalar
    0 <= slot < T // PIECE."""
    return _search(offsets_ptr, None, users, steps, slot, PIECE, 1, 0)


@triton.jit
def first_strip(
    offsets_ptr, matrix_offsets_ptr, user, exists, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """`first_tile` for pieces [ROWS, COLUMNS] of the users' [n, n] matrices."""
    scores = tl.load(matrix_offsets_ptr + user, mask=exists, other=0)
    tokens = tl.load(offsets_ptr + user, mask=exists, other=0).to(tl.int64)
    return ((scores + (ROWS + COLUMNS) * tokens) // (ROWS * COLUMNS)).to(tl.int32) + user


@triton.jit
def user_of_strip(
    offsets_ptr, matrix_offsets_ptr, users, steps, strip, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Whose number `strip` is, for a scalar 0 <= strip < strip_count."""
    return _search(offsets_ptr, matrix_offsets_ptr, users, steps, strip, ROWS, COLUMNS, 1)


@triton.jit
def _search(
    offsets_ptr, matrix_offsets_ptr, users, steps, number, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The last user whose first number is not behind `number`; EACH: 1 where every user has one
    number more than its tokens fill, 0 where not."""
    user = number * 0
    for step in range(0, steps):
        stride = 1 << ((steps - 1 - step) * _SHIFT)
        candidate = user + tl.arange(0, _WIDTH) * stride
        exists = candidate < users
        if matrix_offsets_ptr is None:
            first = tl.load(offsets_ptr + candidate, mask=exists, other=0) // ROWS
            first = first.to(tl.int32) + candidate * EACH
        else:
            first = first_strip(offsets_ptr, matrix_offsets_ptr, candidate, exists, ROWS, COLUMNS)
        user += (tl.sum((exists & (first <= number)).to(tl.int32), 0) - 1) * stride
    return user


@triton.jit
def load_tile(
    ptr, start, end, stride, column, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """[TILE, BLOCK] from token `start` and from `column`; 0 from token `end` and from COLUMNS."""
    token = start + tl.arange(0, TILE)
    columns = column + tl.arange(0, BLOCK)
    # int64: tokens x columns passes 2^31 in large batches.
    address = ptr + token.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = token[:, None] < end
    if COLUMNS % BLOCK != 0:
        inside = inside & (columns[None, :] < COLUMNS)
    return tl.load(address, mask=inside, other=0.0)


@triton.jit
def store_tile(
    ptr, block, start, end, column, COLUMNS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Into a contiguous [T, COLUMNS], in its dtype, what `load_tile` would read."""
    token = start + tl.arange(0, TILE)
    columns = column + tl.arange(0, BLOCK)
    address = ptr + token.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    inside = token[:, None] < end
    if COLUMNS % BLOCK != 0:
        inside = inside & (columns[None, :] < COLUMNS)
    tl.store(address, block.to(ptr.dtype.element_ty), mask=inside)
