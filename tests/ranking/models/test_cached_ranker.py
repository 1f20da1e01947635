"""A ranker that keeps its histories gives the logits of one that encodes them again."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_rankers import batch_of, ranker
from torch import Tensor

from click_data import ClickDataset
from jagged_ranking.cli import main
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.models.cached_ranker import CachedRanker, cut_histories
from jagged_ranking.models.ranker import Ranker

DOCUMENT = Path(__file__).resolve().parents[3] / "docs" / "models.md"
CACHED = ("target_attention", "transformer")
CAPACITY = 20
START = 10**6  # when requests are made; some origin


@pytest.fixture(scope="module")
def batch(toy: ClickDataset) -> JaggedBatch:
    """Requests of different users, with and without a history."""
    train = toy.requests("train")
    newest = np.array([np.flatnonzero(train.user == user)[-1] for user in np.unique(train.user)])
    none = np.flatnonzero(train.prefix == 0)[:1]
    return batch_of(toy, np.concatenate([none, newest[train.prefix[newest] > 3][:4]]))


def made(toy: ClickDataset, model: str, **options) -> Ranker:
    return ranker(toy, model, layers=2, event_time="arrival", max_history=CAPACITY, **options)


def served(model: Ranker, users: int, **options) -> CachedRanker:
    return CachedRanker(model, users, capacity=CAPACITY, page_size=4, **options)


def times(batch: JaggedBatch) -> list[int]:
    return [START + 7 * row for row in range(len(batch))]


def pieces(batch: JaggedBatch, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Begins and ends of what comes in each of four steps, some of it nothing."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.integers(0, batch.events + 1, (3, len(batch))), axis=0)
    edges = [np.zeros_like(batch.events), *cuts, batch.events]
    return list(itertools.pairwise(edges))


@torch.no_grad()
def whole(model: Ranker, batch: JaggedBatch, events: np.ndarray) -> Tensor:
    return model(cut_histories(batch, np.zeros_like(events), events))


def assert_same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("head", ["mlp", "dot"])
@pytest.mark.parametrize("model", CACHED)
def test_logits_are_those_of_the_whole_history(
    toy: ClickDataset, batch: JaggedBatch, model: str, head: str, seed: int
) -> None:
    one = made(toy, model, head=head)
    server, users = served(one, len(batch)), np.arange(len(batch))
    for begin, end in pieces(batch, seed):
        new = cut_histories(batch, begin, end)
        assert_same(server.score(new, users, times(batch)), whole(one, batch, end))
        assert (server.events(users) == end).all()


@pytest.mark.parametrize("model", CACHED)
def test_events_are_kept_or_seen_by_one_request_alone(
    toy: ClickDataset, batch: JaggedBatch, model: str
) -> None:
    one, users = made(toy, model), np.arange(len(batch))
    server = served(one, len(batch))
    (_, first), (_, second), *_ = pieces(batch, 1)
    server.append(cut_histories(batch, np.zeros_like(first), first), users, times(batch))
    before, after = whole(one, batch, first), whole(one, batch, second)
    assert (before != after).any()
    new, nothing = cut_histories(batch, first, second), cut_histories(batch, first, first)
    assert_same(server.score(new, users, times(batch), keep=False), after)
    assert_same(server.score(nothing, users, times(batch)), before)
    assert_same(server.score(new, users, times(batch)), after)
    rest = cut_histories(batch, second, batch.events)
    assert_same(server.score(rest, users, times(batch)), whole(one, batch, batch.events))


def test_the_documented_server_is_one(toy: ClickDataset, batch: JaggedBatch) -> None:
    examples = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [text for text in examples if "CachedRanker" in text]
    namespace: dict[str, Any] = {}
    exec(example, namespace)
    one, half = made(toy, "transformer"), batch.events // 2
    past = cut_histories(batch, np.zeros_like(half), half)
    new = cut_histories(batch, half, batch.events)
    logits = namespace["serve"](one, past, new, times(batch))
    assert_same(logits, whole(one, batch, batch.events))


def test_the_documented_run_is_served_as_it_ranks(
    toy: ClickDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").symlink_to(toy.folder)
    text = DOCUMENT.read_text(encoding="utf-8")
    (command,) = re.findall(r"`jagged (train --data data/mine .*?)`", text)
    assert main([*command.split(), "--epochs", "1", "--dim", "16", "--device", "cpu"]) == 0
    told: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)[:2]:
        exec(code, told)
    assert len(told["batch"]) == 8
    assert_same(told["served"], told["encoded"])


def test_some_of_the_users_in_any_order(toy: ClickDataset, batch: JaggedBatch) -> None:
    """Requests of few of many, whose rows are where the caller put them."""
    one, rng = made(toy, "transformer"), np.random.default_rng(0)
    server, users = served(one, 50), rng.permutation(50)[: len(batch)]
    half = batch.events // 2
    server.append(cut_histories(batch, np.zeros_like(half), half), users, times(batch))
    stranger = np.setdiff1d(np.arange(50), users)
    server.append(batch, stranger[: len(batch)], times(batch))
    rest = cut_histories(batch, half, batch.events)
    assert_same(server.score(rest, users, times(batch)), whole(one, batch, batch.events))
    assert (server.events(stranger[: len(batch)]) == batch.events).all()


def test_who_was_forgotten_begins_anew(toy: ClickDataset, batch: JaggedBatch) -> None:
    one, users = made(toy, "transformer"), np.arange(len(batch))
    server = served(one, len(batch))
    server.append(batch, users, times(batch))
    server.forget(users[::2])
    half = batch.events // 2
    begin = np.where(users % 2, batch.events, 0)
    new = cut_histories(batch, begin, np.where(users % 2, batch.events, half))
    seen = np.where(users % 2, batch.events, half)
    assert_same(server.score(new, users, times(batch)), whole(one, batch, seen))


def test_what_came_before_matters(toy: ClickDataset, batch: JaggedBatch) -> None:
    """Else the comparisons above would say nothing: place, time and label of kept events count."""
    one, users = made(toy, "transformer"), np.arange(len(batch))
    half = batch.events // 2
    new = cut_histories(batch, half, batch.events)
    server = served(one, len(batch))
    alone = server.score(new, users, times(batch), keep=False)
    server.append(cut_histories(batch, np.zeros_like(half), half), users, times(batch))
    later = [time + 10**5 for time in times(batch)]
    at_once = server.score(new, users, times(batch), keep=False)
    asked = torch.from_numpy(batch.events > 1)[batch.request]
    assert (alone != at_once)[asked].all()
    assert (server.score(new, users, later, keep=False) != at_once)[asked].all()


def test_room_is_checked_before_anything_changes(toy: ClickDataset, batch: JaggedBatch) -> None:
    server, users = served(made(toy, "target_attention"), len(batch)), np.arange(len(batch))
    server.append(batch, users, times(batch))
    longest = int(batch.events.argmax())
    while server.events([longest]) + batch.events[longest] <= CAPACITY:
        server.append(batch, users, times(batch))
    before = server.events(users).copy()
    message = rf"user {longest} would have .* room for {CAPACITY}: forget it"
    with pytest.raises(ValueError, match=message):
        server.score(batch, users, times(batch))
    for given, said in (
        (users[:2], "one for each of"),
        ([0] * len(batch), "is there twice"),
        (users + 1, f"room for users 0 to {len(batch) - 1}"),
    ):
        with pytest.raises(ValueError, match=said):
            server.append(cut_histories(batch, batch.events, batch.events), given, times(batch))
    assert (server.events(users) == before).all()


def test_who_cannot_be_served(toy: ClickDataset) -> None:
    hstu = ranker(toy, "hstu", event_time="arrival")
    with pytest.raises(ValueError, match=r"hstu does not .* target_attention and transformer do"):
        served(hstu, 1)
    with pytest.raises(ValueError, match="event_time 'arrival'"):
        served(ranker(toy, "transformer"), 1)
    with pytest.raises(ValueError, match="event_time must be one of request, arrival"):
        ranker(toy, "transformer", event_time="now")


def test_an_encoder_that_answers_with_another_shape_is_one_line(
    toy: ClickDataset, batch: JaggedBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(toy, "target_attention")
    server = served(model, len(batch))
    right = model.encoder.forward
    monkeypatch.setattr(model.encoder, "forward", lambda *a, **options: right(*a, **options)[:1])
    with pytest.raises(ValueError, match="must answer with a tensor"):
        server.score(batch, np.arange(len(batch)), times(batch))


@pytest.mark.parametrize("model", ["target_attention", "transformer", "hstu", "sasrec"])
def test_arrivals_do_not_depend_on_the_request(
    toy: ClickDataset, batch: JaggedBatch, model: str
) -> None:
    later = dataclasses.replace(batch, age=batch.age.with_values(batch.age.values + 10**6))
    told = made(toy, model)
    asked = ranker(toy, model, layers=2, max_history=CAPACITY)
    with torch.no_grad():
        assert_same(told(later), told(batch))
        assert (asked(later) != asked(batch)).any()


def test_memory_is_of_all_users(toy: ClickDataset) -> None:
    one = made(toy, "transformer")
    few, many = served(one, 10), served(one, 20)
    assert len(many) == 20
    assert many.nbytes == 2 * few.nbytes
    keys_and_values = 3 * 2 * CAPACITY * 16 * 4  # attentions, both, events, dim, bytes
    assert 10 * keys_and_values <= few.nbytes < 10 * keys_and_values * 1.1


@pytest.mark.gpu
@pytest.mark.parametrize("model", CACHED)
def test_on_a_gpu(toy: ClickDataset, batch: JaggedBatch, model: str) -> None:
    one = made(toy, model, precision="float32").to("cuda")
    there, users = batch.to("cuda"), np.arange(len(batch)) + 3  # others lie before them
    server = served(one, len(batch) + 3)
    for begin, end in pieces(batch, 0):
        found = server.score(cut_histories(there, begin, end), users, times(batch))
        torch.testing.assert_close(found, whole(one, there, end), atol=1e-3, rtol=1e-3)
