"""Activations of the jagged MLP and their slopes, in float32 or as exact as a half type needs."""

from __future__ import annotations

import triton
import triton.language as tl

from jagged_kernels.device.arithmetic import LOG2_E

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_SQRT_HALF_OVER_PI = tl.constexpr(0.3989422804014327)
_LOG2_E = tl.constexpr(LOG2_E)


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


@triton.jit
def _inverse(x, dtype: tl.constexpr):
    """1 / x for x >= 1. A division looks for numbers out of range, in six instructions; for half
    types the two of a square root are exact enough."""
    if dtype == tl.float32:
        return 1.0 / x
    root = tl.rsqrt(x)
    return root * root
