"""Sums of float32, whose products tensor cores add up, and cut off."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("length", [1, 300])  # kernels of short users, and of tiles
def test_errors_of_scores_do_not_grow_with_head_dim(length: int, dim: int) -> None:
    """Each query sees its own key alone, so that its lse is a score. Cut off along all of head_dim,
    the root of the mean square is 2.4 roundings of the scores' at 128, and 4.3 at 256."""
    users = 3000 // length
    inputs = Case([length] * users, dim=dim).inputs(torch.float32).with_shared_offsets()
    found = run("triton", inputs, tile=None, window=(0, 0))["lse"].double()
    exact = (inputs.q.double() * inputs.k.double()).sum(-1) / math.sqrt(dim)
    error = (found - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 2 * torch.finfo(torch.float32).eps / 2


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("length", [1, 300])
def test_a_single_key_has_the_gradient_of_its_lse_alone(length: int, dim: int) -> None:
    """Each query sees its own key alone: all of its score's gradient cancels but that of the lse,
    which is a hundredth of what cancels. Where dP and delta are sums of their own, or d_lse is
    subtracted before they cancel, gradients are off by dozens of roundings and more."""
    users = 3000 // length
    inputs = Case([length] * users, dim=dim).inputs(torch.float32).with_shared_offsets()
    inputs = replace(inputs, d_lse=inputs.d_lse / 100)
    found = run("triton", inputs, tile=None, window=(0, 0))
    d_scores = inputs.d_lse.double()[..., None] / math.sqrt(dim)
    eps = torch.finfo(torch.float32).eps
    for name, exact in (("dq", d_scores * inputs.k), ("dk", d_scores * inputs.q)):
        error = (found[name].double() - exact).abs().max() / exact.abs().max()
        assert error < 4 * eps / 2, name
    assert torch.equal(found["o"], inputs.v)
