"""Embeddings, pooling and head: what each may and may not depend on."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np
import pytest
import torch
from small_rankers import batch_of, changed, mixed_rows, ranker
from torch import nn

from click_data import ClickDataset
from jagged_kernels import JaggedTensor
from jagged_ranking.data.data_shape import DataShape, Scale
from jagged_ranking.data.matches import MATCHES
from jagged_ranking.layers.embeddings import BUCKETS, log_bucket
from jagged_ranking.layers.head import PRIOR_EVENTS, history_features
from jagged_ranking.layers.scaling import StandardWithLog
from jagged_ranking.layers.self_attention import TransformerLayer
from jagged_ranking.models.encoders.din import DIN
from jagged_ranking.models.encoders.target_attention import TargetAttention
from jagged_ranking.models.encoders.transformer import Transformer
from jagged_ranking.models.model_config import MODEL_NAMES, ModelConfig
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.config import TrainConfig

# Models whose answer is the same for all candidates.
ALIKE_FOR_ALL = {"mean_pool", "pma", "sasrec"}
HISTORY_FIELDS = ("item", "categories", "age", "recency", "signals")


def test_log_bucket() -> None:
    x = torch.tensor([-5, 0, 1, 2, 3, 6, 7, 2**20 - 1, 2**62])
    buckets = [0, 0, 1, 1, 2, 2, 3, 20, BUCKETS - 1]
    assert log_bucket(x).tolist() == buckets
    # models are compiled on CPUs, too, for which not every operation can be
    assert torch.compile(log_bucket)(x).tolist() == buckets


def test_history_features(toy: ClickDataset) -> None:
    batch = batch_of(toy, mixed_rows(toy))
    signal = list(toy.histories.signals).index("label")
    found = history_features(batch, positive_rate=0.3, signal=signal)
    for row, signals in zip(found.tolist(), batch.signals.unbind(), strict=True):
        labels = signals[:, signal]
        rate = (float(labels.sum()) + 0.3 * PRIOR_EVENTS) / (len(labels) + PRIOR_EVENTS)
        assert row == pytest.approx([np.log1p(len(labels)), np.log(rate / (1 - rate))], rel=1e-5)
    unlabelled = history_features(batch, positive_rate=0.3, signal=None)
    assert torch.equal(unlabelled, found[:, :1])


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_a_request_does_not_depend_on_its_neighbours(toy: ClickDataset, model: str) -> None:
    made, rows = ranker(toy, model, layers=2), mixed_rows(toy)
    together = batch_of(toy, rows)
    logits = together.label.with_values(made(together)).unbind()
    assert all(part.isfinite().all() for part in logits)
    for row, part in zip(rows, logits, strict=True):
        torch.testing.assert_close(made(batch_of(toy, np.array([row]))), part)
    backwards = batch_of(toy, rows[::-1].copy())
    turned = backwards.label.with_values(made(backwards)).unbind()
    torch.testing.assert_close(turned[::-1], logits)


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_a_candidate_does_not_depend_on_the_others(toy: ClickDataset, model: str) -> None:
    made, batch = ranker(toy, model), batch_of(toy, mixed_rows(toy))
    asked = batch.candidate.lengths
    assert (asked > 1).any()
    logits = made(batch)
    other = (batch.candidate.values % 7 + 1).int()
    first = batch.candidate.offsets[:-1]
    other[first] = batch.candidate.values[first]
    categories = batch.candidate_categories.values.clone()
    features = batch.features.values * 2 + 1
    features[first] = batch.features.values[first]
    moved = changed(changed(batch, "candidate", other), "features", features)
    found = made(changed(moved, "candidate_categories", categories))
    torch.testing.assert_close(found[first], logits[first])
    rest = torch.ones(len(logits), dtype=torch.bool)
    rest[first] = False
    assert ((found - logits)[rest].abs() > 1e-6).all()


@pytest.mark.parametrize("model", MODEL_NAMES)
@pytest.mark.parametrize("name", HISTORY_FIELDS)
def test_every_field_of_the_history_matters(toy: ClickDataset, model: str, name: str) -> None:
    made, batch = ranker(toy, model), batch_of(toy, mixed_rows(toy))
    values = getattr(batch, name).values
    other = 1 - values if name == "signals" else values * 4 + 1  # a label stays one
    if name in ("item", "categories"):
        other = torch.where(values == 1, 2, 1).int()
    difference = (made(changed(batch, name, other)) - made(batch)).detach().abs()
    empty = (batch.item.lengths == 0)[batch.request]
    assert (difference[~empty] > 1e-6).all()
    assert (difference[empty] == 0).all()


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_what_is_asked_for_is_not_seen(toy: ClickDataset, model: str) -> None:
    """Neither the candidates' labels nor which rows of the data set they are."""
    made, batch = ranker(toy, model), batch_of(toy, mixed_rows(toy))
    moved = changed(batch, "label", 1 - batch.label.values)
    moved = dataclasses.replace(moved, index=batch.index + 7, user=batch.user + 7)
    assert torch.equal(made(moved), made(batch))


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_a_model_runs_in_bfloat16(toy: ClickDataset, model: str) -> None:
    """As it is trained on a GPU; before it is trained, when no branch makes much of rounding."""
    torch.manual_seed(0)
    made = Ranker(TrainConfig(model=model, dim=16), DataShape.of(toy)).eval()
    batch = batch_of(toy, mixed_rows(toy))
    expected = made(batch)
    with torch.autocast("cpu", torch.bfloat16):
        logits = made(batch)
    assert logits.dtype == torch.float32
    # a rounding is of 2 ** -8, and a handful of them stand behind one another
    torch.testing.assert_close(logits, expected, atol=0.03 * float(expected.abs().max()), rtol=0.03)
    assert not torch.equal(logits, expected)
    logits.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_every_parameter_learns(toy: ClickDataset, model: str) -> None:
    made = ranker(toy, model)
    made(batch_of(toy, np.arange(200))).square().sum().backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # a key's bias adds the same to all scores of a query, which the softmax cancels
        if not name.endswith(("key_value.bias", "in_proj_bias")):
            assert parameter.grad.abs().max() > 0, name


