"""Softmax along the rows or the columns of each user's square matrix, forward and backward.

A line is read twice, the second time from cache: it is short beside it. Of rows up to a width, a
program has them whole at a time, and writes them by sectors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.device.arithmetic import LOG2_E
from jagged_kernels.device.search import search_steps, tile_count
from jagged_kernels.device.squares import (
    ELEMENTS,
    ROWS,
    fits_best,
    load_rows,
    size_again,
    token_bound,
    turned_rows,
)
from jagged_kernels.ops.normalise.triton_column_softmax import launch_column_softmax
from jagged_kernels.ops.normalise.triton_softmax import LOWEST, merge_softmax

_LOG2_E = tl.constexpr(LOG2_E)
# For whole rows: of one warp, and 21 programs a multiprocessor in place of 13.
WHOLE_OPTIONS = {"num_warps": 1, "maxnreg": 96}


def launch_softmax2(
    x: Tensor, offsets: Tensor, matrix_offsets: Tensor, *, by_row: bool, d_y: Tensor | None = None
) -> Tensor:
    """Softmax of values [sum of n ** 2]; with `d_y`, x is y and the result the gradient of x."""
    x, d_y = x.contiguous(), None if d_y is None else d_y.contiguous()
    out = torch.empty_like(x)
    if out.numel() == 0:
        return out
    arguments = (x, d_y, out, offsets, matrix_offsets)
    if by_row:
        users = offsets.shape[0] - 1
        launch(
            _rows_kernel, tile_count(token_bound(x, offsets), users, ROWS),
            (*arguments, users, search_steps(users)),
            {"BACKWARD": d_y is not None, "ROWS": ROWS, "ELEMENTS": ELEMENTS}, **WHOLE_OPTIONS,
        )  # fmt: skip
    else:
        launch_column_softmax(*arguments)
    return out


@triton.jit(do_not_specialize=["users", "steps"])
def _rows_kernel(
    x_ptr, d_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
    BACKWARD: tl.constexpr, ROWS: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    user, _, size, matrix, row = load_rows(
        offsets_ptr, matrix_offsets_ptr, users, steps, tl.program_id(0), ROWS
    )
    end = tl.minimum(row + ROWS, size)
    for halvings in tl.static_range(4):
        if fits_best(size, ELEMENTS, halvings, 3):
            _whole_rows(
                x_ptr, d_ptr, out_ptr, offsets_ptr + user, matrix, row, end, size,
                BACKWARD, ELEMENTS >> halvings, ELEMENTS,
            )  # fmt: skip
    if size > ELEMENTS:
        for line in range(row, end):
            # int64: a large user's n ** 2 passes 2^31.
            _walk_row(
                x_ptr, d_ptr, out_ptr, matrix + line * size.to(tl.int64), size, BACKWARD, ELEMENTS
            )


@triton.jit
def _whole_rows(
    x_ptr, d_ptr, out_ptr, offsets_ptr, matrix, row, end, size,
    BACKWARD: tl.constexpr, WIDTH: tl.constexpr, ELEMENTS: tl.constexpr,
):  # fmt: skip
    """A user's rows from `row` to `end`, which are no longer than WIDTH."""
    SECTOR: tl.constexpr = 256 // out_ptr.dtype.element_ty.primitive_bitwidth
    other = 0.0 if BACKWARD else float("-inf")
    for first in range(row, end, ELEMENTS // WIDTH):
        # Sums in the order of columns: they must not depend on where in memory a user lies.
        rows = first + tl.arange(0, ELEMENTS // WIDTH)
        start = matrix + rows.to(tl.int64) * size
        column = tl.arange(0, WIDTH)[None, :]
        inside = (rows < end)[:, None] & (column < size)
        x = tl.load((x_ptr + start)[:, None] + column, mask=inside, other=other).to(tl.float32)
        if BACKWARD:
            d_y = tl.load((d_ptr + start)[:, None] + column, mask=inside, other=0.0)
        size = size_again(offsets_ptr)
        written_size = size_again(offsets_ptr)
        if BACKWARD:
            total = tl.sum(x * d_y.to(tl.float32), 1, keep_dims=True)
        else:
            top = tl.max(x, 1, keep_dims=True)
            share = 1.0 / tl.sum(tl.exp2((x - top) * _LOG2_E), 1, keep_dims=True)
        # From cache.
        start, place, inside = turned_rows(matrix, size, rows, WIDTH, SECTOR)
        inside = inside & (rows < end)[:, None]
        x = tl.load((x_ptr + start)[:, None] + place, mask=inside, other=0.0).to(tl.float32)
        if BACKWARD:
            d_y = tl.load((d_ptr + start)[:, None] + place, mask=inside, other=0.0)
            result = x * (d_y.to(tl.float32) - total)
        else:
            result = tl.exp2((x - top) * _LOG2_E) * share
        result = result.to(out_ptr.dtype.element_ty)
        start, place, inside = turned_rows(matrix, written_size, rows, WIDTH, SECTOR)
        inside = inside & (rows < end)[:, None]
        tl.store((out_ptr + start)[:, None] + place, result, mask=inside)


@triton.jit
def _online_softmax(top, total, x):
    """The largest and the sum of exponentials, after one more number in each place."""
    factor = tl.exp2(-tl.abs(x - top) * _LOG2_E)
    total = tl.where(x > top, total * factor + 1.0, total + factor)
    return tl.maximum(top, x), total


@triton.jit
def _walk_row(
    x_ptr, d_ptr, out_ptr, start, size, BACKWARD: tl.constexpr, ELEMENTS: tl.constexpr
):  # fmt: skip
    """A row of `size` numbers from `start` on, ELEMENTS at a time."""
    x_ptr += start
    out_ptr += start
    if BACKWARD:
        d_ptr += start
    top = tl.full([ELEMENTS], LOWEST, tl.float32)
    total = tl.zeros([ELEMENTS], tl.float32)
    for done in range(0, size, ELEMENTS):
        column = done + tl.arange(0, ELEMENTS)
        if BACKWARD:
            y = tl.load(x_ptr + column, mask=column < size, other=0.0).to(tl.float32)
            total += y * tl.load(d_ptr + column, mask=column < size, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_ptr + column, mask=column < size, other=float("-inf")).to(tl.float32)
            top, total = _online_softmax(top, total, x)
    if BACKWARD:
        total = tl.sum(total, 0, keep_dims=True)
    else:
        top, total = merge_softmax(top, total, 0)
        total = 1.0 / total

    for done in range(0, size, ELEMENTS):
        column = done + tl.arange(0, ELEMENTS)
        x = tl.load(x_ptr + column, mask=column < size, other=0.0).to(tl.float32)
        if BACKWARD:
            d_y = tl.load(d_ptr + column, mask=column < size, other=0.0).to(tl.float32)
            result = x * (d_y - total)
        else:
            result = tl.exp2((x - top) * _LOG2_E) * total
        tl.store(out_ptr + column, result.to(out_ptr.dtype.element_ty), mask=column < size)
