"""A matrix for each user or group of users: the kernel of `jagged_linear` and `jagged_dense_bmm`.

A program takes one tile of one user's tokens (`device.tiles`) and a block of columns. It is short:
many at a time keep the memory busy, and no long user sets the time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.blocks import add_dot, product_precision
from jagged_kernels.core.launch import cdiv, launch
from jagged_kernels.device.tiles import (
    load_tile,
    search_steps,
    store_tile,
    tile_count,
    user_of_tile,
)
from jagged_kernels.schedule.policy.plain import LaunchConfig

# Of float32 that half types are made of, two bfloat16 and three products.
_HALF_PRODUCTS = "bf16x3"
# By bytes of a number.
LINEAR_CONFIGS = {2: LaunchConfig(64, 4, 3), 4: LaunchConfig(64, 4, 3, 128)}

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_HALF_OVER_PI = tl.constexpr(0.3989422804014327)
_LOG2_E = tl.constexpr(1.4426950408889634)


def block_size(size: int, most: int) -> int:
    """Blocks are powers of two; matrix products are at least 16 wide."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def sum_precision(x: Tensor) -> str:
    """`product_precision` of float32 sums over tokens like `x`, that its dtype is made from."""
    half = x.element_size() == 2 and x.is_cuda
    return _HALF_PRODUCTS if half else product_precision(x)


def unit_stride(x: Tensor) -> Tensor:
    """[T, D] with unit stride in D; other strides are read in place."""
    return x if x.stride(-1) == 1 else x.contiguous()


def weight_in_place(weight: Tensor) -> Tensor:
    """[G, D, K] with unit stride in D or K, and strides in these that do not grow with G."""
    stride, *inner = weight.stride()
    fits = 1 in inner and (stride == 0 or stride >= max(inner) or weight.shape[0] == 1)
    return weight if fits else weight.contiguous()