def test_only_attention_weighs_the_history_by_the_candidate(toy: ClickDataset) -> None:
    """What a candidate does to the answer: nothing where it is not asked."""
    batch = batch_of(toy, np.flatnonzero(toy.requests("train").prefix > 5)[:4])
    for model in MODEL_NAMES:
        made = ranker(toy, model)
        history, candidates = made.embedding(batch)
        turned = candidates.with_values(candidates.values.flip(0))
        answers = [made.encoder(history, asked, batch) for asked in (candidates, turned)]
        assert ((answers[1] - answers[0]).abs().max() == 0) == (model in ALIKE_FOR_ALL)


def test_target_attention_is_softmax_with_a_sink(toy: ClickDataset) -> None:
    batch, made = batch_of(toy, mixed_rows(toy)), ranker(toy, "target_attention")
    history, candidates = made.embedding(batch)
    encoder = cast("TargetAttention", made.encoder).pool
    expected = []
    for tokens, asked in zip(history.unbind(), candidates.unbind(), strict=True):
        key, value = encoder.key_value(tokens).unflatten(1, (2, 2, 8)).unbind(1)
        for one in asked:
            query = encoder.query(one).unflatten(0, (2, 8))
            score = torch.einsum("hd,nhd->hn", query, key) / 8**0.5
            weight = torch.cat([score, encoder.sink[:, None]], dim=1).softmax(1)[:, :-1]
            expected.append(encoder.out(torch.einsum("hn,nhd->hd", weight, value).flatten()))
    torch.testing.assert_close(encoder(history, candidates), torch.stack(expected))


def test_din_is_an_unnormalised_sum_over_pairs(toy: ClickDataset) -> None:
    batch, made = batch_of(toy, mixed_rows(toy)), ranker(toy, "din")
    history, candidates = made.embedding(batch)
    encoder = cast("DIN", made.encoder)
    expected = []
    for tokens, asked in zip(history.unbind(), candidates.unbind(), strict=True):
        for one in asked:
            q = one.expand_as(tokens)
            pairs = torch.cat([tokens, q, tokens - q, tokens * q], dim=1)
            weight = encoder.score(nn.functional.silu(encoder.first(pairs)))
            expected.append(encoder.out((weight * tokens).sum(0)))
    torch.testing.assert_close(encoder(history, candidates, batch), torch.stack(expected))


def test_attention_starts_with_the_candidates_own_category(toy: ClickDataset) -> None:
    """Of two events that differ in the category alone, the candidate's own gets more weight."""
    torch.manual_seed(0)
    made = Ranker(TrainConfig(model="target_attention", dim=32), DataShape.of(toy)).eval()
    encoder = cast("TargetAttention", made.encoder).pool
    _, category = made.embedding.tables
    score = encoder.query(category) @ encoder.key_value(category)[:, :32].T
    assert (score.argmax(1) == torch.arange(len(category))).all()


