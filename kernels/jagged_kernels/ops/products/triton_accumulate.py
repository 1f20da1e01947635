"""What programs that sum x^T y over tokens share, whichever tokens they take.

`add_tiles` goes over a user's tokens, `store_sums` stores what is finished or a part of it, and
`merge_partials` adds up the parts.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged_kernels.device.arithmetic import add_factors
from jagged_kernels.device.float32 import dot_factors, factor, transposed
from jagged_kernels.device.memory import load_block, store_block
from jagged_kernels.ops.products.activations import activation_slope

MERGE_BLOCK = tl.constexpr(1024)
# Partial sums that are added at a time: the wait for memory is what adding takes.
_MERGE_ROWS = tl.constexpr(16)


@triton.jit
def add_tiles(
    acc, total, start, end, x_ptr, y_ptr, dx_ptr, X_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr, weight, bias, row, column,
    ACTIVATION: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + x^T y and total + the sum of y over tokens from start to end; stores their dx.

    Every row of total [16, K] has the sum.
    """
    if weight is not None:
        weight_factor = factor(weight, PRECISION)
    for token in range(start, end, TILE):
        # The weight, the sums and both factors leave no registers for addresses.
        x = load_block(x_ptr, token, end, X_STRIDE, TILE, D, BLOCK_D, row, KEPT=False)
        y = load_block(y_ptr, token, end, Y_STRIDE, TILE, K, BLOCK_K, column, KEPT=False)
        x_factor = factor(x, PRECISION)
        if ACTIVATION != "none":
            before = dot_factors(x_factor, weight_factor, PRECISION)
            if bias is not None:
                before += bias[None, :]
            slope = y.to(tl.float32) * activation_slope(before, ACTIVATION, x.dtype)
            y = slope.to(x.dtype)
        total = _add_rows(total, y, TILE)
        y_factor = factor(y, PRECISION)
        acc = add_factors(acc, transposed(x_factor, PRECISION), y_factor, x.dtype, PRECISION)
        if dx_ptr is not None:
            d_x = dot_factors(y_factor, transposed(weight_factor, PRECISION), PRECISION)
            store_block(dx_ptr, d_x, token, end, D, TILE, D, BLOCK_D, row, KEPT=False)
    return acc, total


@triton.jit
def _add_rows(total, y, TILE: tl.constexpr):
    """total [16, K] + in each row the sum of y [TILE, K]: for half types as a product, whose sums
    take a tenth of the instructions that moving numbers between threads would."""
    if y.dtype == tl.float32:
        return total + tl.sum(y, 0)[None, :]
    return tl.dot(tl.full([16, TILE], 1.0, y.dtype), y, total)


@triton.jit
def store_sums(
    out_ptr, sum_ptr, sum_start, acc, total, row, column, D: tl.constexpr, K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One block of a [D, K], and by the programs of its first rows, of the sums [K]."""
    rows, columns = row + tl.arange(0, BLOCK_D), column + tl.arange(0, BLOCK_K)
    inside = (rows[:, None] < D) & (columns[None, :] < K)
    address = out_ptr + rows[:, None] * K + columns[None, :]
    tl.store(address, acc.to(out_ptr.dtype.element_ty), mask=inside)
    if sum_ptr is not None:
        address = sum_ptr + sum_start + columns
        tl.store(address, total.to(sum_ptr.dtype.element_ty), mask=(columns < K) & (row == 0))


@triton.jit
def merge_partials(
    partial_ptr, first, other, EACH: tl.constexpr, others, out_ptr, sum_ptr, segment,
    MATRIX: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Stores a segment's matrix [MATRIX] and its sums [K]: of partials [SIZE] the one numbered
    `first`, and as many `others` from number `other` on, EACH apart. A program takes MERGE_BLOCK
    of their numbers."""
    element = tl.program_id(1) * MERGE_BLOCK + tl.arange(0, MERGE_BLOCK)
    inside = element < SIZE
    total = tl.load(partial_ptr + first.to(tl.int64) * SIZE + element, mask=inside, other=0.0)
    for done in range(0, others, _MERGE_ROWS):
        index = done + tl.arange(0, _MERGE_ROWS)[:, None]
        part = tl.load(
            partial_ptr + (other + index * EACH).to(tl.int64) * SIZE + element[None, :],
            mask=(index < others) & inside[None, :], other=0.0,
        )  # fmt: skip
        total += tl.sum(part, 0)
    out = out_ptr + segment.to(tl.int64) * MATRIX + element
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=element < MATRIX)
    if sum_ptr is not None:
        out = sum_ptr + segment.to(tl.int64) * K + element - MATRIX
        tl.store(out, total.to(sum_ptr.dtype.element_ty), mask=inside & (element >= MATRIX))