def launch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    groups: Tensor | None,
    *,
    activation: str,
    target: Tensor | None = None,
    scaled: Tensor | None = None,
) -> Tensor:
    """[T, K] = activation(x_t weight_g + bias_g) in x's dtype, g the group of token t's user.

    With `target` [B, D] and `scaled` [D, K], the matrix of user b is
    weight_b + target_b[:, None] * scaled instead.
    """
    x, weight = unit_stride(x), weight_in_place(weight)
    tokens, dim = x.shape
    columns, users = weight.shape[2], offsets.shape[0] - 1
    out = torch.empty((tokens, columns), dtype=x.dtype, device=x.device)
    if tokens == 0 or columns == 0:
        return out
    wide = 128 if x.element_size() == 2 else 64
    block_k = block_size(columns, wide)
    config = LINEAR_CONFIGS[x.element_size()]
    launch(
        _linear_kernel, tile_count(tokens, users, config.block) * cdiv(columns, block_k),
        (
            x, weight, None if bias is None else bias.contiguous(),
            None if groups is None else groups.contiguous(), offsets, out,
            None if target is None else target.contiguous(), scaled,
            users, search_steps(users),
        ),
        {
            "X_STRIDE": x.stride(0), "WEIGHT_STRIDES": weight.stride(),
            "SCALED_STRIDES": (0, 0) if scaled is None else scaled.stride(),
            "ACTIVATION": activation, "D": dim, "K": columns,
            "BLOCK_D": block_size(dim, wide // 2), "BLOCK_K": block_k, "TILE": config.block,
            "PRECISION": product_precision(x),
        },
        **config.options(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["users", "steps"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, groups_ptr, offsets_ptr, out_ptr, target_ptr, scaled_ptr,
    users, steps, X_STRIDE: tl.constexpr, WEIGHT_STRIDES: tl.constexpr,
    SCALED_STRIDES: tl.constexpr, ACTIVATION: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    K_BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile, column = tl.program_id(0) // K_BLOCKS, tl.program_id(0) % K_BLOCKS * BLOCK_K
    user = user_of_tile(offsets_ptr, users, steps, tile, TILE)
    user_start, end = tl.load(offsets_ptr + user), tl.load(offsets_ptr + user + 1)
    start = user_start + (tile - (user_start // TILE).to(tl.int32) - user) * TILE
    if start >= end:
        return
    group = (user if groups_ptr is None else tl.load(groups_ptr + user)).to(tl.int64)
    weight_ptr += group * WEIGHT_STRIDES[0]
    acc = tl.zeros([TILE, BLOCK_K], tl.float32)
    for row in range(0, D, BLOCK_D):
        x = load_tile(x_ptr, start, end, X_STRIDE, row, D, TILE, BLOCK_D)
        weight = load_weight(
            weight_ptr, WEIGHT_STRIDES[1], WEIGHT_STRIDES[2], row, column,
            D, K, BLOCK_D, BLOCK_K,
        )  # fmt: skip
        if target_ptr is not None:
            scaled = load_weight(
                scaled_ptr, SCALED_STRIDES[0], SCALED_STRIDES[1], row, column,
                D, K, BLOCK_D, BLOCK_K,
            )  # fmt: skip
            target = load_row(target_ptr, user.to(tl.int64), row, D, BLOCK_D)
            weight = fold(weight, scaled, target, x.dtype)
        acc = add_dot(acc, x, weight, PRECISION)
    if bias_ptr is not None:
        acc += load_row(bias_ptr, group, column, K, BLOCK_K)[None, :]
    acc = activate(acc, ACTIVATION, out_ptr.dtype.element_ty)
    store_tile(out_ptr, acc, start, end, column, K, TILE, BLOCK_K)


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


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """Of float32 x, exact to the rounding of `dtype`."""
    if ACTIVATION == "relu":
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    if ACTIVATION == "silu":
        return x * _logistic(x, dtype)
    if ACTIVATION == "gelu":
        return x * _below(x, dtype)
    return x


@triton.jit
def activation_slope(x, ACTIVATION: tl.constexpr, dtype: tl.constexpr):
    """The derivative of `activate`."""
    if ACTIVATION == "relu":
        return tl.where(x > 0.0, 1.0, 0.0)
    if ACTIVATION == "silu":
        share = _logistic(x, dtype)
        return share * (1.0 + x * (1.0 - share))
    if dtype == tl.float32:
        return _below(x, dtype) + x * (_SQRT_HALF_OVER_PI * _bell(x))
    # Odd but for 1/2: of |x|, the bell is a factor of both terms.
    size = tl.abs(x)
    tail = (_tail_over_bell(size, dtype) - _SQRT_HALF_OVER_PI * size) * _bell(x)
    return tl.where(x > 0.0, 1.0 - tail, tail)


@triton.jit
def _logistic(x, dtype: tl.constexpr):
    return _inverse(1.0 + tl.exp2(x * -_LOG2_E), dtype)


@triton.jit
def _inverse(x, dtype: tl.constexpr):
    """1 / x for x >= 1. A division looks for numbers out of range, in six instructions; for half
    types the two of a square root are exact enough."""
    if dtype == tl.float32:
        return 1.0 / x
    root = tl.rsqrt(x)
    return root * root


@triton.jit
def _bell(x):
    """exp(-x^2 / 2)"""
    return tl.exp2(x * (-0.5 * _LOG2_E) * x)


@triton.jit
def _below(x, dtype: tl.constexpr):
    """The share of the normal distribution below x."""
    if dtype == tl.float32:
        return 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))
    tail = _tail_over_bell(tl.abs(x), dtype) * _bell(x)
    return tl.where(x > 0.0, 1.0 - tail, tail)


@triton.jit
def _tail_over_bell(x, dtype: tl.constexpr):
    """(The share above x >= 0) / _bell(x), all digits of half types: fitted, within 8.4e-5 of
    itself up to 6. The exact erf takes longer than the products."""
    t = _inverse(1.0 + x * 0.47263974, dtype)
    return (((-0.12312981 * t + 0.28066596) * t + 0.14988785) * t + 0.19253442) * t
