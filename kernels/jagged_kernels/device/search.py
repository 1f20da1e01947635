"""Whose is it: searches in the offsets, in place of tables, so that a grid is known from T and B.

Of a token (`user_of`): programs take equal chunks of tokens, which may hold many short users or a
part of a long one, so no user sets the time of a launch.

Of a tile: a user of n tokens needs ceil(n / TILE) tiles, which is at most n / TILE + 1. So user b
gets the numbers from offsets[b] // TILE + b up to those of user b + 1: enough for every user (an
empty one has a number of its own), T // TILE + B in all. Likewise of pieces of its matrix.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Users that one step of the search of a number looks at: few steps, each of which waits for memory.
_WIDTH_LOG2 = 7
_WIDTH = tl.constexpr(1 << _WIDTH_LOG2)
_SHIFT = tl.constexpr(_WIDTH_LOG2)


@triton.jit
def user_of(offsets_ptr, users, token):
    """The user whose tokens `token` is among; an empty user has none. For 0 <= token < T.

    `token` may be a scalar or a block.
    """
    return user_among(offsets_ptr, 0, users, token)


@triton.jit
def user_among(offsets_ptr, low, left, token):
    """The same of `left` users from `low` on, of which it is one.

    Binary search for the last offset that is not behind it.
    """
    first = token * 0 + low
    last = first + left - 1
    while left > 1:
        middle = first + (last - first + 1) // 2
        behind = tl.load(offsets_ptr + middle) > token
        last = tl.where(behind, middle - 1, last)
        first = tl.where(behind, first, middle)
        left = (left + 1) // 2
    return first


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
