"""Histories, requests, split and items of random logs against a plain Python loop."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from toy_logs import frequent, requests_of, toy_log

from click_data.errors import DataError
from click_data.events import build
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


@settings(deadline=None, max_examples=60)
@given(rows=EVENTS, min_history=st.integers(0, 2))
def test_against_a_plain_loop(rows: list[tuple], min_history: int) -> None:
    try:
        prepared = build(toy_log(rows), split=(0.6, 0.2, 0.2), min_history=min_history, seed=0)
    except DataError:
        assume(False)
        return
    times = sorted(row[2] for row in rows)
    first_valid, first_test = (times[round(share * len(rows), 6).__int__()] for share in (0.6, 0.8))
    train = [row for row in rows if row[2] < first_valid]
    known = frequent([row[1] for row in train])
    order = [None, *known, *sorted({row[1] for row in rows} - set(known))]

    histories = prepared.histories.to_pylist()
    users = sorted({row[0] for row in rows})
    assert [history["user_id"] for history in histories] == users
    expected = []
    for index, user in enumerate(users):
        mine = sorted((row for row in rows if row[0] == user), key=lambda row: row[2])
        assert histories[index]["item"] == [order.index(row[1]) for row in mine]
        assert histories[index]["time"] == [row[2] for row in mine]
        assert histories[index]["price"] == [row[5] for row in mine]
        assert histories[index]["label"] == [row[3] for row in mine]
        for time in sorted({row[2] for row in mine}):
            asked = [row for row in mine if row[2] == time]
            earlier = sum(other[2] < time for other in mine)
            split = "train" if time < first_valid else "valid" if time < first_test else "test"
            if earlier >= min_history:
                expected.append(
                    {
                        "user": index,
                        "prefix": earlier,
                        "time": time,
                        "split": split,
                        "item": [order.index(row[1]) for row in asked],
                        "label label": [row[3] for row in asked],
                    }
                )
    expected.sort(key=lambda request: (request["time"], request["user"]))
    requests = prepared.requests.to_pylist()
    assert [{key: row[key] for key in expected[0]} for row in requests] == expected
    counted = prepared.info["counts"]
    for name in SPLITS:
        mine = [request for request in expected if request["split"] == name]
        shown = [item for request in mine for item in request["item"]]
        assert counted["requests"][name] == len(mine)
        assert counted["candidates"][name] == len(shown)
        assert counted["positives"][name] == sum(sum(request["label label"]) for request in mine)
        new = sum(item > len(known) for item in shown) / len(shown)
        assert counted["new_items"][name] == pytest.approx(new, abs=1e-6)

    items = prepared.items.to_pylist()
    assert [item["item_id"] for item in items] == order
    assert prepared.info["num_items"] == len(known) + 1
    assert prepared.info["item_rows"] == len(items)
    said: dict[int, list[str]] = defaultdict(list)
    in_order = sorted((row[0], row[2], n) for n, row in enumerate(rows))
    for _, _, n in sorted(in_order, key=lambda key: key[1]):
        if rows[n][4] is not None:
            said[rows[n][1]].append(rows[n][4])
    own = {item: said[item][0] if said[item] else None for item in order[1:]}
    codes = [None, *frequent([own[row[1]] for row in train if own[row[1]] is not None])]
    assert prepared.info["item_features"] == {"category": len(codes)}
    for item in items[1:]:
        value = own[item["item_id"]]
        assert item["original category"] == value
        assert item["category"] == (codes.index(value) if value in codes else 0)
        assert item["train_count"] == sum(row[1] == item["item_id"] for row in train)
    assert [items[0][name] for name in ("train_count", "category")] == [0, 0]


def test_an_items_category_is_one_even_where_events_differ() -> None:
    rows = [(t % 3, t % 5, t, t % 2, "abc"[t % 3] if t > 4 else None, 0.0) for t in range(60)]
    prepared = build(toy_log(rows), split=(0.6, 0.2, 0.2), min_history=0, seed=0)
    said = {row["item_id"]: row["original category"] for row in prepared.items.to_pylist()}
    assert said == {None: None, **{t % 5: "abc"[t % 3] for t in range(5, 10)}}


def test_contexts_of_events_are_those_of_their_requests() -> None:
    # Two events an instant, of which the first says what the request is about.
    rows = [(t % 3, t % 5, t // 6, t % 2, None, 0.0) for t in range(120)]
    log = toy_log(rows)
    said = pl.Series("context tab", [f"{t}"[-1] for t in range(120)])
    hour = pl.Series("context hour", [float(t) for t in range(120)], pl.Float32)
    log = replace(log, events=log.events.with_columns(said, hour))
    prepared = build(log, split=(0.6, 0.2, 0.2), min_history=0, seed=0)
    assert prepared.info["context"] == {"tab": 11, "hour": None}
    codes: dict[int, set[str]] = {}
    for request in requests_of(prepared):
        whose = (request["user"], request["time"])
        first = next(n for n, row in enumerate(rows) if (row[0], row[2]) == whose)
        assert request["context hour"] == first
        codes.setdefault(request["context tab"], set()).add(said[first])
    assert sorted(codes) == [*range(1, len(codes) + 1)]
    assert all(len(values) == 1 for values in codes.values())


def test_labels_are_signals_unless_all_are_the_same() -> None:
    rows = [(t % 3, t % 5, t, 1, None, float(t)) for t in range(60)]
    split = (0.6, 0.2, 0.2)
    prepared = build(toy_log(rows, negatives=1), split=split, min_history=0, seed=0)
    assert prepared.info["signals"] == ["price"]
    rows[7] = (*rows[7][:3], 0, *rows[7][4:])
    prepared = build(toy_log(rows, negatives=1), split=split, min_history=0, seed=0)
    assert prepared.info["signals"] == ["label", "price"]
    assert prepared.histories.schema.field("label").type.value_type == "float"


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
        build(toy_log(rows), split=(0.8, 0.1, 0.1), min_history=0, seed=0)
