"""Heads: each is its formula, and what the fields of a candidate are enters all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from small_rankers import batch_of, changed, mixed_rows, ranker

from click_data import ClickDataset
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.evaluation.evaluate import evaluate_model
from jagged_ranking.layers.head import MIXERS
from jagged_ranking.layers.heads.dcn_v2 import DCNv2
from jagged_ranking.layers.heads.dhen import DHEN
from jagged_ranking.layers.heads.mmoe import MMoE
from jagged_ranking.models.model_config import HEADS, ModelConfig
from jagged_ranking.models.ranker import Ranker

WIDTHS = (4, 4, 3)
OPTIONS: Any = {"hidden": (6, 5), "tasks": 2, "dropout": 0.0}
KINDS = [*({"head": head} for head in HEADS), {"experts": 3}]


def fields() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(7, width) for width in WIDTHS]


def test_names_are_those_of_the_mixers() -> None:
    assert (*MIXERS, "dot") == HEADS


def test_dcn_v2_raises_the_degree() -> None:
    head: Any = DCNv2(WIDTHS, **OPTIONS)
    given = fields()
    x = torch.cat(given, dim=1)
    first, second = head.crosses
    once = x * (x @ first.weight.T + first.bias) + x
    twice = x * (once @ second.weight.T + second.bias) + once
    torch.testing.assert_close(head(given), head.deep.layers(twice))


def test_dhen_is_an_ensemble_of_dots_and_crosses() -> None:
    head: Any = DHEN(WIDTHS, **OPTIONS)
    given = fields()
    tokens = torch.stack([*given[:2], head.project[2](given[2])], dim=1)
    for layer in head.layers:
        dots = torch.einsum("cmd,cnd->cmn", tokens, tokens).flatten(1)
        flat = tokens.flatten(1)
        mixed = layer.dots(dots) + flat * layer.cross(flat) + flat
        tokens = layer.norm(mixed.unflatten(1, (3, 4)))
    torch.testing.assert_close(head(given), head.deep.layers(tokens.flatten(1)))


def test_mmoe_mixes_experts_by_task() -> None:
    head: Any = MMoE(WIDTHS, experts=3, **OPTIONS)
    given = fields()
    x = torch.cat(given, dim=1)
    answers = torch.stack([expert(x) for expert in head.experts])
    for task, tower in enumerate(head.towers):
        gate = (x @ head.gates.weight[3 * task : 3 * task + 3].T).softmax(1)
        expected = tower(torch.einsum("ce,ech->ch", gate, answers))
        torch.testing.assert_close(head(given)[:, task : task + 1], expected)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_request_does_not_depend_on_its_neighbours(toy: ClickDataset, options: dict) -> None:
    made, rows = ranker(toy, "target_attention", **options), mixed_rows(toy)
    logits = made(batch_of(toy, rows))
    assert logits.isfinite().all()
    alone = [made(batch_of(toy, rows[i : i + 1])) for i in range(len(rows))]
    torch.testing.assert_close(logits, torch.cat(alone))


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_every_parameter_learns_and_features_enter(toy: ClickDataset, options: dict) -> None:
    made, batch = ranker(toy, "mean_pool", **options), batch_of(toy, mixed_rows(toy))
    logits = made(batch)
    logits.square().sum().backward()
    for name, parameter in made.head.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name
    other = made(changed(batch, "features", batch.features.values + 1))
    assert torch.equal(other, logits) == (options == {"head": "dot"})


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_head_is_evaluated(toy: ClickDataset, options: dict) -> None:
    made = ranker(toy, "mean_pool", **options)
    found = evaluate_model(made, toy, batch_size=512, split="valid")
    assert 0 < found.metrics["auc"] < 1


def test_dot_is_a_dot_product(toy: ClickDataset) -> None:
    made, batch = ranker(toy, "target_attention", head="dot"), batch_of(toy, mixed_rows(toy))
    history, candidates = made.embedding(batch)
    answer = made.encoder(history, candidates, batch)
    bias = made.head.item_bias(batch.candidate.values)[:, 0]
    expected = (answer * candidates.values).sum(1) + bias
    torch.testing.assert_close(made(batch)[:, 0], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "bilinear"}, "head must be one of mlp, dcn_v2, dhen, dot, got 'bilinear'"),
        ({"experts": -1}, "experts must not be negative, got -1"),
        ({"experts": 2, "head": "dhen"}, "experts need the head mlp and hidden layers, got 'dhen'"),
        ({"experts": 2, "hidden": ()}, r"experts need .* and hidden \(\)"),
    ],
)
def test_options_that_make_no_sense(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**options)


def test_dot_has_one_task(toy: ClickDataset) -> None:
    shape = dataclasses.replace(DataShape.of(toy), positive_rates={"click": 0.4, "buy": 0.1})
    with pytest.raises(ValueError, match="one score and the data several tasks: click, buy"):
        Ranker(ModelConfig(head="dot"), shape)
