"""What a score becomes inside the Gluon kernels: weights of scores, and gradients of scores.

SiLU and sigmoid are here once more, for numbers that are rounded to half precision next. A
multiprocessor has 16 exponentials or reciprocals a clock, and at head_dim 64 its products take as
long as one of them a score: so there is one, and the reciprocal is a polynomial. A policy of a
user's own is the very function that he gave for Triton: Gluon calls it on its blocks.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jagged_kernels.attention.meeting import Meeting
from jagged_kernels.attention.scores import triton_policies
from jagged_kernels.device.arithmetic import LN2, LOG2_E

_LOG2_E = gl.constexpr(LOG2_E)
_LN2 = gl.constexpr(LN2)


def in_gluon(function: Any) -> Any:
    """For a Triton function of a policy (or None) what the Gluon kernels call."""
    return _KNOWN.get(function, function)


def backward_constants(meeting: Meeting) -> dict[str, Any]:
    """What a backward is compiled for beside shape and layout."""
    shape = meeting.constants
    return {"WEIGHT": in_gluon(shape.weight), "D_SCORE": in_gluon(shape.d_score)}


@gluon.jit
def natural_scores(scores, scale_log2):
    """Scores as policies take them, of products and the scale in base 2."""
    return scores * (scale_log2 * _LN2)


@gluon.jit
def _halves(score):
    """(e, p): e = exp(-|score|), p = 1 / (1 + e) = sigmoid(|score|), which are off by less than
    6e-5 of themselves.

    The polynomial has the least relative error (by linear programming) of those of degree 5 that
    are 1 at 0: of a large score, 1 - p is 0 as it should be.
    """
    e = gl.exp2(gl.abs(score) * -_LOG2_E)
    p = -0.7835377785127352 + e * (0.4307724120049222 + e * -0.10911047612965726)
    p = 1.0 + e * (-0.9973083958990806 + e * (0.9591547120808481 + e * p))
    return e, p


@gluon.jit
def _sigmoid(score):
    e, p = _halves(score)
    return gl.where(score < 0.0, e * p, p)


@gluon.jit
def silu_weight(score):
    e, p = _halves(score)
    # Of the two, the right one is the larger, whatever the sign.
    return gl.maximum(score, score * e) * p


@gluon.jit
def silu_d_score(score, d_weight):
    chance = _sigmoid(score)
    weight = score * chance
    return d_weight * (chance + (weight - weight * chance))


@gluon.jit
def sigmoid_weight(score):
    return _sigmoid(score)


@gluon.jit
def sigmoid_d_score(score, d_weight):
    e, p = _halves(score)
    return d_weight * (e * p * p)


_KNOWN = {
    triton_policies.silu_weight: silu_weight,
    triton_policies.silu_d_score: silu_d_score,
    triton_policies.sigmoid_weight: sigmoid_weight,
    triton_policies.sigmoid_d_score: sigmoid_d_score,
}