def test_transformer_starts_as_target_attention(toy: ClickDataset) -> None:
    batch = batch_of(toy, mixed_rows(toy))
    torch.manual_seed(0)
    made = Ranker(TrainConfig(model="transformer", dim=16, layers=2), DataShape.of(toy)).eval()
    history, candidates = made.embedding(batch)
    encoder = cast("Transformer", made.encoder)
    torch.testing.assert_close(
        encoder(history, candidates, batch), encoder.pool(history, candidates)
    )


def test_id_dropout_shows_the_unknown_row(toy: ClickDataset) -> None:
    made = ranker(toy, "target_attention", id_dropout=0.5, embedding_dropout=0.0)
    item = JaggedTensor(torch.full((4000,), 3, dtype=torch.int32), torch.tensor([0, 4000]))
    nothing = item.with_values(torch.zeros(4000, 1, dtype=torch.int32))
    dense = item.with_values(torch.zeros(4000, 0))
    items, categories = made.embedding.tables
    content = made.embedding._content(item, nothing, dense).values
    assert (content == items[3] + categories[0]).all()
    made.train()
    shown = made.embedding._content(item, nothing, dense).values - categories[0]
    unknown = (shown - items[0]).abs().amax(1) < 1e-6
    assert 0.45 < unknown.float().mean() < 0.55


@pytest.mark.parametrize("model", MODEL_NAMES)
def test_items_that_training_has_not_seen_are_the_unknown_one(
    toy: ClickDataset, model: str
) -> None:
    made, batch = ranker(toy, model), batch_of(toy, mixed_rows(toy))
    new = made.embedding.num_items + 5
    logits = [
        made(changed(batch, "candidate", torch.full_like(batch.candidate.values, id_)))
        for id_ in (0, new, 1)
    ]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_signals_are_standardised_over_what_train_requests_see(toy: ClickDataset) -> None:
    shape = DataShape.of(toy)
    train, histories = toy.requests("train"), toy.histories
    seen = np.zeros(len(histories.item), bool)
    for user, prefix in zip(train.user, train.prefix, strict=True):
        first = histories.offsets[user]
        seen[first : first + prefix] = True
    ratings = histories.signals["rating"][seen]
    assert shape.signals["rating"].mean == pytest.approx(ratings.mean())
    assert shape.signals["rating"].std == pytest.approx(ratings.std())
    assert shape.positive_rate == pytest.approx(train.labels["label"].mean())
    assert shape.features["popularity"].mean == pytest.approx(train.features["popularity"].mean())
    logs = np.log1p(train.features["popularity"])
    scale = shape.features["popularity"]
    assert (scale.log_mean, scale.log_std) == pytest.approx((logs.mean(), logs.std()))
    assert DataShape.from_dict(shape.to_dict()) == shape


def test_numbers_enter_with_their_logarithms() -> None:
    x = np.array([[-9.0], [0.0], [3.0], [200.0]], np.float32)
    made = StandardWithLog([Scale.of(x[:, 0])])
    found = made(torch.from_numpy(x)).numpy().T
    for row, values in zip(
        found, (x[:, 0], np.sign(x[:, 0]) * np.log1p(abs(x[:, 0]))), strict=True
    ):
        np.testing.assert_allclose(
            row, (values - values.mean()) / values.std(), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    "options", [{}, {"head": "dcn_v2"}, {"head": "dhen"}, {"experts": 3}], ids=str
)
def test_features_and_context_enter(toy: ClickDataset, options: dict) -> None:
    """Context by codes and by numbers, several tasks, dense features of items."""
    shape = dataclasses.replace(
        DataShape.of(toy),
        context={"device": 3, "hour": Scale(12.0, 7.0)},
        positive_rates={"label": 0.4, "long": 0.1},
        item_dense={"price": Scale(5.0, 2.0)},
    )
    torch.manual_seed(0)
    made = Ranker(TrainConfig(dim=16, **options), shape).eval()
    batch = batch_of(toy, mixed_rows(toy))
    requests, events, asked = len(batch), len(batch.item.values), len(batch.candidate.values)
    batch = dataclasses.replace(
        batch,
        context=torch.ones(requests, 1, dtype=torch.int32),
        context_dense=torch.full((requests, 1), 13.0),
        item_dense=batch.item.with_values(torch.ones(events, 1)),
        candidate_dense=batch.candidate.with_values(torch.ones(asked, 1)),
    )
    logits = made(batch)
    assert logits.shape == (asked, 2)
    moved = {
        "context": batch.context + 1,
        "context_dense": batch.context_dense + 1,
        "candidate_dense": batch.candidate.with_values(torch.zeros(asked, 1)),
    }
    for name, values in moved.items():
        other = made(dataclasses.replace(batch, **{name: values}))
        assert ((other - logits).abs() > 1e-6).all(), name
    features = batch.features.values
    for column in range(features.shape[1]):
        other = features.clone()
        other[:, column] += 1
        assert ((made(changed(batch, "features", other)) - logits).abs() > 1e-6).all()
    assert features.shape[1] == len(shape.features)
    assert tuple(shape.features)[-len(MATCHES) :] == MATCHES


