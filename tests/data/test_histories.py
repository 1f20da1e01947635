"""Histories, prefixes, split and vocabularies of random logs against a plain Python loop."""

from collections import Counter
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from click_data.cli import summary
from click_data.errors import DataError
from click_data.events import EventLog, build, signal_column
from click_data.split import SPLITS, split_times

EVENTS = st.lists(
    st.tuples(
        st.integers(0, 4),  # user
        st.integers(0, 6),  # item
        st.integers(0, 12),  # time: few values, many ties
        st.integers(0, 1),  # label
        st.one_of(st.none(), st.sampled_from("abc")),  # category
        st.floats(-5, 5, width=32),  # a signal
    ),
    min_size=6,
    max_size=40,
)
COLUMNS = ("user_id", "item_id", "time", "label", "category", signal_column("price"))
SCHEMA = {
    "user_id": pl.Int64,
    "item_id": pl.Int64,
    "time": pl.Int64,
    "label": pl.Int8,
    "category": pl.String,
    signal_column("price"): pl.Float32,
}


def log_of(rows: list[tuple], *, negatives: int = 0) -> EventLog:
    events = pl.DataFrame(rows, schema=SCHEMA, orient="row")
    return EventLog(name="toy", events=events, signals=("price",), negatives=negatives)


def frequency_ids(values: list) -> dict:
    counts = Counter(values)
    ordered = sorted(counts, key=lambda value: (-counts[value], value))
    return {value: number for number, value in enumerate(ordered, start=1)}


@settings(deadline=None, max_examples=60)
@given(rows=EVENTS, min_history=st.integers(0, 2))
def test_against_a_plain_loop(rows: list[tuple], min_history: int) -> None:
    try:
        prepared = build(log_of(rows), split=(0.6, 0.2, 0.2), min_history=min_history, seed=0)
    except DataError:
        assume(False)
        return
    times = sorted(row[2] for row in rows)
    first_valid, first_test = (times[round(share * len(rows), 6).__int__()] for share in (0.6, 0.8))
    train = [row for row in rows if row[2] < first_valid]
    items = frequency_ids([row[1] for row in train])
    categories = frequency_ids([row[4] for row in train if row[4] is not None])

    histories = prepared.histories.to_pylist()
    users = sorted({row[0] for row in rows})
    assert [history["user_id"] for history in histories] == users
    samples = []
    for index, user in enumerate(users):
        mine = sorted((row for row in rows if row[0] == user), key=lambda row: row[2])
        assert histories[index]["item"] == [items.get(row[1], 0) for row in mine]
        assert histories[index]["category"] == [categories.get(row[4], 0) for row in mine]
        assert histories[index]["time"] == [row[2] for row in mine]
        assert histories[index]["label"] == [row[3] for row in mine]
        assert histories[index]["price"] == [row[5] for row in mine]
        for row in mine:
            earlier = sum(other[2] < row[2] for other in mine)
            period = "train" if row[2] < first_valid else "valid" if row[2] < first_test else "test"
            if earlier >= min_history:
                samples.append(
                    {
                        "user": index,
                        "prefix": earlier,
                        "item": items.get(row[1], 0),
                        "category": categories.get(row[4], 0),
                        "label": row[3],
                        "time": row[2],
                        "split": period,
                    }
                )
    samples.sort(key=lambda sample: (sample["time"], sample["user"]))
    assert prepared.samples.to_pylist() == samples
    counted = prepared.info["counts"]
    for name in SPLITS:
        labels = [sample["label"] for sample in samples if sample["split"] == name]
        assert counted["samples"][name] == len(labels)
        assert counted["positives"][name] == sum(labels)
    assert prepared.info["num_items"] == len(items) + 1 == prepared.items.num_rows
    assert prepared.info["num_categories"] == len(categories) + 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=3, max_size=60))
def test_split_never_cuts_an_instant_and_never_gives_a_period_more_than_asked(
    times: list[int],
) -> None:
    time = np.array(times, np.int64)
    try:
        first_valid, first_test = split_times(time, (0.8, 0.1, 0.1))
    except DataError:
        assume(False)
        return
    assert time.min() < first_valid < first_test <= time.max()
    assert (time < first_valid).sum() <= 0.8 * len(time)
    assert (time < first_test).sum() <= 0.9 * len(time)
    # Not a boundary too early: the events of the boundary's own instant fill the share.
    assert (time <= first_valid).sum() > 0.8 * len(time) - 1e-6
    assert (time <= first_test).sum() > 0.9 * len(time) - 1e-6


def test_split_of_distinct_times_is_exact() -> None:
    # 0.8 + 0.1 is below 0.9 in floating point; no event may be lost to that.
    assert split_times(np.arange(1000, dtype=np.int64), (0.8, 0.1, 0.1)) == (800, 900)


@pytest.mark.parametrize(
    "split", [(0.8, 0.2), (0.8, 0.1, 0.2), (0.0, 0.5, 0.5), (1.2, -0.1, -0.1), (float("nan"),) * 3]
)
def test_bad_fractions(split: tuple[float, ...]) -> None:
    with pytest.raises(DataError, match="split"):
        split_times(np.arange(100, dtype=np.int64), split)


def test_one_instant_cannot_be_split() -> None:
    with pytest.raises(DataError, match="training period is empty"):
        split_times(np.full(100, 7, np.int64), (0.8, 0.1, 0.1))


