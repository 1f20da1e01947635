"""Prefix slices, candidates and batches against plain loops."""

from __future__ import annotations

import gc
import weakref
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from click_data import ClickDataset, open_dataset
from jagged_kernels import JaggedTensor
from jagged_ranking.data import loader as loader_module
from jagged_ranking.data.batch import JaggedBatch, RequestTable, make_batch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.loader import RequestLoader
from jagged_ranking.data.store import HistoryStore, ItemTable

HISTORY_FIELDS = ("item", "categories", "item_dense", "age", "recency", "signals")
CANDIDATE_FIELDS = ("candidate", "candidate_categories", "candidate_dense", "features", "label")
ITEMS = 7  # so few that candidates often are in the history


@st.composite
def stores(draw: st.DrawFn) -> tuple[HistoryStore, RequestTable, int]:
    """A random store (empty users too), requests of it (without candidates too), and a cap."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tokens = sum(lengths)
    timed = draw(st.booleans())
    store = HistoryStore(
        offsets=torch.tensor([0, *np.cumsum(lengths)]),
        item=torch.from_numpy(rng.integers(0, ITEMS, tokens, np.int32)),
        time=torch.from_numpy(rng.integers(0, 10**9, tokens)) if timed else None,
        signals=torch.from_numpy(rng.normal(size=(tokens, 2)).astype(np.float32)),
        items=ItemTable(
            categories=torch.from_numpy(rng.integers(0, 5, (ITEMS, 2), np.int32)),
            dense=torch.from_numpy(rng.normal(size=(ITEMS, 1)).astype(np.float32)),
        ),
    )
    size = draw(st.integers(0, 12))
    user = rng.integers(0, len(lengths), size, np.int32)
    prefix = np.array([rng.integers(0, lengths[u] + 1) for u in user], np.int32)
    offsets = np.concatenate([[0], np.cumsum(rng.integers(0, 4, size))])
    candidates = int(offsets[-1])
    requests = RequestTable(
        user=torch.from_numpy(user),
        prefix=torch.from_numpy(prefix),
        time=torch.from_numpy(rng.integers(10**9, 2 * 10**9, size)),
        offsets=torch.from_numpy(offsets),
        item=torch.from_numpy(rng.integers(0, ITEMS, candidates, np.int32)),
        label=torch.from_numpy(rng.integers(0, 2, (candidates, 2)).astype(np.float32)),
        features=torch.from_numpy(rng.normal(size=(candidates, 3)).astype(np.float32)),
        context=torch.from_numpy(rng.integers(0, 5, (size, 1), np.int32)),
        context_dense=torch.from_numpy(rng.normal(size=(size, 2)).astype(np.float32)),
        host_prefix=prefix.astype(np.int64),
        host_offsets=offsets,
    )
    return store, requests, draw(st.integers(1, 12))


def naive_history(store: HistoryStore, requests: RequestTable, row: int, cap: int) -> dict:
    """The history of one request, event by event."""
    user, prefix = int(requests.user[row]), int(requests.prefix[row])
    first = int(store.offsets[user])
    events = list(range(first, first + prefix))[-cap:]
    items = [int(store.item[e]) for e in events]
    now = int(requests.time[row])
    return {
        "item": items,
        "categories": [store.items.categories[i].tolist() for i in items],
        "item_dense": [store.items.dense[i].tolist() for i in items],
        "age": [0 if store.time is None else now - int(store.time[e]) for e in events],
        "recency": [len(events) - 1 - i for i in range(len(events))],
        "signals": [store.signals[e].tolist() for e in events],
    }


def naive_candidates(
    store: HistoryStore, requests: RequestTable, row: int, history: list[int]
) -> dict:
    """The candidates of one request, one by one."""
    shown = range(int(requests.offsets[row]), int(requests.offsets[row + 1]))
    items = [int(requests.item[c]) for c in shown]
    features = []
    for candidate, item in zip(shown, items, strict=True):
        places = [place for place, seen in enumerate(history) if seen == item]
        recency = 1 / (len(history) - places[-1]) if places else 0.0
        met = [float(np.log1p(np.float32(len(places)))), float(bool(places)), recency]
        features.append(requests.features[candidate].tolist() + met)
    return {
        "candidate": items,
        "candidate_categories": [store.items.categories[i].tolist() for i in items],
        "candidate_dense": [store.items.dense[i].tolist() for i in items],
        "features": features,
        "label": [requests.label[c].tolist() for c in shown],
    }


def rows_of(batch: JaggedBatch, name: str) -> list[list]:
    return [part.tolist() for part in getattr(batch, name).unbind()]


@settings(max_examples=100, deadline=None)
@given(stores(), st.randoms(use_true_random=False))
def test_batches_are_the_naive_slices(case, random) -> None:
    store, requests, cap = case
    index = np.array([random.randrange(len(requests)) for _ in range(len(requests))], np.int64)
    batch = make_batch(store, requests, index, max_history=cap, arrivals=True)
    histories = [naive_history(store, requests, int(row), cap) for row in index]
    for name in HISTORY_FIELDS:
        assert rows_of(batch, name) == [h[name] for h in histories], name
        assert getattr(batch, name).offsets is batch.offsets
    candidates = [
        naive_candidates(store, requests, int(row), history["item"])
        for row, history in zip(index, histories, strict=True)
    ]
    for name in CANDIDATE_FIELDS:
        found, expected = rows_of(batch, name), [c[name] for c in candidates]
        if name == "features":
            assert [len(row) for row in found] == [len(row) for row in expected]
            flat = [one for row in expected for one in row]
            assert [one for row in found for one in row] == [pytest.approx(e) for e in flat]
        else:
            assert found == expected, name
        assert getattr(batch, name).offsets is batch.candidate.offsets
    asked = [len(c["candidate"]) for c in candidates]
    assert batch.request.tolist() == np.repeat(np.arange(len(index)), asked).tolist()
    assert batch.user.tolist() == requests.user[index].tolist()
    assert batch.context.tolist() == requests.context[index].tolist()
    assert batch.context_dense.tolist() == requests.context_dense[index].tolist()
    rows = [c for row in index for c in range(*requests.offsets[row : row + 2].tolist())]
    assert batch.index.tolist() == rows
    assert batch.pairs == sum(len(h["item"]) * n for h, n in zip(histories, asked, strict=True))
    events = [len(h["item"]) for h in histories]
    assert (batch.events.tolist(), batch.asked.tolist()) == (events, list(asked))
    assert batch.longest == (max(asked, default=0), max(events, default=0))
    assert batch.latest(3) == sum(min(n, 3) for n in events)
    assert batch.latest(3, each_candidate=True) == sum(
        min(n, 3) * m for n, m in zip(events, asked, strict=True)
    )
    assert len(batch) == len(index)
    befores = [naive_history(store, requests, int(row), 10**6)["age"][:-cap] for row in index]
    assert batch.cut is not None
    assert batch.cut_age is not None
    assert batch.cut.tolist() == [len(before) for before in befores]
    assert batch.cut_age.tolist() == [before[-1] if before else 0 for before in befores]
    assert batch.cut.dtype == batch.cut_age.dtype == torch.int64


@settings(max_examples=50, deadline=None)
@given(stores())
def test_prefix_index_finds_its_own_total(case) -> None:
    store, requests, cap = case
    found, offsets = store.prefix_index(requests.user, requests.prefix, max_history=cap)
    total = int(requests.prefix.clamp(max=cap).sum())
    given_total, same = store.prefix_index(
        requests.user, requests.prefix, max_history=cap, total=total
    )
    assert torch.equal(found, given_total)
    assert torch.equal(offsets, same)
    assert len(found) == int(offsets[-1]) == total


def test_a_history_is_strictly_earlier_than_its_request(toy: ClickDataset) -> None:
    store = HistoryStore.from_dataset(toy)
    empty = 0
    for split in ("train", "valid", "test"):
        columns = toy.requests(split)
        requests = RequestTable.from_columns(columns)
        batch = make_batch(store, requests, np.arange(len(requests)), max_history=1000)
        assert (batch.age.values > 0).all()
        # and nothing strictly earlier is left out
        histories = toy.histories
        for row in range(0, len(requests), 17):
            user = columns.user[row]
            times = histories.time[histories.offsets[user] : histories.offsets[user + 1]]
            assert batch.item.lengths[row] == (times < columns.time[row]).sum()
        empty += int((batch.item.lengths == 0).sum())
    assert empty > 0  # first events exist, and are no special case


def test_what_the_data_set_has_arrives_in_its_order(toy: ClickDataset) -> None:
    store = HistoryStore.from_dataset(toy)
    names, every = list(toy.histories.signals), torch.arange(len(store.item))
    assert set(names) == {"label", "rating"}
    for position, name in enumerate(names):
        assert store.signals[every][:, position].tolist() == toy.histories.signals[name].tolist()
    columns = toy.requests("test")
    requests = RequestTable.from_columns(columns)
    every = torch.arange(len(requests.item))
    for position, values in enumerate(columns.features.values()):
        assert requests.features[every][:, position].tolist() == values.tolist()
    assert requests.label[every][:, 0].tolist() == columns.labels["label"].tolist()


def test_loader_order(toy: ClickDataset) -> None:
    store = HistoryStore.from_dataset(toy)
    requests = RequestTable.from_columns(toy.requests("train"))

    def loader(**options) -> RequestLoader:
        return RequestLoader(store, requests, batch_size=100, max_history=5, **options)

    def order(batches) -> list[int]:
        return torch.cat([b.index for b in batches]).tolist()

    def rows(loader: RequestLoader, epoch: int) -> list[int]:
        return loader.order(epoch).tolist()

    plain = loader()
    assert order(plain.batches()) == list(range(len(requests.item)))
    assert len(list(plain.batches())) == -(-len(requests) // 100)
    shuffled = loader(shuffle=True, seed=3)
    first = order(shuffled.batches(0))
    assert sorted(first) == list(range(len(requests.item)))
    assert first != sorted(first)
    assert first == order(loader(shuffle=True, seed=3).batches(0))
    assert rows(shuffled, 0) != rows(shuffled, 1) != rows(loader(shuffle=True, seed=4), 0)
    generator = np.random.default_rng((3, 1))
    assert rows(shuffled, 1) == generator.permutation(len(requests)).tolist()
    assert shuffled.order(1).dtype == np.int32
    rest = order(shuffled.batches(0, start=3))
    assert rest == first[-len(rest) :]
    assert len(list(shuffled.batches(0, start=3))) == len(list(shuffled.batches(0))) - 3


@pytest.mark.parametrize("tokens", [1, 40, 700, 10**9])
def test_batches_of_about_so_many_tokens(
    toy: ClickDataset, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "PIECE", 61)
    store = HistoryStore.from_dataset(toy)
    requests = RequestTable.from_columns(toy.requests("train"))
    loader = RequestLoader(
        store, requests, batch_size=1, batch_tokens=tokens, max_history=9, shuffle=True, seed=5
    )
    # the same by a loop: a request goes to the batch that its first token lies in
    wanted: dict[int, list[int]] = {}
    before = 0
    for row in loader.order(2):
        wanted.setdefault(before // tokens, []).append(int(row))
        asked = requests.host_offsets[row + 1] - requests.host_offsets[row]
        before += min(int(requests.host_prefix[row]), 9) + int(asked)
    cuts = loader.cuts(loader.order(2))
    assert cuts[0] == 0
    assert np.diff(cuts).tolist() == [len(rows) for rows in wanted.values()]
    largest = max(min(9, int(requests.host_prefix.max())) + 20, 1)
    made = []
    for rows, batch in zip(wanted.values(), loader.batches(2), strict=False):
        assert batch.user.tolist() == requests.user[rows].tolist()
        made.append(batch.index.tolist())
        assert len(batch.item.values) + len(batch.candidate.values) < tokens + largest
        if len(made) == 12:
            break
    rest = [batch.index.tolist() for batch, _ in zip(loader.batches(2, start=3), range(9))]  # noqa: B905
    assert rest == made[3:]


def test_batch_moves_whole(toy: ClickDataset) -> None:
    store = HistoryStore.from_dataset(toy)
    requests = RequestTable.from_columns(toy.requests("valid"))
    batch = make_batch(store, requests, np.arange(7), max_history=5, arrivals=True)
    moved = batch.to("meta")
    for spec in fields(JaggedBatch):
        value = getattr(moved, spec.name)
        if isinstance(value, JaggedTensor):
            assert value.values.device.type == value.offsets.device.type == "meta", spec.name
        elif isinstance(value, ItemTable):
            assert value.categories.device.type == value.dense.device.type == "meta"
        elif isinstance(value, torch.Tensor):
            assert value.device.type == "meta", spec.name
    for names in (HISTORY_FIELDS, CANDIDATE_FIELDS):
        assert len({id(getattr(moved, name).offsets) for name in names}) == 1
    assert moved.pairs == batch.pairs


def test_loader_arguments(toy: ClickDataset) -> None:
    store = HistoryStore.from_dataset(toy)
    requests = RequestTable.from_columns(toy.requests("valid"))
    with pytest.raises(ValueError, match="at least 1, got 0, 5"):
        RequestLoader(store, requests, batch_size=0, max_history=5)
    with pytest.raises(ValueError, match="batch_tokens must not be negative, got -1"):
        RequestLoader(store, requests, batch_size=1, batch_tokens=-1, max_history=5)


def test_a_data_set_is_copied_and_measured_once(
    toy: ClickDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, shape = HistoryStore.from_dataset(toy), DataShape.of(toy)
    monkeypatch.setattr(HistoryStore, "__init__", lambda *given, **named: pytest.fail("copied"))
    assert HistoryStore.from_dataset(toy, torch.device("cpu")) is store
    assert DataShape.of(toy) is shape


def test_what_was_built_of_a_data_set_goes_with_it(toy: ClickDataset) -> None:
    again = open_dataset(toy.folder)
    store = weakref.ref(HistoryStore.from_dataset(again))
    assert store() is not None
    assert store() is not HistoryStore.from_dataset(toy)
    del again
    gc.collect()
    assert store() is None
