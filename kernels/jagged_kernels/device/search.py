"""Whose token is it: how kernels whose programs take equal chunks of tokens find users.

A chunk may hold many short users or a part of a long one, so no user sets the time of a launch, and
the grid is known from the number of tokens alone.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