def test_one_class_in_training_is_refused() -> None:
    rows = [(0, 0, time, 0 if time < 8 else 1, None, 0.0) for time in range(10)]
    with pytest.raises(DataError, match="every label in the training period is 0"):
        build(log_of(rows), split=(0.8, 0.1, 0.1), min_history=0, seed=0)


def test_negatives_are_items_the_user_never_touches_and_in_no_history() -> None:
    rng = np.random.default_rng(0)
    pairs = sorted({(int(rng.integers(20)), int(rng.integers(30))) for _ in range(300)})
    times = rng.permutation(len(pairs))
    rows = [(u, i, int(t), 1, None, 0.0) for (u, i), t in zip(pairs, times, strict=True)]
    log = log_of(rows, negatives=3)
    prepared = build(log, split=(0.6, 0.2, 0.2), min_history=0, seed=0)
    item_ids = prepared.items["item_id"].to_pylist()
    touched = {(u, i) for u, i, *_ in rows}
    samples = prepared.samples.to_pylist()
    negatives = [sample for sample in samples if sample["label"] == 0]
    assert len(negatives) == 3 * (len(samples) - len(negatives))
    assert all((s["user"], item_ids[s["item"]]) not in touched for s in negatives)
    assert all(s["item"] > 0 for s in negatives)
    # Each follows its positive and may see exactly what that may see.
    for start in range(0, len(samples), 4):
        positive, *drawn = samples[start : start + 4]
        assert [s["label"] for s in (positive, *drawn)] == [1, 0, 0, 0]
        for sample in drawn:
            same = ("user", "prefix", "time", "split")
            assert [sample[key] for key in same] == [positive[key] for key in same]
    assert prepared.histories["label"].combine_chunks().values.to_pylist() == [1] * len(rows)
    assert len({s["item"] for s in negatives}) == len(item_ids) - 1  # uniform: all come up
    again = build(log, split=(0.6, 0.2, 0.2), min_history=0, seed=0)
    other = build(log, split=(0.6, 0.2, 0.2), min_history=0, seed=1)
    assert again.samples == prepared.samples != other.samples


def test_unknown_items_are_no_samples_where_negatives_are_drawn() -> None:
    """Draws are never of item 0, so a positive (or a logged 0) of item 0 would give itself away."""
    rows = [(t % 3, t % 12, t, int(t % 4 > 0), None, 0.0) for t in range(60)]
    late = {64: 1, 70: 0, 75: 1}  # in valid, and two in test
    rows += [(t % 3, t if t in late else t % 12, t, late.get(t, 1), None, 0.0)
             for t in range(60, 80)]  # fmt: skip
    options: dict = {"split": (0.75, 0.125, 0.125), "min_history": 0, "seed": 0}
    prepared = build(log_of(rows, negatives=1), **options)
    samples = prepared.samples.to_pylist()
    assert all(sample["item"] > 0 for sample in samples)
    asked = {sample["time"] for sample in samples if sample["label"] == 1}
    assert asked == {row[2] for row in rows if row[3] == 1} - set(late)
    histories = prepared.histories["item"].combine_chunks().values.to_pylist()
    assert histories.count(0) == len(late)
    assert prepared.info["unknown_left_out"] == {"train": 0.0, "valid": 0.1, "test": 0.2}
    shown = summary({"name": "toy", **prepared.info}, Path("out"))
    assert "not seen in training: train 0.0%, valid 10.0%, test 20.0% of the events" in shown
    # A log with labels of its own keeps them: both labels may be of unknown items.
    labelled = build(log_of(rows), **options)
    assert {sample["time"] for sample in labelled.samples.to_pylist()} == {row[2] for row in rows}
    assert "unknown_left_out" not in labelled.info
    assert "left out" not in summary({"name": "toy", **labelled.info}, Path("out"))


def test_a_test_period_of_unknown_items_alone_is_refused() -> None:
    rows = [(t % 3, t % 12 if t < 90 else t, t, 1, None, 0.0) for t in range(100)]
    with pytest.raises(DataError, match=r"no samples in the test period: .* left out"):
        build(log_of(rows, negatives=1), split=(0.8, 0.1, 0.1), min_history=0, seed=0)


def test_negatives_carry_their_own_items_category() -> None:
    rows = [(u, i, 20 * u + i, 1, "abc"[i % 3], 0.0) for u in range(6) for i in range(u, 12, 2)]
    prepared = build(log_of(rows, negatives=2), split=(0.6, 0.2, 0.2), min_history=0, seed=0)
    category = prepared.items["category"].to_pylist()
    drawn = [sample for sample in prepared.samples.to_pylist() if sample["label"] == 0]
    assert drawn
    assert all(sample["category"] == category[sample["item"]] for sample in drawn)


def test_a_user_who_touches_every_item_gets_no_negatives() -> None:
    everything = [(0, item, item, 1, None, 0.0) for item in range(10)]
    rows = [*everything, *((1, 0, time, 1, None, 0.0) for time in range(10))]
    prepared = build(log_of(rows, negatives=1), split=(0.6, 0.2, 0.2), min_history=0, seed=0)
    negatives = [sample for sample in prepared.samples.to_pylist() if sample["label"] == 0]
    assert {sample["user"] for sample in negatives} == {1}
    assert len(negatives) == 10
