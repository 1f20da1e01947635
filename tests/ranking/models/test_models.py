"""Embeddings, pooling and head: what each may and may not depend on."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from click_data import ClickDataset
from jagged_kernels import JaggedTensor, jagged_attention
from jagged_ranking.data.batch import HistoryStore, JaggedBatch, SampleTable, make_batch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.layers.embeddings import BUCKETS, log_bucket
from jagged_ranking.layers.head import PRIOR_EVENTS, history_features
from jagged_ranking.models.model_config import MODEL_NAMES, ModelConfig
from jagged_ranking.models.ranker import MODELS, Ranker
from jagged_ranking.models.target_attention import TargetAttention
from jagged_ranking.models.transformer import TransformerLayer
from jagged_ranking.training.config import TrainConfig

HISTORY_FIELDS = ("item", "category", "label", "age", "recency", "signals")


def batch_of(dataset: ClickDataset, index: np.ndarray, *, max_history: int = 20) -> JaggedBatch:
    store = HistoryStore.from_dataset(dataset)
    return make_batch(
        store, SampleTable.from_columns(dataset.samples("train")), index, max_history=max_history
    )


def ranker(dataset: ClickDataset, model: str, **options) -> Ranker:
    """A model away from its start, where some branches are zero."""
    torch.manual_seed(0)
    made = Ranker(TrainConfig(model=model, dim=16, **options), DataShape.of(dataset))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made.eval()


def changed(batch: JaggedBatch, name: str, values: Tensor) -> JaggedBatch:
    return dataclasses.replace(batch, **{name: getattr(batch, name).with_values(values)})


def mixed_rows(dataset: ClickDataset) -> np.ndarray:
    """Rows with an empty, a one-event and longer histories."""
    prefix = dataset.samples("train").prefix
    rows = [int(np.flatnonzero(prefix == n)[0]) for n in (0, 1)]
    return np.array([*rows, *np.flatnonzero(prefix > 5)[:5]])


def test_log_bucket() -> None:
    x = torch.tensor([-5, 0, 1, 2, 3, 6, 7, 2**20 - 1, 2**62])
    assert log_bucket(x).tolist() == [0, 0, 1, 1, 2, 2, 3, 20, BUCKETS - 1]


def test_history_features(toy: ClickDataset) -> None:
    batch = batch_of(toy, mixed_rows(toy))
    found = history_features(batch, positive_rate=0.3)
    for row, labels in zip(found.tolist(), batch.label.unbind(), strict=True):
        rate = (float(labels.sum()) + 0.3 * PRIOR_EVENTS) / (len(labels) + PRIOR_EVENTS)
        assert row == pytest.approx([np.log1p(len(labels)), np.log(rate / (1 - rate))], rel=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_a_user_does_not_depend_on_the_neighbours(toy: ClickDataset, model: str) -> None:
    made, rows = ranker(toy, model, layers=2), mixed_rows(toy)
    together = made(batch_of(toy, rows))
    assert together.isfinite().all()
    alone = torch.cat([made(batch_of(toy, rows[[i]])) for i in range(len(rows))])
    torch.testing.assert_close(together, alone)
    backwards = made(batch_of(toy, rows[::-1].copy()))
    torch.testing.assert_close(together, backwards.flip(0))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", HISTORY_FIELDS)
def test_every_field_of_the_history_matters(toy: ClickDataset, model: str, name: str) -> None:
    made, batch = ranker(toy, model), batch_of(toy, mixed_rows(toy))
    values = getattr(batch, name).values
    other = 1 - values if name == "label" else values * 4 + 1
    if name in ("item", "category"):
        other = torch.where(values == 1, 2, 1).int()
    difference = (made(changed(batch, name, other)) - made(batch)).detach().abs()
    empty = batch.item.lengths == 0
    assert (difference[~empty] > 1e-6).all()
    assert (difference[empty] == 0).all()


@pytest.mark.parametrize("model", MODELS)
def test_every_parameter_learns(toy: ClickDataset, model: str) -> None:
    made = ranker(toy, model)
    made(batch_of(toy, np.arange(200))).square().sum().backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # a key's bias adds the same to all scores of a query, which the softmax cancels
        if not name.endswith(("key_value.bias", "in_proj_bias")):
            assert parameter.grad.abs().max() > 0, name


def test_only_attention_weighs_the_history_by_the_target(toy: ClickDataset) -> None:
    """What a target does to the pooled vector: nothing for the mean, something for the others."""
    batch = batch_of(toy, np.flatnonzero(toy.samples("train").prefix > 5)[:4])
    for model in MODELS:
        made = ranker(toy, model)
        history, target = made.embedding(batch)
        moved = (made.pooler(history, target.flip(0)) - made.pooler(history, target)).abs().max()
        assert (moved == 0) == (model == "mean_pool")


def test_target_attention_is_softmax_with_a_sink(toy: ClickDataset) -> None:
    batch, made = batch_of(toy, mixed_rows(toy)), ranker(toy, "target_attention")
    history, target = made.embedding(batch)
    pooler = cast("TargetAttention", made.pooler)
    expected = []
    for tokens, one in zip(history.unbind(), target, strict=True):
        query = pooler.query(one).unflatten(0, (2, 8))
        key, value = pooler.key_value(tokens).unflatten(1, (2, 2, 8)).unbind(1)
        score = torch.einsum("hd,nhd->hn", query, key) / 8**0.5
        weight = torch.cat([score, pooler.sink[:, None]], dim=1).softmax(1)[:, :-1]
        expected.append(pooler.out(torch.einsum("hn,nhd->hd", weight, value).flatten()))
    torch.testing.assert_close(pooler(history, target), torch.stack(expected))


def test_attention_starts_with_the_targets_own_category(toy: ClickDataset) -> None:
    """Of two events that differ in the category alone, the target's own gets more weight."""
    torch.manual_seed(0)
    made = Ranker(TrainConfig(model="target_attention", dim=32), DataShape.of(toy)).eval()
    pooler = cast("TargetAttention", made.pooler)
    category = made.embedding.category.weight
    score = pooler.query(category) @ pooler.key_value(category)[:, :32].T
    assert (score.argmax(1) == torch.arange(len(category))).all()


