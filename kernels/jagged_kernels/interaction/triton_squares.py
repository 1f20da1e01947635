"""What kernels over `Jagged2Tensor`s share: each token has a row and a column of its user's matrix.

Programs take equal chunks of tokens and walk along their rows or columns. How many tokens there are
is not known on the host: of n_b tokens and n_b ** 2 scores a user, it is at most the root of users
times scores (Cauchy-Schwarz), and programs behind the last token leave at once.
"""

# Triton's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.interaction.triton_users import user_of

# Tokens a program and numbers of each that it takes at a time. Along a row, memory is contiguous
# in the row; along a column, from column to column.
ROW_TILE = (16, 128)
COLUMN_TILE = (64, 32)
# Five programs a multiprocessor in place of three: more scores on their way, for a few that spill.
OPTIONS = {"num_warps": 4, "maxnreg": 96}


def token_bound(values: Tensor, offsets: Tensor) -> int:
    """At least the number of tokens of a `Jagged2Tensor` without empty users."""
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
def lines(place, count, matrix, AXIS: tl.constexpr):
    """(first number, step to the next) of each token's row (AXIS 1) or column (AXIS 0)."""
    if AXIS == 1:
        return matrix + place.to(tl.int64) * count, count * 0 + 1
    return matrix + place, count


@triton.jit
def line_addresses(start, step, count, index, AXIS: tl.constexpr):
    """(offsets, is there one) of numbers `index` of each line; they lie along AXIS of the tile."""
    number = tl.expand_dims(index, 1 - AXIS)
    place = tl.expand_dims(start, AXIS) + number.to(tl.int64) * tl.expand_dims(step, AXIS)
    return place, number < tl.expand_dims(count, AXIS)
