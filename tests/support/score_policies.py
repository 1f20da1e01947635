"""Policies of `scores=`, with what they are in PyTorch: SiLU, sigmoid, and one of one's own."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

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
