"""The policies of `policy` in Triton: weights of scores, and gradients of scores from weights'."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# Triton's interpreter has no assembly. It is chosen before anything is imported.
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def _sigmoid(score):
    """`tl.sigmoid` in fewer instructions: of a number from 1 to inf the reciprocal needs none of
    the care that Triton's division takes, and is as exact."""
    divisor = 1.0 + tl.exp(-score)
    if _INTERPRETED:
        chance = 1.0 / divisor
    else:
        chance = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1
        )
    return chance


@triton.jit
def silu_weight(score):
    return score * _sigmoid(score)


@triton.jit
def silu_d_score(score, d_weight):
    chance = _sigmoid(score)
    return d_weight * chance * (1.0 + score * (1.0 - chance))


@triton.jit
def sigmoid_weight(score):
    return _sigmoid(score)


@triton.jit
def sigmoid_d_score(score, d_weight):
    chance = _sigmoid(score)
    return d_weight * chance * (1.0 - chance)
