"""How kernels read a row of a schedule's tables."""

from __future__ import annotations

import triton
import triton.language as tl

from jagged_kernels.schedule.row_layout import ROW_FIELDS, ROW_WIDTH, SHORT_USER

_ROW_WIDTH = tl.constexpr(ROW_WIDTH)
_USER = tl.constexpr(ROW_FIELDS.index("user"))
_LENGTH = tl.constexpr(ROW_FIELDS.index("length"))
_SHORT_USER = tl.constexpr(SHORT_USER)


@triton.jit
def load_row(rows_ptr, row):
    """The first fields of a row, in the order of `rows.ROW_FIELDS`."""
    base = rows_ptr + row.to(tl.int64) * _ROW_WIDTH
    return (
        tl.load(base),
        tl.load(base + 1),
        tl.load(base + 2),
        tl.load(base + 3),
        tl.load(base + 4),
    )


@triton.jit
def load_user(rows_ptr, row):
    return tl.load(rows_ptr + row.to(tl.int64) * _ROW_WIDTH + _USER)


@triton.jit
def load_part(
    rows_ptr, row, part, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """`load_row` for TILE tokens of its tile, number `part`; start == end if there are none, or
    the user is short and SKIPS."""
    start, end, range_start, range_end, shift = load_row(rows_ptr, row)
    if SKIPS:
        length = tl.load(rows_ptr + row.to(tl.int64) * _ROW_WIDTH + _LENGTH)
        end = tl.where(length <= _SHORT_USER, start, end)
    if PARTS > 1:
        start += part * TILE
        end = tl.minimum(end, start + TILE)
        if HAS_LEFT:
            range_start = tl.minimum(tl.maximum(range_start, start + shift - left), range_end)
        if HAS_RIGHT:
            range_end = tl.maximum(tl.minimum(range_end, end + shift + right), range_start)
        end = tl.maximum(start, end)
    return start, end, range_start, range_end, shift
