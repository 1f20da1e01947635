"""Popularity, trend and age of candidates against plain loops; nothing later is in them."""

import math

import numpy as np
import pytest
from toy_logs import clicks, requests_of, toy_log

from click_data import candidate_features
from click_data.events import build

SPLIT = (0.6, 0.2, 0.2)
FEATURES = ("popularity", "trend", "age")


def naive(rows: list[tuple], item: int, as_of: int, window: int) -> list[float]:
    """The features of one item as of a time, of clicks (user, item, time, ...)."""
    earlier = sorted((row for row in rows if row[2] < as_of), key=lambda row: (row[2], row[0]))
    mine = [row for row in earlier if row[1] == item]
    recent = [row for row in earlier[-window:] if row[1] == item]
    age = as_of - min(row[2] for row in mine) if mine else 0
    return [math.log1p(len(mine)), math.log1p(len(recent)), math.log1p(age)]


def random_rows(seed: int, number: int = 60) -> list[tuple]:
    """Several events of one user at one time are of different items: their order is theirs."""
    rng = np.random.default_rng(seed)
    return sorted(
        {(int(rng.integers(5)), int(rng.integers(8)), int(rng.integers(40))) for _ in range(number)}
    )


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("drawn", [False, True])
def test_against_a_plain_loop(seed: int, drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidate_features, "_RECENT", 7)
    rows = random_rows(seed)
    if drawn:
        log = clicks(rows, negatives=1, pool=8)
    else:
        log = toy_log([(*row, n % 2, None, 0.0) for n, row in enumerate(rows)])
    prepared = build(log, split=SPLIT, min_history=0, seed=seed)
    times = sorted(row[2] for row in rows)
    starts = {times[0], *prepared.info["split_times"].values()}
    count = 0
    for time in times:  # where blocks begin: 8 events behind the last start, at a new instant
        of_split = max(start for start in starts if start <= time)
        inside = [t for t in times if of_split <= t < time]
        end = min([s for s in prepared.info["split_times"].values() if s > time], default=10**9)
        left = [t for t in times if time <= t < end]
        if drawn and len(inside) >= 8 and len(left) >= 8:
            starts.add(time)
    for request in requests_of(prepared):
        time = request["time"]
        as_of = max(start for start in starts if start <= time) if drawn else time
        for n, item in enumerate(request["item"]):
            expected = naive(rows, item, as_of, 7)
            made = [request[f"feature {name}"][n] for name in FEATURES]
            assert made == pytest.approx(expected, rel=1e-6)
            count += 1
    assert count == sum(prepared.info["counts"]["candidates"].values()) >= len(rows)


def test_the_window_of_a_trend_grows_with_the_log() -> None:
    rows = [(t % 9, t % 2 if t < 150_000 else 0, t) for t in range(200_000)]
    log = toy_log([(*row, row[2] // 2 % 2, None, 0.0) for row in rows])
    prepared = build(log, split=SPLIT, min_history=0, seed=0)
    asked = prepared.requests.slice(150_500, 1).to_pylist()[0]
    assert asked["time"] == 150_500
    # Of the 2,000 before, 500 are of item 0 alone, and of the others it has half.
    assert asked["feature trend"] == [pytest.approx(math.log1p(500 + 750))]


@pytest.mark.parametrize("drawn", [False, True])
def test_what_comes_later_changes_nothing(drawn: bool) -> None:
    rows: list[tuple] = [(*r, n % 2, None, 0.0) for n, r in enumerate(random_rows(3, 120))]
    changed = [row if row[2] < 20 else (row[0], 7 - row[1], *row[2:]) for row in rows]
    told = []
    for some in (rows, changed):
        options: dict = {"negatives": 1, "pool": 10} if drawn else {}
        prepared = build(toy_log(some, **options), split=SPLIT, min_history=0, seed=0)
        # What is drawn may be another item: which block ends where the log was changed, say.
        told.append(
            [
                (
                    request["user"],
                    request["prefix"],
                    request["item"][n],
                    *(request[f"feature {name}"][n] for name in FEATURES),
                )
                for request in requests_of(prepared)
                for n, label in enumerate(request["label label"])
                if request["time"] < 20 and (label or not drawn)
            ]
        )
    assert told[0] == told[1]
    assert len(told[0]) > 15