def test_transformer_starts_as_target_attention(toy: ClickDataset) -> None:
    batch = batch_of(toy, mixed_rows(toy))
    torch.manual_seed(0)
    made = Ranker(TrainConfig(model="transformer", dim=16, layers=2), DataShape.of(toy)).eval()
    history, target = made.embedding(batch)
    torch.testing.assert_close(made.pooler(history, target), made.pooler.pool(history, target))


def test_id_dropout_shows_the_unknown_row(toy: ClickDataset) -> None:
    made = ranker(toy, "target_attention", id_dropout=0.5, embedding_dropout=0.0)
    ids = torch.full((4000,), 3, dtype=torch.int32)
    nothing = torch.zeros_like(ids)
    assert (
        made.embedding._content(ids, nothing)
        == made.embedding.item.weight[3] + made.embedding.category.weight[0]
    ).all()
    made.train()
    shown = made.embedding._content(ids, nothing) - made.embedding.category.weight[0]
    unknown = (shown - made.embedding.item.weight[0]).abs().amax(1) < 1e-6
    assert 0.45 < unknown.float().mean() < 0.55


def test_signals_enter_standardised_over_the_train_period(toy: ClickDataset) -> None:
    shape = DataShape.of(toy)
    train = toy.samples("train")
    events = toy.histories.time <= train.time.max()
    ratings = toy.histories.signals["rating"][events]
    assert len(ratings) == len(train.label)  # every event of the train period is a train sample
    assert shape.signal_mean == pytest.approx((ratings.mean(),))
    assert shape.signal_std == pytest.approx((ratings.std(),))
    assert shape.positive_rate == pytest.approx((ratings >= 4).mean())


def test_every_name_has_a_model() -> None:
    assert tuple(MODELS) == MODEL_NAMES


def test_id_tables_decay_at_their_own_rate(toy: ClickDataset) -> None:
    made = Ranker(ModelConfig(dim=16), DataShape.of(toy))
    others, tables = made.parameter_groups(weight_decay=0.25, embedding_weight_decay=0.5)
    assert (others["weight_decay"], tables["weight_decay"]) == (0.25, 0.5)
    assert {id(p) for p in tables["params"]} == {
        id(p)
        for p in (
            made.embedding.item.weight,
            made.embedding.category.weight,
            made.head.item_bias.weight,
        )
    }
    assert len(others["params"]) + len(tables["params"]) == len(list(made.parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"model": "dnn"},
            "model must be one of mean_pool, target_attention, transformer, got 'dnn'",
        ),
        ({"dim": 10, "heads": 4}, "divisible by heads, got 10 and 4"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"select": "ndcg"}, "select must be one of log_loss, auc, gauc, got .ndcg."),
    ],
)
def test_config_errors(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


def test_config_round_trip() -> None:
    config = TrainConfig(model="transformer", hidden=(8, 4), seed=3)
    assert TrainConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="unknown option 'depth'"):
        TrainConfig.from_dict({"depth": 3})


class LayerOfProducts(nn.Module):
    """What `TransformerLayer` is, written out with nn.Linear and `jagged_attention`."""

    def __init__(self, dim: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.forward_norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, 2 * dim)
        self.narrow = nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(dropout)
        for last in (self.out, self.narrow):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: JaggedTensor) -> JaggedTensor:
        projected = self.query_key_value(self.attention_norm(x.values))
        q, k, v = projected.unflatten(1, (3, self.heads, -1)).unbind(1)
        parts = (x.with_values(part) for part in (q, k, v))
        attended = jagged_attention(*parts, causal=True).values.flatten(1)
        values = x.values + self.dropout(self.out(attended))
        hidden = nn.functional.gelu(self.widen(self.forward_norm(values)))
        return x.with_values(values + self.dropout(self.narrow(hidden)))


def test_a_transformer_layer_is_its_products() -> None:
    """From one seed the same parameters in the same order, results, gradients and random numbers
    drawn: what was trained and measured with the one is so with the other."""
    x = JaggedTensor(torch.randn(9, 16), torch.tensor([0, 4, 4, 9]))
    found = []
    for kind, more in ((TransformerLayer, {"schedule": None}), (LayerOfProducts, {})):
        torch.manual_seed(5)
        layer = kind(16, heads=2, dropout=0.5)
        parameters = list(layer.parameters())
        found.append([parameter.detach().clone() for parameter in parameters])
        with torch.no_grad():
            for parameter in parameters:  # away from the branches' zeros
                parameter.add_(torch.randn_like(parameter))
        values = layer(x, **more).values
        found[-1] += [values, *torch.autograd.grad(values.square().sum(), parameters)]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
