"""Sums of products, block by block, that cost float32 fewer instructions than `add_dot`.

See `device.float32`: the products beside those of the first parts have a sum for all blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged_kernels.attention.blocks import add_dot
from jagged_kernels.device.float32 import add_rest, float32_parts


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
