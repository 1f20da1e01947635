"""What kernels over `Jagged2Tensor`s share: each token has a row of its user's matrix.

Programs take equal chunks of tokens and walk along their rows. How many tokens there are
is not known on the host: of n_b tokens and n_b ** 2 scores a user, it is at most the root of users
times scores (Cauchy-Schwarz), and programs behind the last token leave at once.

A row begins at any address, and is read and written number by number. A GPU writes sectors of 32
bytes, and takes half as long again for a part of one: so what writes rows moves its blocks to where
sectors begin (`aligned_rows`, `turned_rows`), and the 32 numbers that threads write beside each
other are whole sectors.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.device.search import first_tile, user_of, user_of_tile

# Rows of one user that a program of one warp takes (it has rows for itself: nothing is exchanged
# between warps), a block of them, and numbers of whole rows at a time.
ROWS, HEIGHT, WIDTH, ELEMENTS = 32, 4, 128, 1024
ROW_OPTIONS = {"num_warps": 1}
# Tokens a program and numbers of each that it takes at a time.
ROW_TILE = (16, 128)
# Five programs a multiprocessor in place of three: more scores on their way, for a few that spill.
OPTIONS = {"num_warps": 4, "maxnreg": 96}


def token_bound(values: Tensor, offsets: Tensor) -> int:
    """At least the number of tokens of a `Jagged2Tensor`: see above."""
    return math.isqrt(values.shape[0] * (offsets.shape[0] - 1))


@triton.jit
def load_tokens(offsets_ptr, matrix_offsets_ptr, users, token):
    """(user, place in the user, number of the user's tokens, where its matrix begins) of tokens.

    The number is 0 for a token behind the last.
    """
    tokens = tl.load(offsets_ptr + users).to(tl.int32)
    user = user_of(offsets_ptr, users, tl.minimum(token, tl.maximum(tokens - 1, 0)))
    first = tl.load(offsets_ptr + user).to(tl.int32)
    count = tl.load(offsets_ptr + user + 1).to(tl.int32) - first
    count = tl.where(token < tokens, count, 0)
    return user, token - first, count, tl.load(matrix_offsets_ptr + user)


@triton.jit
def row_addresses(start, count, index):
    """(offsets, is there one) [rows, numbers]: numbers `index` of rows of `count` from `start`."""
    return start[:, None] + index[None, :], index[None, :] < count[:, None]


@triton.jit
def load_square(offsets_ptr, matrix_offsets_ptr, user):
    """(first token, number of tokens, where its matrix begins) of a user."""
    # int64: tokens x width passes 2^31 in large batches.
    start = tl.load(offsets_ptr + user).to(tl.int64)
    size = (tl.load(offsets_ptr + user + 1) - start).to(tl.int32)
    return start, size, tl.load(matrix_offsets_ptr + user)


@triton.jit
def fits_best(size, MOST: tl.constexpr, HALVINGS: tl.constexpr, LAST: tl.constexpr):
    """Whether MOST halved so many times, LAST times at most, is the least that is not below `size`.

    So a loop over `tl.static_range(LAST + 1)` compiles each width and takes one, or none."""
    fits = size <= MOST >> HALVINGS
    if HALVINGS < LAST:
        fits = fits & (size > MOST >> (HALVINGS + 1))
    return fits


@triton.jit
def size_again(offsets_ptr):
    """The number of tokens of the user of this offset, in a way that a compiler cannot know to be
    the one it has. Else it keeps what follows from that, each number's address and whether the
    number exists, in registers from a load to the store and from one block to the next.
    """
    end = tl.load(offsets_ptr + 1, volatile=True)
    return (end - tl.load(offsets_ptr, volatile=True)).to(tl.int32)


@triton.jit
def load_rows(offsets_ptr, matrix_offsets_ptr, users, steps, tile, ROWS: tl.constexpr):
    """(user, its first token, number of its tokens, where its matrix begins, first row) of a tile
    of ROWS rows, numbered as in `device.search`; there is none if the row is not below the number.
    """
    user = user_of_tile(offsets_ptr, users, steps, tile, ROWS)
    start, size, matrix = load_square(offsets_ptr, matrix_offsets_ptr, user)
    return user, start, size, matrix, (tile - first_tile(offsets_ptr, user, ROWS)) * ROWS


@triton.jit
def aligned_rows(ptr, begin, size, rows, WIDTH: tl.constexpr):
    """(pointers, columns, length) of `rows` of `size` numbers, from `begin` on, one after another.

    Both are [rows, WIDTH] and the first of a walk in steps of WIDTH over `length`: it begins with
    the sector that each row begins in, before the row.
    """
    SECTOR: tl.constexpr = 256 // ptr.dtype.element_ty.primitive_bitwidth
    start = begin + rows.to(tl.int64) * size
    # By a difference: a compiler that sees that pointers are aligned gives each thread 16 bytes,
    # which the ends of rows, anywhere, then cut into numbers that lie apart.
    before = start % SECTOR
    place = tl.arange(0, WIDTH)[None, :]
    most = tl.where(size % SECTOR == 0, begin % SECTOR, SECTOR - 1).to(tl.int32)
    return (
        (ptr + (start - before))[:, None] + place,
        place - before.to(tl.int32)[:, None],
        size + most,
    )


@triton.jit
def is_below(index, count):
    """0 <= index < count, both int32, in one comparison."""
    return index.to(tl.uint32, bitcast=True) < count.to(tl.uint32, bitcast=True)


@triton.jit
def turned_rows(begin, size, rows, WIDTH: tl.constexpr, SECTOR: tl.constexpr):
    """(where the sectors are that the rows of `aligned_rows` begin in, [rows, WIDTH] numbers from
    there on, which of them a row has) for rows of up to WIDTH numbers, a sector having SECTOR.

    What a sector holds before its row is left out; what that would cut off at the end of the row
    is at the first places.
    """
    start = begin + rows.to(tl.int64) * size
    before = start.to(tl.int32) & (SECTOR - 1)
    place = tl.arange(0, WIDTH)[None, :]
    place = tl.where(place < before[:, None], place + WIDTH, place)
    return start - before, place, place < (before + size)[:, None]


@triton.jit
def least_step(size, STEP: tl.constexpr):
    """From a row to the next that begins alike, modulo STEP numbers: 1 if STEP divides `size`."""
    return STEP // tl.maximum(tl.minimum(size & -size, STEP), 1)


@triton.jit
def tokens_at(
    ptr, token, size, stride, column, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """[tokens, BLOCK] of a user's tokens from `column` on; 0 where it has no such token."""
    columns = (column + tl.arange(0, BLOCK))[None, :]
    inside = is_below(token, size)[:, None]
    if COLUMNS % BLOCK != 0:
        inside = inside & (columns < COLUMNS)
    return tl.load(ptr + token.to(tl.int64)[:, None] * stride + columns, mask=inside, other=0.0)
