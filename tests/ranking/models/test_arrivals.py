"""Events told from their arrival: the same in every request, however its history is cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from small_rankers import batch_of, mixed_rows, ranker

from click_data import ClickDataset
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.prefetch import tensors_of
from jagged_ranking.evaluation.evaluate import evaluate_model
from jagged_ranking.layers.embeddings import Arrivals
from jagged_ranking.models.cached_ranker import CachedRanker, cut_histories
from jagged_ranking.models.captured_ranker import CapturedRanker
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.trainer import _Run

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CAP, ALL = 6, 10**4  # events of a request: few, and no end of them


def rows_of(toy: ClickDataset) -> np.ndarray:
    """Of every third train request, with and without a history that `CAP` cuts."""
    rows = np.arange(0, len(toy.requests("train")), 3)
    cut = toy.requests("train").prefix[rows] > CAP
    assert cut.sum() > 100
    assert (~cut).sum() > 30
    return rows


def of_each(batch: JaggedBatch, arrivals: Arrivals) -> list[list[tuple[int, int]]]:
    """Place and since of the events of each request."""
    place, since = (batch.item.with_values(x).unbind() for x in arrivals)
    return [
        list(zip(p.tolist(), s.tolist(), strict=True)) for p, s in zip(place, since, strict=True)
    ]


def by_numpy(toy: ClickDataset, rows: np.ndarray, cap: int) -> list[list[tuple[int, int]]]:
    """The same from the log: the place of an event in it, and the time since the one before."""
    histories, train, found = toy.histories, toy.requests("train"), []
    for user, prefix in zip(train.user[rows], train.prefix[rows], strict=True):
        first = int(histories.offsets[user])
        time = np.asarray(histories.time[first : first + prefix], np.int64)
        since = np.diff(time, prepend=time[:1])
        found.append([*zip(range(prefix), since.tolist(), strict=True)][-cap:])
    return found


def test_an_event_is_the_same_in_every_request(toy: ClickDataset) -> None:
    rows = rows_of(toy)
    cut = batch_of(toy, rows, max_history=CAP, arrivals=True)
    found = of_each(cut, Arrivals.of(cut))
    assert found == by_numpy(toy, rows, CAP)
    uncut = batch_of(toy, rows, max_history=ALL)
    assert [one[-CAP:] for one in of_each(uncut, Arrivals.of(uncut))] == found
    assert any(since for one in found for _, since in one[:1])  # the first that is visible


def test_without_times_places_count(toy: ClickDataset) -> None:
    """Ages and the age of what was cut off are 0, and so is the time since."""
    batch = batch_of(toy, rows_of(toy), max_history=CAP, arrivals=True)
    zeros = torch.zeros_like(batch.age.values)
    untimed = dataclasses.replace(
        batch, age=batch.age.with_values(zeros), cut_age=torch.zeros(len(batch), dtype=torch.int64)
    )
    assert torch.equal(Arrivals.of(untimed).place, Arrivals.of(batch).place)
    assert not Arrivals.of(untimed).since.any()


def test_nobody_else_pays(toy: ClickDataset) -> None:
    batch = batch_of(toy, rows_of(toy), max_history=CAP)
    assert batch.cut is batch.cut_age is None
    asked = batch_of(toy, rows_of(toy), max_history=CAP, arrivals=True)
    assert len([*tensors_of(asked)]) == len([*tensors_of(batch)]) + 2


def test_cutting_a_batch_is_cutting_its_histories(toy: ClickDataset) -> None:
    rows = np.concatenate([mixed_rows(toy), rows_of(toy)[-20:]])
    whole = batch_of(toy, rows, max_history=2 * CAP, arrivals=True)
    short = batch_of(toy, rows, max_history=CAP, arrivals=True)
    found = cut_histories(whole, np.maximum(whole.events - CAP, 0), whole.events)
    for one, wanted in ((found.cut, short.cut), (found.cut_age, short.cut_age)):
        assert one is not None
        assert wanted is not None
        assert torch.equal(one, wanted)
    assert of_each(found, Arrivals.of(found)) == of_each(short, Arrivals.of(short))
    same = cut_histories(whole, np.zeros_like(whole.events), whole.events)
    assert same.cut is whole.cut


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Arrivals]:
    """What `Arrivals.of` answers from here on."""
    found: list[Arrivals] = []
    of: Callable[..., Arrivals] = Arrivals.of

    def watched(batch: JaggedBatch, **options: torch.Tensor) -> Arrivals:
        found.append(of(batch, **options))
        return found[-1]

    monkeypatch.setattr(Arrivals, "of", watched)
    return found


class Served(NamedTuple):
    """A cache with room for users who have more than `CAP` events; of each the last train request,
    as its row, its time, and with its whole history."""

    server: CachedRanker
    rows: np.ndarray
    users: np.ndarray
    time: np.ndarray
    whole: JaggedBatch

    @classmethod
    def of(cls, toy: ClickDataset, *, told: bool) -> Served:
        """told: the batch says what was cut off, too."""
        train = toy.requests("train")
        last = [np.flatnonzero(train.user == user)[-1] for user in np.unique(train.user)]
        rows = np.array(last)[train.prefix[last] > CAP]
        whole = batch_of(toy, rows, max_history=ALL, arrivals=told)
        model = ranker(toy, "target_attention", event_time="arrival", max_history=CAP)
        server = CachedRanker(model, len(rows), capacity=int(whole.events.max()), page_size=4)
        return cls(server, rows, np.arange(len(rows)), train.time[rows], whole)


@pytest.mark.parametrize("told", [False, True], ids=["plain", "with what was cut off"])
def test_a_cache_tells_events_as_training_does(
    toy: ClickDataset, noted: list[Arrivals], told: bool
) -> None:
    """Also where batches say what was cut off, which the cache has seen: nothing counts twice."""
    server, rows, users, time, whole = Served.of(toy, told=told)
    known = whole.events - CAP
    server.append(cut_histories(whole, np.zeros_like(known), known), users, time)
    server.score(cut_histories(whole, known, whole.events), users, time)
    server.ranker(batch_of(toy, rows, max_history=CAP, arrivals=True))
    *_, served, in_training = noted
    assert torch.equal(served.place, in_training.place)
    assert torch.equal(served.since, in_training.since)


def test_a_history_begun_anew_goes_on_where_it_was_cut(
    toy: ClickDataset, noted: list[Arrivals]
) -> None:
    """As a user is served whose events no longer fit: forgotten, and the newest appended anew."""
    server, rows, users, time, whole = Served.of(toy, told=True)
    server.append(whole, users, time)
    server.forget(users)
    begin, last = whole.events - CAP, whole.events - 1
    server.append(cut_histories(whole, begin, last), users, time)
    kept = noted[-1]
    server.score(cut_histories(whole, last, whole.events), users, time)
    asked = noted[-1]
    server.ranker(batch_of(toy, rows, max_history=CAP, arrivals=True))
    in_training = noted[-1]
    for served, more, wanted in zip(kept, asked, in_training, strict=True):
        found = torch.cat([served.view(-1, CAP - 1), more.view(-1, 1)], 1)
        assert torch.equal(found, wanted.view(-1, CAP))
    server.forget(users)
    server.score(cut_histories(whole, begin, last), users, time, keep=False)
    server.append(batch_of(toy, rows, max_history=CAP), users, time)
    assert noted[-1].place.tolist() == [*range(CAP)] * len(rows)  # of batches that say nothing


def test_what_was_cut_off_reaches_a_captured_ranker(toy: ClickDataset) -> None:
    model = ranker(toy, "transformer", event_time="arrival", max_history=CAP, precision="float32")
    model = model.to(DEVICE)
    batch = batch_of(toy, rows_of(toy)[-9:], max_history=CAP, arrivals=True).to(DEVICE)
    unsaid = dataclasses.replace(batch, cut=None, cut_age=None)
    with torch.no_grad():
        wanted, other = model(batch), model(unsaid)
    torch.testing.assert_close(CapturedRanker(model)(batch), wanted, atol=1e-4, rtol=1e-4)
    assert (wanted - other).abs().max() > 1e-3


@pytest.mark.parametrize("event_time", ["request", "arrival"])
@pytest.mark.parametrize("compile", ["off", "cuda_graphs"])
def test_training_has_it_where_events_are_told_so(
    toy: ClickDataset, event_time: str, compile: str
) -> None:
    config = TrainConfig(
        dim=8, heads=2, hidden=(8,), max_history=CAP, epochs=1, event_time=event_time,
        compile=compile,
    )  # fmt: skip
    run = _Run(config, toy, device=DEVICE, out=None)
    for loader in (run.loader, run.valid_loader):
        for batch in loader.batches():
            assert (batch.cut is not None) == (event_time == "arrival")
    run.go(progress=False, after_step=None, board=None)
    assert len(run.progress.history) == 1


def test_evaluation_has_it(toy: ClickDataset) -> None:
    model = ranker(toy, "target_attention", event_time="arrival", max_history=CAP)
    found = evaluate_model(model, toy, batch_size=10**4, split="train").probability
    every = np.arange(len(toy.requests("train")))
    with torch.no_grad():
        batch = batch_of(toy, every, max_history=CAP, arrivals=True)
        wanted = model(batch)[:, 0].double().sigmoid()
        other = model(dataclasses.replace(batch, cut=None, cut_age=None))[:, 0].double().sigmoid()
    np.testing.assert_allclose(found, wanted.numpy(), rtol=1e-5, atol=1e-6)
    assert np.abs(found - other.numpy()).max() > 1e-3
