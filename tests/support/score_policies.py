"""Policies of `scores=`, with what they are in PyTorch: SiLU, sigmoid, and one of one's own."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from jagged_kernels import PointwiseScores, Sigmoid, SiLU


@triton.jit
def squared(score):
    return tl.maximum(score, 0.0) * tl.maximum(score, 0.0)


@triton.jit
def d_squared(score, d_weight):
    return 2.0 * tl.maximum(score, 0.0) * d_weight


OWN = PointwiseScores("squared relu", lambda x: x.relu().square(), squared, d_squared)
POLICIES = {
    "silu": (SiLU(), torch.nn.functional.silu),
    "silu by a number": (SiLU(divide_by=50), torch.nn.functional.silu),
    "sigmoid": (Sigmoid(divide_by=1.5), torch.sigmoid),
    "own": (OWN, lambda x: x.relu().square()),
}


@triton.jit
def squared_of_block(score):
    positive = tl.maximum(score, tl.full(score.shape, 0.0, tl.float32))
    return positive * positive


@triton.jit
def d_squared_of_block(score, d_weight):
    return 2.0 * tl.maximum(score, tl.full(score.shape, 0.0, tl.float32)) * d_weight


def as_compiled(function: Any) -> Any:
    """What Triton compiles, also in a process where its interpreter runs kernels. There it cannot
    call what Triton itself has in Python, such as `tl.zeros_like`."""
    return function if isinstance(function, JITFunction) else JITFunction(function.fn)


def _own(name: str, *functions: Any) -> PointwiseScores:
    return PointwiseScores(name, lambda x: x.relu().square(), *map(as_compiled, functions))


# Of one's own, for Gluon to compile: all of it, all but `d_score`, and neither.
GLUON_COMPILES = _own("arithmetic", squared, d_squared)
GLUON_HAS_NO_D_SCORE = _own("a block in d_score", squared, d_squared_of_block)
GLUON_HAS_NEITHER = _own("blocks in both", squared_of_block, d_squared_of_block)
