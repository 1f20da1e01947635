"""What a score becomes in the plain kernels: numbers against float64, those at the ends too."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import DEVICE

from jagged_kernels.attention.scores import triton_policies

EXACT = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}


@triton.jit
def _apply_kernel(
    score_ptr, d_weight_ptr, weight_ptr, d_score_ptr, SIZE: tl.constexpr, WEIGHT: tl.constexpr,
    D_SCORE: tl.constexpr,
):  # fmt: skip
    number = tl.arange(0, SIZE)
    score = tl.load(score_ptr + number)
    tl.store(weight_ptr + number, WEIGHT(score))
    tl.store(d_score_ptr + number, D_SCORE(score, tl.load(d_weight_ptr + number)))


def applied(name: str, score: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, gradients of scores where weights' are 1)."""
    weight, d_score = torch.empty_like(score), torch.empty_like(score)
    _apply_kernel[(1,)](
        score, torch.ones_like(score), weight, d_score, SIZE=score.numel(),
        WEIGHT=getattr(triton_policies, f"{name}_weight"),
        D_SCORE=getattr(triton_policies, f"{name}_d_score"),
    )  # fmt: skip
    return weight, d_score


@pytest.mark.parametrize("name", EXACT)
def test_weights_and_gradients_are_exact_in_float32(name):
    score = torch.linspace(-80, 80, 2048, device=DEVICE)
    weight, d_score = applied(name, score)
    exact = score.double().requires_grad_()
    wanted = EXACT[name](exact)
    (d_wanted,) = torch.autograd.grad(wanted.sum(), exact)
    # The exponent's rounding: of a score of 80 some 80 roundings of 1.
    assert ((weight - wanted).abs() <= 2e-7 * (2 + score.abs()) * wanted.abs()).all()
    assert ((d_score - d_wanted).abs() <= 4e-7 * (2 + score.abs())).all()
    assert (d_score - d_wanted).abs()[score < -20].max() < 1e-7


@pytest.mark.parametrize("name", EXACT)
def test_enormous_scores_have_weights_of_a_size(name):
    score = torch.tensor([-3e38, -1e4, -200.0, -104.0, 104.0, 200.0, 1e4, 3e38], device=DEVICE)
    weight, d_score = applied(name, score)
    assert torch.equal(weight, EXACT[name](score.double()).float().where(score > 0, 0.0))
    assert torch.equal(d_score, ((score > 0) & torch.tensor(name == "silu", device=DEVICE)).float())
    weight, d_score = applied(name, torch.full((8,), math.nan, device=DEVICE))
    assert weight.isnan().all()
    assert d_score.isnan().all()
