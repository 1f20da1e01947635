"""Prefix slices and batches against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from click_data import ClickDataset
from jagged_ranking.data.batch import (
    HistoryStore,
    JaggedBatch,
    SampleLoader,
    SampleTable,
    make_batch,
)

HISTORY_FIELDS = ("item", "category", "label", "age", "recency", "signals")


@st.composite
def stores(draw: st.DrawFn) -> tuple[HistoryStore, SampleTable, int]:
    """A random store (empty users too), samples of it, and a cap."""
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tokens = sum(lengths)
    store = HistoryStore(
        offsets=torch.tensor([0, *np.cumsum(lengths)]),
        item=torch.from_numpy(rng.integers(0, 50, tokens, np.int32)),
        category=torch.from_numpy(rng.integers(0, 5, tokens, np.int32)),
        label=torch.from_numpy(rng.integers(0, 2, tokens, np.int32)),
        time=torch.from_numpy(rng.integers(0, 10**9, tokens)),
        signals=torch.from_numpy(rng.normal(size=(tokens, 2)).astype(np.float32)),
    )
    size = draw(st.integers(0, 12))
    user = rng.integers(0, len(lengths), size, np.int32)
    prefix = np.array([rng.integers(0, lengths[u] + 1) for u in user], np.int32)
    samples = SampleTable(
        user=torch.from_numpy(user),
        prefix=torch.from_numpy(prefix),
        item=torch.from_numpy(rng.integers(0, 50, size, np.int32)),
        category=torch.from_numpy(rng.integers(0, 5, size, np.int32)),
        label=torch.from_numpy(rng.integers(0, 2, size).astype(np.float32)),
        time=torch.from_numpy(rng.integers(10**9, 2 * 10**9, size)),
        host_prefix=prefix.astype(np.int64),
    )
    return store, samples, draw(st.integers(1, 12))


def naive(store: HistoryStore, samples: SampleTable, row: int, cap: int) -> dict[str, list]:
    """The history of one sample, event by event."""
    user, prefix = int(samples.user[row]), int(samples.prefix[row])
    first = int(store.offsets[user])
    events = list(range(first, first + prefix))[-cap:]
    now = int(samples.time[row])
    return {
        "item": [int(store.item[e]) for e in events],
        "category": [int(store.category[e]) for e in events],
        "label": [int(store.label[e]) for e in events],
        "age": [now - int(store.time[e]) for e in events],
        "recency": [len(events) - 1 - i for i in range(len(events))],
        "signals": [store.signals[e].tolist() for e in events],
    }


def rows_of(batch: JaggedBatch, name: str) -> list[list]:
    return [part.tolist() for part in getattr(batch, name).unbind()]


@settings(max_examples=100, deadline=None)
@given(stores(), st.randoms(use_true_random=False))
def test_batches_are_the_naive_slices(case, random) -> None:
    store, samples, cap = case
    index = np.array([random.randrange(len(samples)) for _ in range(len(samples))], np.int64)
    batch = make_batch(store, samples, index, max_history=cap)
    expected = [naive(store, samples, int(row), cap) for row in index]
    for name in HISTORY_FIELDS:
        assert rows_of(batch, name) == [e[name] for e in expected], name
        assert getattr(batch, name).offsets is batch.offsets
    for name, source in (
        ("target_item", "item"),
        ("target_category", "category"),
        ("target", "label"),
        ("user", "user"),
    ):
        assert getattr(batch, name).tolist() == getattr(samples, source)[index].tolist()
    assert batch.index.tolist() == index.tolist()
    assert len(batch) == len(index)


@settings(max_examples=50, deadline=None)
@given(stores())
def test_prefix_index_finds_its_own_total(case) -> None:
    store, samples, cap = case
    found, offsets = store.prefix_index(samples.user, samples.prefix, max_history=cap)
    total = int(samples.prefix.clamp(max=cap).sum())
    given_total, same = store.prefix_index(
        samples.user, samples.prefix, max_history=cap, total=total
    )
    assert torch.equal(found, given_total)
    assert torch.equal(offsets, same)
    assert len(found) == int(offsets[-1]) == total


def test_a_history_is_strictly_earlier_than_its_sample(toy: ClickDataset) -> None:
    store = HistoryStore.from_dataset(toy)
    empty = 0
    for split in ("train", "valid", "test"):
        samples = SampleTable.from_columns(toy.samples(split))
        batch = make_batch(store, samples, np.arange(len(samples)), max_history=1000)
        assert (batch.age.values > 0).all()
        # and nothing strictly earlier is left out
        columns = toy.samples(split)
        histories = toy.histories
        for row in range(0, len(samples), 17):
            user = columns.user[row]
            times = histories.time[histories.offsets[user] : histories.offsets[user + 1]]
            assert batch.item.lengths[row] == (times < columns.time[row]).sum()
        empty += int((batch.item.lengths == 0).sum())
    assert empty > 0  # first events exist, and are no special case


def test_signals_keep_their_names_and_values(toy: ClickDataset) -> None:
    store = HistoryStore.from_dataset(toy)
    assert store.signal_names == ("rating",)
    assert store.signals[:, 0].tolist() == toy.histories.signals["rating"].tolist()
    assert ((store.signals[:, 0] >= 4) == (store.label == 1)).all()


def test_loader_order(toy: ClickDataset) -> None:
    store = HistoryStore.from_dataset(toy)
    samples = SampleTable.from_columns(toy.samples("train"))

    def loader(**options) -> SampleLoader:
        return SampleLoader(store, samples, batch_size=100, max_history=5, **options)

    def order(batches) -> list[int]:
        return torch.cat([b.index for b in batches]).tolist()

    plain = loader()
    assert order(plain.batches()) == list(range(len(samples)))
    assert len(list(plain.batches())) == len(plain) == -(-len(samples) // 100)
    shuffled = loader(shuffle=True, seed=3)
    first = order(shuffled.batches(0))
    assert sorted(first) == list(range(len(samples)))
    assert first != list(range(len(samples)))
    assert first == order(loader(shuffle=True, seed=3).batches(0))
    assert first != order(shuffled.batches(1))
    assert first != order(loader(shuffle=True, seed=4).batches(0))
    assert order(shuffled.batches(0, start=3)) == first[300:]


def test_batch_moves_whole(toy: ClickDataset) -> None:
    store = HistoryStore.from_dataset(toy)
    samples = SampleTable.from_columns(toy.samples("valid"))
    batch = make_batch(store, samples, np.arange(7), max_history=5)
    moved = batch.to("meta")
    assert moved.offsets.device.type == "meta"
    for name in HISTORY_FIELDS:
        assert getattr(moved, name).values.device.type == "meta"
        assert getattr(moved, name).offsets is moved.offsets
    assert moved.target.device.type == "meta"


def test_loader_arguments(toy: ClickDataset) -> None:
    store = HistoryStore.from_dataset(toy)
    samples = SampleTable.from_columns(toy.samples("valid"))
    with pytest.raises(ValueError, match="at least 1, got 0, 5"):
        SampleLoader(store, samples, batch_size=0, max_history=5)
