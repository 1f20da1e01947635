"""The average of weights, step by step."""

import pytest
import torch
from torch import nn

from jagged_ranking.training.average import Average


@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_it_is_over_few_steps_at_first(decay: float) -> None:
    """Of the first step it is the weights themselves, then (1 + n) / (10 + n) of it stay, up to
    the decay."""
    model = nn.Linear(1, 1, bias=False)
    average = Average(model, decay=decay)
    expected, of_seed = 0.0, torch.Generator().manual_seed(0)
    for step, weight in enumerate(torch.randn(30, generator=of_seed).tolist()):
        with torch.no_grad():
            model.weight.fill_(weight)
        average.update(step)
        kept = min(decay, (1 + step) / (10 + step)) if step else 0.0
        expected = kept * expected + (1 - kept) * weight
        assert average.model.weight.item() == pytest.approx(expected, abs=1e-6)
        assert model.weight.item() == pytest.approx(weight)


def test_without_a_decay_it_is_the_model_itself() -> None:
    model = nn.Linear(1, 1)
    average = Average(model, decay=0.0)
    with torch.no_grad():
        model.weight.fill_(7.0)
    average.update(3)
    assert average.model.weight.item() == 7.0
