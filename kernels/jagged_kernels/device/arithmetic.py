"""Sums of products, block by block, in float32 that is exact, TF32 or as half types have it; and
numbers as integers that order as they do.

"bf16x6" of float32 is in `device.float32`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.device.float32 import add_rest, dot_factors, factor, float32_parts

LOG2_E = 1.4426950408889634
LN2 = 0.6931471805599453


def dot_precision(dtype: torch.dtype) -> str:
    """float32 products are exact unless the user allowed TF32, as in torch.matmul."""
    # Says what was set by any of PyTorch's ways; `allow_tf32` raises where another was used.
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


def product_precision(x: Tensor) -> str:
    """How `device.float32` multiplies numbers like those of `x`.

    float32 that is not TF32 as "bf16x6": several times as fast as "ieee", which multiplies in
    registers.
    """
    precision = dot_precision(x.dtype)
    exact = x.dtype == torch.float32 and precision == "ieee"
    # The interpreter knows no other.
    return "bf16x6" if exact and x.is_cuda else precision


@triton.jit
def add_dot(acc, a, b, PRECISION: tl.constexpr):
    """acc + a @ b.

    float32 sums a block by itself first: thousands of additions, one after another, to a sum that
    is large already would cost digits. (`fma` by 1, because Triton turns a plain sum back into a
    product that accumulates.) For half types the hardware's accumulation is far better than
    their rounding.
    """
    return add_factors(acc, factor(a, PRECISION), factor(b, PRECISION), a.dtype, PRECISION)


@triton.jit
def add_factors(acc, a, b, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """`add_dot` of what `factor` has made of numbers of `dtype`."""
    if dtype == tl.float32:
        product = dot_factors(a, b, PRECISION)
        acc = tl.fma(product, tl.full(product.shape, 1.0, tl.float32), acc)
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def add_products(acc, rest, a, b, PRECISION: tl.constexpr):
    """(acc, rest) with a @ b in addition, for `sum_products`: fewer instructions than `add_dot`,
    because the products beside those of the first parts have a sum for all blocks. Both begin as
    zeros."""
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
def ordered(score):
    """int32 that orders as a score does; NaN is highest, -0 equals 0, and -2^31 is no score's."""
    number = score.to(tl.float32)
    number = tl.where(number == 0.0, 0.0, number)
    bits = number.to(tl.int32, bitcast=True)
    # Of negative numbers the larger magnitude is lower.
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(number != number, 0x7FFFFFFF, bits)
