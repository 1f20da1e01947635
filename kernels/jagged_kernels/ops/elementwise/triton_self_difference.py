"""Differences between all pairs of a user's numbers, and the sums that are their gradient.

The gradient reads each score once: a program leaves the sums of its piece's rows and of its
columns, a few in a hundred of what it read, and a second launch merges those of a token in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.device.search import (
    first_strip,
    search_steps,
    strip_count,
    tile_count,
    user_of_strip,
)
from jagged_kernels.device.squares import (
    ELEMENTS,
    HEIGHT,
    ROW_OPTIONS,
    ROWS,
    WIDTH,
    aligned_rows,
    fits_best,
    is_below,
    load_rows,
    load_square,
)

# The gradient: columns of a piece, and tokens that a program merges.
COLUMNS, MERGE_TOKENS = 1024, 256


def launch_difference(x: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int) -> Tensor:
    """x [T] -> x_i - x_j [total = sum of n ** 2], in the dtype of x."""
    x, out, users = x.contiguous(), x.new_empty(total), offsets.shape[0] - 1
    if total == 0:
        return out
    launch(
        _difference_kernel, tile_count(x.shape[0], users, ROWS),
        (x, out, offsets, matrix_offsets, users, search_steps(users)),
        {"ROWS": ROWS, "HEIGHT": HEIGHT, "WIDTH": WIDTH}, **ROW_OPTIONS,
    )  # fmt: skip
    return out


def launch_difference_backward(
    d_out: Tensor, offsets: Tensor, matrix_offsets: Tensor, tokens: int
) -> Tensor:
    """d_out [sum of n ** 2] -> [T]: the sum of each token's row less that of its column."""
    users, total = offsets.shape[0] - 1, d_out.shape[0]
    d_x = d_out.new_empty(tokens)
    if tokens == 0:
        return d_x
    row_sums, column_sums = (
        torch.empty(total // size + tokens + users, dtype=torch.float32, device=d_out.device)
        for size in (COLUMNS, ROWS)
    )
    layout = (offsets, matrix_offsets, users, search_steps(users))
    launch(
        _sums_kernel, strip_count(tokens, users, total, ROWS, COLUMNS),
        (d_out.contiguous(), row_sums, column_sums, *layout),
        {"ROWS": ROWS, "COLUMNS": COLUMNS, "ELEMENTS": ELEMENTS}, **ROW_OPTIONS,
    )  # fmt: skip
    launch(
        _merge_kernel, tile_count(tokens, users, MERGE_TOKENS),
        (d_x, row_sums, column_sums, *layout),
        {"ROWS": ROWS, "COLUMNS": COLUMNS, "TOKENS": MERGE_TOKENS},
    )  # fmt: skip
    return d_x


@triton.jit(do_not_specialize=["users", "steps"])
def _difference_kernel(
    x_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
    ROWS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    _, start, size, matrix, row = load_rows(
        offsets_ptr, matrix_offsets_ptr, users, steps, tl.program_id(0), ROWS
    )
    x_ptr += start
    for first in range(row, tl.minimum(row + ROWS, size), HEIGHT):
        rows = first + tl.arange(0, HEIGHT)
        mine = tl.load(x_ptr + rows, mask=rows < size, other=0)[:, None]
        address, column, length = aligned_rows(out_ptr, matrix, size, rows, WIDTH)
        others_ptr = x_ptr + column
        columns = tl.where(rows < size, size, 0)[:, None]
        for block in range(0, length, WIDTH):
            inside = is_below(block + column, columns)
            others = tl.load(others_ptr + block, mask=inside, other=0)
            tl.store(address + block, mine - others, mask=inside)


@triton.jit
def _sums_of(matrix, start, user, SIZE: tl.constexpr):
    """Where the sums of a user's rows or columns in blocks of SIZE begin: n of each block, and
    ceil(n / SIZE) * n is at most n ** 2 / SIZE + n."""
    return matrix // SIZE + start + user


@triton.jit(do_not_specialize=["users", "steps"])
def _sums_kernel(
    d_ptr, row_sums_ptr, column_sums_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    piece = tl.program_id(0)
    user = user_of_strip(offsets_ptr, matrix_offsets_ptr, users, steps, piece, ROWS, COLUMNS)
    piece -= first_strip(offsets_ptr, matrix_offsets_ptr, user, True, ROWS, COLUMNS)
    start, size, matrix = load_square(offsets_ptr, matrix_offsets_ptr, user)
    across = tl.maximum(tl.cdiv(size, COLUMNS), 1)
    row, block = piece // across, piece % across
    if row * ROWS < size:
        row_sums_ptr += _sums_of(matrix, start, user, COLUMNS) + block.to(tl.int64) * size
        column_sums_ptr += _sums_of(matrix, start, user, ROWS) + row.to(tl.int64) * size
        end = tl.minimum(row * ROWS + ROWS, size)
        width = tl.minimum(size - block * COLUMNS, COLUMNS)
        d_ptr += matrix + block * COLUMNS
        column_sums_ptr += block * COLUMNS
        for halvings in tl.static_range(3):
            if fits_best(width, COLUMNS, halvings, 2):
                _sum_piece(
                    d_ptr, row_sums_ptr, column_sums_ptr, row * ROWS, end, size, width,
                    COLUMNS >> halvings, ELEMENTS,
                )  # fmt: skip


@triton.jit
def _sum_piece(
    d_ptr, row_sums_ptr, column_sums_ptr, row, end, size, width,
    WIDTH: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, WIDTH)
    column_sums = tl.zeros([WIDTH], tl.float32)
    for first in range(row, end, ELEMENTS // WIDTH):
        rows = first + tl.arange(0, ELEMENTS // WIDTH)
        address = (d_ptr + rows.to(tl.int64) * size)[:, None] + column[None, :]
        inside = (rows < end)[:, None] & (column < width)[None, :]
        d = tl.load(address, mask=inside, other=0.0).to(tl.float32)
        column_sums += tl.sum(d, 0)
        tl.store(row_sums_ptr + rows, tl.sum(d, 1), mask=rows < end)
    tl.store(column_sums_ptr + column, column_sums, mask=column < width)


@triton.jit(do_not_specialize=["users", "steps"])
def _merge_kernel(
    d_x_ptr, row_sums_ptr, column_sums_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    user, start, size, matrix, row = load_rows(
        offsets_ptr, matrix_offsets_ptr, users, steps, tl.program_id(0), TOKENS
    )
    token = row + tl.arange(0, TOKENS)
    inside = token < size
    total = tl.zeros([TOKENS], tl.float32)
    sums_ptr = row_sums_ptr + _sums_of(matrix, start, user, COLUMNS) + token
    for block in range(0, tl.cdiv(size, COLUMNS)):
        total += tl.load(sums_ptr + block * size.to(tl.int64), mask=inside, other=0.0)
    sums_ptr = column_sums_ptr + _sums_of(matrix, start, user, ROWS) + token
    for strip in range(0, tl.cdiv(size, ROWS)):
        total -= tl.load(sums_ptr + strip * size.to(tl.int64), mask=inside, other=0.0)
    tl.store(d_x_ptr + start + token, total.to(d_x_ptr.dtype.element_ty), mask=inside)
