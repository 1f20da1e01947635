"""The notes that Hopper's loading warp leaves of listed blocks; see `hopper.listed`.

In Triton, without layouts: Gluon takes these functions as they are, and so does the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged_kernels.attention.triton_meeting import block_of_entry


@triton.jit
def parts_of_list(begin, end, LISTED: tl.constexpr, PART: tl.constexpr):
    """How many parts of PART tokens the entries [begin, end) have."""
    return (end - begin) * (LISTED // PART)


@triton.jit
def note_of_part(
    col_ptr, begin, end, number, range_start, range_end, LISTED: tl.constexpr, PART: tl.constexpr
):  # fmt: skip
    """The note of part `number` of the entries [begin, end); in front of the first one and behind
    the last that of what is no block."""
    SPLITS: tl.constexpr = LISTED // PART
    there = (number >= 0) & (number < (end - begin) * SPLITS)
    entry = tl.load(col_ptr + begin + number // SPLITS, mask=there, other=-1)
    start, cut = block_of_entry(entry, number, range_start, range_end, LISTED, PART)
    start = tl.minimum(start, range_end)
    # Whatever the list says: behind the range stand the next user's tokens.
    return tl.where(cut | (start + PART > range_end), -1 - start, start)


@triton.jit
def token_of_note(note):
    """Where the part begins: the end of the range of what is no block."""
    return tl.where(note < 0, -1 - note, note)


@triton.jit
def token_to_load(start, range_end, PART: tl.constexpr):
    """`start` for TMA. In front of the first token it reads zeros: for what is no block."""
    return tl.where(start < range_end, start, -PART)


@triton.jit
def is_tail(start, range_end, PART: tl.constexpr):
    """Whether tokens of the next user come with the part."""
    return (start < range_end) & (start + PART > range_end)
