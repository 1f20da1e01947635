"""The policies of `policy` in Triton: weights of scores, and gradients of scores from weights'."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_weight(score):
    return score * tl.sigmoid(score)


@triton.jit
def silu_d_score(score, d_weight):
    chance = tl.sigmoid(score)
    return d_weight * chance * (1.0 + score * (1.0 - chance))


@triton.jit
def sigmoid_weight(score):
    return tl.sigmoid(score)


@triton.jit
def sigmoid_d_score(score, d_weight):
    chance = tl.sigmoid(score)
    return d_weight * chance * (1.0 - chance)
