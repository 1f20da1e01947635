"""What the kernels of products share: blocks of a matrix, and a target folded into it."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.device.arithmetic import product_precision

# Of float32 that half types are made of, two bfloat16 and three products.
_HALF_PRODUCTS = "bf16x3"


def sum_precision(x: Tensor) -> str:
    """`product_precision` of float32 sums over tokens like `x`, that its dtype is made from."""
    half = x.element_size() == 2 and x.is_cuda
    return _HALF_PRODUCTS if half else product_precision(x)


def weight_in_place(weight: Tensor) -> Tensor:
    """[G, D, K], each matrix or its transpose as `rows_of_dims`; one for all G is read in place."""
    return rows_of_dims(weight.mT).mT if weight.stride(1) == 1 else rows_of_dims(weight)


@triton.jit
def load_weight(
    ptr, stride_d, stride_k, row, column, D: tl.constexpr, K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_D, BLOCK_K] of one matrix [D, K]; 0 outside."""
    rows = row + tl.arange(0, BLOCK_D)[:, None]
    columns = column + tl.arange(0, BLOCK_K)[None, :]
    return tl.load(
        ptr + rows * stride_d + columns * stride_k, mask=(rows < D) & (columns < K), other=0.0
    )


@triton.jit
def load_row(ptr, row, column, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """[BLOCK] float32 from `column` of one row of a contiguous [..., COLUMNS]; row is int64."""
    columns = column + tl.arange(0, BLOCK)
    return tl.load(ptr + row * COLUMNS + columns, mask=columns < COLUMNS, other=0.0).to(tl.float32)


@triton.jit
def fold(weight, scaled, target, dtype: tl.constexpr):
    """weight + target[:, None] * scaled, rounded once."""
    return (weight.to(tl.float32) + target[:, None] * scaled.to(tl.float32)).to(dtype)