def test_id_tables_decay_at_their_own_rate(toy: ClickDataset) -> None:
    made = Ranker(ModelConfig(dim=16), DataShape.of(toy))
    others, tables = made.parameter_groups(weight_decay=0.25, embedding_weight_decay=0.5)
    assert (others["weight_decay"], tables["weight_decay"]) == (0.25, 0.5)
    named = dict(made.named_parameters())
    expected = ("embedding.item.weight", "embedding.categories.0.weight", "head.item_bias.weight")
    assert {id(p) for p in tables["params"]} == {id(named[name]) for name in expected}
    assert len(others["params"]) + len(tables["params"]) == len(list(made.parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 10, "heads": 4}, "divisible by heads, got 10 and 4"),
        ({"dropout": 1.0}, r"dropout must lie in \[0, 1\), got 1.0"),
        ({"loss": "hinge"}, "loss must be one of pointwise, listwise, next_item, got 'hinge'"),
        (
            {"loss": "listwise", "select": "log_loss"},
            "select log_loss says nothing of what the loss listwise trains, .* one of auc, gauc, ",
        ),
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        (
            {"select": "ndcg"},
            "select must be one of auto, log_loss, auc, gauc, list_auc, mrr, ndcg@10, all_ndcg@10, "
            "all_hr@10, got .ndcg.",
        ),
    ],
)
def test_config_errors(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


@pytest.mark.parametrize(
    ("options", "metric"),
    [
        ({}, "log_loss"),
        ({"loss": "listwise"}, "list_auc"),
        ({"loss": "next_item", "head": "dot"}, "auto"),
        ({"loss": "listwise", "select": "mrr"}, "mrr"),
    ],
)
def test_the_epoch_is_chosen_by_what_the_loss_trains(options: dict, metric: str) -> None:
    assert TrainConfig(**options).select == metric


def test_config_round_trip() -> None:
    config = TrainConfig(model="transformer", hidden=(8, 4), seed=3)
    assert TrainConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="unknown option 'depth'"):
        TrainConfig.from_dict({"depth": 3})


@pytest.mark.parametrize("causal", [False, True])
def test_a_transformer_layer_is_that_of_torch(causal: bool) -> None:
    """User by user, with the weights of `nn.TransformerEncoderLayer`."""
    torch.manual_seed(5)
    x = JaggedTensor(torch.randn(9, 16).double(), torch.tensor([0, 4, 4, 9]))
    layer = TransformerLayer(ModelConfig(dim=16, dropout=0.5), causal=causal).eval().double()
    assert torch.equal(layer(x).values, x.values)  # as it starts
    theirs = nn.TransformerEncoderLayer(
        16, 2, 32, activation=nn.functional.gelu, batch_first=True, norm_first=True
    )
    theirs.eval().double()
    mine = dict(layer.named_parameters())
    names = {
        "self_attn.in_proj_": "query_key_value.",
        "self_attn.out_proj.": "out.",
        "linear1.": "widen.",
        "linear2.": "narrow.",
        "norm1.": "attention_norm.",
        "norm2.": "forward_norm.",
    }
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.copy_(torch.randn_like(parameter))
            start = next(start for start in names if name.startswith(start))
            mine.pop(name.replace(start, names[start])).copy_(parameter)
    assert not mine
    for found, tokens in zip(layer(x), x, strict=True):
        if len(tokens):
            hidden = nn.Transformer.generate_square_subsequent_mask(len(tokens)).double()
            torch.testing.assert_close(
                found, theirs(tokens[None], src_mask=hidden if causal else None)[0]
            )
