"""Blocks of tokens as tuples of some columns each, in whose pieces sums along columns are made.

Tensor cores cut a sum off after every few products, always towards zero, where others round it: the
longer the sum, the further it is off, and in the log-sum-exp of a few tokens nothing hides that. So
float32's scores are sums of `_COLUMNS` products, which are rounded. The backward adds them up as
the forward does: what both are off by alike is in no probability.

In half precision, whose rounding is far coarser, a tuple has one piece: all columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged_kernels.device.arithmetic import add_factors
from jagged_kernels.device.float32 import dot_factors, factor, transposed
from jagged_kernels.device.memory import load_block, store_block

_COLUMNS = 64


@triton.constexpr_function
def width_of(PAD_D, PRECISION):
    """Columns of a piece."""
    return min(PAD_D, _COLUMNS) if PRECISION == "bf16x6" else PAD_D


@triton.jit
def load_columns(
    ptr, start, end, stride, BLOCK: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr,
    PRECISION: tl.constexpr, NEGATE: tl.constexpr = False,
):  # fmt: skip
    """What `load_block` loads, or its negative, in pieces. One that would begin behind column D is
    left out."""
    WIDTH: tl.constexpr = width_of(PAD_D, PRECISION)
    pieces = ()
    for column in tl.static_range(0, D, WIDTH):
        piece = load_block(ptr, start, end, stride, BLOCK, D, WIDTH, column)
        pieces += (-piece if NEGATE else piece,)
    return pieces


@triton.jit
def zero_columns(ROWS: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr, PRECISION: tl.constexpr):
    """Sums in float32, in the pieces of `load_columns`."""
    WIDTH: tl.constexpr = width_of(PAD_D, PRECISION)
    pieces = ()
    for _ in tl.static_range(0, D, WIDTH):
        pieces += (tl.zeros([ROWS, WIDTH], tl.float32),)
    return pieces


@triton.jit
def store_columns(
    ptr, pieces, start, end, stride, BLOCK: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Where `load_columns` would read, in the dtype of `ptr`."""
    WIDTH: tl.constexpr = width_of(PAD_D, PRECISION)
    for i in tl.static_range(len(pieces)):
        store_block(ptr, pieces[i], start, end, stride, BLOCK, D, WIDTH, i * WIDTH)


@triton.jit
def times(pieces, number):
    """Pieces times a number."""
    products = ()
    for i in tl.static_range(len(pieces)):
        products += (pieces[i] * number,)
    return products


@triton.jit
def factors(pieces, PRECISION: tl.constexpr):
    """`factor` of each."""
    found = ()
    for i in tl.static_range(len(pieces)):
        found += (factor(pieces[i], PRECISION),)
    return found


@triton.jit
def scores_of(a, b, PRECISION: tl.constexpr, MIRRORED: tl.constexpr = False):
    """a @ b.T of `factors`, in float32; MIRRORED: to the bit the transposed b @ a.T."""
    scores = dot_factors(a[0], transposed(b[0], PRECISION), PRECISION, MIRRORED)
    for i in tl.static_range(1, len(a)):
        scores += dot_factors(a[i], transposed(b[i], PRECISION), PRECISION, MIRRORED)
    return scores


@triton.jit
def row_products(a, b, PRECISION: tl.constexpr):
    """[rows]: the sum of each row of a times that row of b, in float32.

    float32's are the diagonal of `scores_of`(b, a): what they cancel against, scores of b and rows
    that are those of a, they cancel against to the bit.
    """
    if a[0].dtype == tl.float32:
        products = scores_of(factors(b, PRECISION), factors(a, PRECISION), PRECISION)
        row = tl.arange(0, products.shape[0])
        return tl.sum(tl.where(row[:, None] == row[None, :], products, 0.0), 1)
    return tl.sum(a[0].to(tl.float32) * b[0].to(tl.float32), 1)


@triton.jit
def each_product(a, b, PRECISION: tl.constexpr):
    """a @ each of `factors`, as pieces of columns; a as `factor` makes it."""
    found = ()
    for i in tl.static_range(len(b)):
        found += (dot_factors(a, b[i], PRECISION),)
    return found


@triton.jit
def add_to_each(acc, a, b, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """`add_factors` of `each_product`."""
    sums = ()
    for i in tl.static_range(len(b)):
        sums += (add_factors(acc[i], a, b[i], dtype, PRECISION),)
    return sums
