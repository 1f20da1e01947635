"""Models that say after every event which item is next: their states, their loss, their ranks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from click_data import ClickDataset
from jagged_ranking.data.batch import JaggedBatch, RequestTable, make_batch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.loader import RequestLoader
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.evaluation.all_items import all_item_metrics, ranks_among_all
from jagged_ranking.evaluation.evaluate import evaluate_model
from jagged_ranking.evaluation.popularity import NEXT_ITEM_FLOORS, evaluate_next_item_floor
from jagged_ranking.models.model_config import MODEL_NAMES, encoder_of
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.losses import NO_ITEM, following, loss_of
from jagged_ranking.training.trainer import train

FOLLOWING = [name for name in MODEL_NAMES if hasattr(encoder_of(name), "states")]
OPTIONS = {"head": "dot", "loss": "next_item", "dim": 8, "id_dropout": 0.0}


def ranker(dataset: ClickDataset, model: str, **options) -> Ranker:
    torch.manual_seed(0)
    config = TrainConfig(model=model, **{**OPTIONS, **options})
    made = Ranker(config, DataShape.of(dataset))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made.eval()


def batch_of(dataset: ClickDataset, split: str, rows: list[int], *, cap: int = 50) -> JaggedBatch:
    table = RequestTable.from_columns(dataset.requests(split))
    store = HistoryStore.from_dataset(dataset)
    return make_batch(store, table, np.array(rows), max_history=cap)


def test_who_can() -> None:
    assert {"mean_pool", "sasrec"} <= {*FOLLOWING}
    assert "target_attention" not in FOLLOWING


@pytest.mark.parametrize("model", FOLLOWING)
def test_a_state_is_the_answer_to_a_request_that_ends_there(
    songs: ClickDataset, model: str
) -> None:
    """Given the places that the events have in the longer history."""
    made = ranker(songs, model, layers=2)
    rows = RequestTable.from_columns(songs.requests("train")).last_of_users()[:3].tolist()
    whole = batch_of(songs, "train", rows)
    history, candidates = made.embedding(whole)
    states = made.states(whole)
    for user, tokens in enumerate(history.unbind()):
        for end in range(1, len(tokens) + 1):
            cut = [t[:end] if u == user else t for u, t in enumerate(history.unbind())]
            shorter = type(history).from_list(cut)
            answer = made.encoder(shorter, candidates, whole)[user]
            torch.testing.assert_close(states.unbind()[user][end - 1], answer)


def test_the_longest_requests_hold_all_others(songs: ClickDataset, toy: ClickDataset) -> None:
    for dataset in (songs, toy):
        columns = dataset.requests("train")
        rows = RequestTable.from_columns(columns).last_of_users()
        assert (np.diff(rows) > 0).all()
        user, prefix = np.asarray(columns.user), np.asarray(columns.prefix)
        assert sorted(user[rows]) == sorted(set(user.tolist()))
        for row in rows:
            assert prefix[row] == prefix[user == user[row]].max()


def test_what_follows_each_event(songs: ClickDataset) -> None:
    batch = batch_of(songs, "train", [0, 3, 4])
    vocabulary = int(batch.item.values.max())  # so that the largest id counts as new
    found = batch.item.with_values(following(batch, num_items=vocabulary)).unbind()
    asked = [c[0] for c in batch.candidate.unbind()]
    for items, next_item, mine in zip(batch.item.unbind(), asked, found, strict=True):
        expected = [*items.tolist()[1:], int(next_item)]
        assert mine.tolist() == [i if i < vocabulary else NO_ITEM for i in expected]
    assert (torch.cat(found) == NO_ITEM).any()


def test_nothing_follows_where_the_candidate_was_not_taken(songs: ClickDataset) -> None:
    batch = batch_of(songs, "train", [0, 3])
    label = batch.label.with_values(torch.tensor([[0.0], [1.0]]))
    found = following(dataclasses.replace(batch, label=label), num_items=songs.num_items)
    ends = batch.item.offsets[1:] - 1
    assert found[ends].tolist() == [NO_ITEM, int(batch.candidate.values[1])]


@pytest.mark.parametrize("model", FOLLOWING)
def test_the_loss_is_a_softmax_over_all_items(songs: ClickDataset, model: str) -> None:
    made = ranker(songs, model)
    batch = batch_of(songs, "train", [0, 3, 9, 20])
    vectors, bias = made.items(torch.arange(songs.num_items), batch.items)
    target = following(batch, num_items=songs.num_items)
    losses = []
    for state, item in zip(made.states(batch).values, target, strict=True):
        logit = torch.stack([state @ v for v in vectors]) + bias
        losses.append(cross_entropy(logit[None], item[None]))
    torch.testing.assert_close(loss_of("next_item", made, batch), torch.stack(losses).mean())


def test_drawn_items_are_told_apart_but_never_from_themselves(songs: ClickDataset) -> None:
    """With very many draws of few items, a sampled softmax is the whole one but for the weight of
    the others, which is the number of draws of each."""
    made = ranker(songs, "sasrec")
    batch = batch_of(songs, "train", [0, 3, 9, 20])
    vectors, bias = made.items(torch.arange(songs.num_items), batch.items)
    target = following(batch, num_items=songs.num_items)
    torch.manual_seed(5)
    found = loss_of("next_item", made, batch, negatives=500)
    torch.manual_seed(5)
    drawn = torch.randint(1, songs.num_items, (500,))
    weight = torch.bincount(drawn, minlength=songs.num_items).double()
    logit = (made.states(batch).values @ vectors.T + bias).double()
    own = logit.gather(1, target[:, None])
    others = (logit.exp() * weight).scatter(1, target[:, None], 0.0).sum(1, keepdim=True)
    expected = -(own - (own.exp() + others).log()).mean()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_ranks_among_all_items(songs: ClickDataset) -> None:
    made = ranker(songs, "sasrec")
    columns, store = songs.requests("test"), HistoryStore.from_dataset(songs)
    table = RequestTable.from_columns(columns)
    loader = RequestLoader(store, table, batch_size=7, max_history=4)
    found = ranks_among_all(made, loader)
    vectors, bias = made.items(torch.arange(songs.num_items), store.items)
    for row in range(0, len(columns), 5):
        batch = make_batch(store, table, np.array([row]), max_history=4)
        score = made.answers(batch)[0] @ vectors.T + bias
        first = int(store.offsets[columns.user[row]])
        met = store.item[first : first + int(columns.prefix[row])].tolist()
        target = int(columns.item[columns.offsets[row]])
        assert target not in met
        others = [i for i in range(1, songs.num_items) if i != target and i not in met]
        better = sum(bool(score[i] > score[target]) for i in others)
        assert found[row] == 1 + better


def test_metrics_of_ranks() -> None:
    found = all_item_metrics(np.array([1.0, 10.0, 10.5, 3.0]))
    assert found["all_hr@10"] == 0.75
    assert found["all_ndcg@10"] == pytest.approx((1 + 1 / np.log2(11) + 0.5) / 4)


def test_sasrec_learns_what_comes_next(songs: ClickDataset) -> None:
    """The step is 1 or 2, so that a model that has understood puts the next item among two."""
    config = TrainConfig(
        model="sasrec",
        **{**OPTIONS, "dim": 16},
        select="ndcg@10",
        epochs=25,
        patience=25,
        batch_size=8,
        learning_rate=0.01,
        dropout=0.0,
        embedding_dropout=0.0,
        average_decay=0.9,
    )
    result = train(config, songs, progress=False, device="cpu")
    found = evaluate_model(result.model, songs, batch_size=16).metrics
    assert found["mrr"] > 0.7
    assert found["all_hr@10"] > 0.9
    untrained = evaluate_model(ranker(songs, "sasrec"), songs, batch_size=16).metrics
    assert untrained["mrr"] < 0.5


def test_what_cannot_be_trained_is_said(songs: ClickDataset) -> None:
    with pytest.raises(ValueError, match=r"after every event: mean_pool, .*sasrec"):
        train(TrainConfig(model="din", **OPTIONS), songs, progress=False)
    with pytest.raises(ValueError, match="next items alone, without others to tell them from"):
        train(TrainConfig(model="sasrec"), songs, progress=False)
    with pytest.raises(ValueError, match="loss next_item needs head dot, got head mlp"):
        TrainConfig(loss="next_item")
    with pytest.raises(ValueError, match="head must be one of mlp, dcn_v2, dhen, dot, got 'dots'"):
        TrainConfig(head="dots")


@pytest.mark.parametrize("name", NEXT_ITEM_FLOORS)
def test_popularity_among_all_items(songs: ClickDataset, name: str) -> None:
    """Held out events count in the one that published tables have, and nowhere else."""
    histories = songs.histories
    count = np.zeros(songs.item_rows)
    for user in range(songs.num_users):
        items = histories.item[histories.offsets[user] : histories.offsets[user + 1]]
        for item in items if name == "popularity_leak" else items[:-2]:
            count[item] += 1
    (found,) = evaluate_next_item_floor(name, songs, splits=("test",))
    columns = songs.requests("test")
    np.testing.assert_allclose(found.probability, count[columns.item] / (count.max() + 1))
    hits = []
    for user, prefix, first in zip(columns.user, columns.prefix, columns.offsets, strict=False):
        start, target = histories.offsets[user], columns.item[first]
        met = histories.item[start : start + prefix]
        left = np.setdiff1d(np.arange(1, songs.item_rows), [*met, target])
        rank = 1 + (count[left] > count[target]).sum() + (count[left] == count[target]).sum() / 2
        hits.append(rank <= 10)
    assert 0 < np.mean(hits) < 1
    assert found.metrics["all_hr@10"] == np.mean(hits)
    # counts over the largest are no probabilities
    assert not {"ne", "log_loss"} & {*found.metrics}
