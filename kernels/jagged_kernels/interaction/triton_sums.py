"""Sums of products, block by block, that cost float32 fewer instructions than `add_dot`.

See `triton_float32`: the products beside those of the first parts have a sum for all blocks.
"""

# Triton's jit is not typed.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from jagged_kernels.attention.triton_blocks import add_dot
from jagged_kernels.attention.triton_float32 import add_rest, float32_parts
from jagged_kernels.interaction.triton_linear import activation_slope
from jagged_kernels.interaction.triton_tiles import load_tile, store_tile


@triton.jit
def add_products(acc, rest, a, b, PRECISION: tl.constexpr):
    """(acc, rest) with a @ b in addition, for `sum_products`. Both begin as zeros."""
    if PRECISION == "bf16x6":
        a_parts, b_parts = float32_parts(a), float32_parts(b)
        rest = add_rest(rest, a_parts, b_parts)
        product = tl.dot(a_parts[0], b_parts[0])
        # A block by itself first, as in `add_dot`.
        return tl.fma(product, tl.full(product.shape, 1.0, tl.float32), acc), rest
    return add_dot(acc, a, b, PRECISION), rest


@triton.jit
def sum_products(acc, rest, PRECISION: tl.constexpr):
    """The sum of what `add_products` has added."""
    if PRECISION == "bf16x6":
        return tl.where(rest == rest, acc + rest, acc)
    return acc


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
    for token in range(start, end, TILE):
        x = load_tile(x_ptr, token, end, X_STRIDE, row, D, TILE, BLOCK_D)
        y = load_tile(y_ptr, token, end, Y_STRIDE, column, K, TILE, BLOCK_K)
        if ACTIVATION != "none":
            before = tl.dot(x, weight, input_precision=PRECISION)
            if bias is not None:
                before += bias[None, :]
            slope = y.to(tl.float32) * activation_slope(before, ACTIVATION, x.dtype)
            y = slope.to(x.dtype)
        total = _add_rows(total, y, TILE)
        acc = add_dot(acc, tl.trans(x), y, PRECISION)
        if dx_ptr is not None:
            d_x = tl.dot(y, tl.trans(weight), input_precision=PRECISION)
            store_tile(dx_ptr, d_x, token, end, row, D, TILE, BLOCK_D)
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


MERGE_BLOCK = tl.constexpr(1024)
# Partial sums that are added at a time: the wait for memory is what adding takes.
_MERGE_ROWS = tl.constexpr(16)


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
