"""Drawn candidates: what others did at that time, and nothing in them that tells them apart."""

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from toy_logs import clicks, requests_of, toy_log

from click_data.errors import DataError
from click_data.events import ClickLog, build
from click_data.schema import Prepared

SPLIT = (0.6, 0.2, 0.2)
NEAR = 0.03  # of an AUC of 1/2, with 4,000 positives and as many draws: more than 4 sigma


def made(log: ClickLog, *, seed: int = 0) -> Prepared:
    return build(log, split=SPLIT, min_history=0, seed=seed)


def naive_blocks(prepared: Prepared, times: list[int], pool: int) -> list[set[int]]:
    """The times of each block: whole splits in order, cut behind an instant as soon as it is of
    `pool` events; what is left of a split in the end is of its last block."""
    bounds = prepared.info["split_times"]
    blocks: list[set[int]] = []
    for begin, end in ((0, bounds["valid"]), (bounds["valid"], bounds["test"]),
                       (bounds["test"], max(times) + 1)):  # fmt: skip
        mine = sorted(time for time in times if begin <= time < end)
        current: list[int] = []
        first = len(blocks)
        for position, time in enumerate(mine):
            current.append(time)
            if len(current) >= pool and mine[position + 1 : position + 2] != [time]:
                blocks.append(set(current))
                current = []
        if len(blocks) == first:
            blocks.append(set())
        blocks[-1] |= set(current)
    return blocks


def random_clicks(seed: int, number: int) -> list[tuple[int, int, int]]:
    rng = np.random.default_rng(seed)
    rows = {
        (int(rng.integers(6)), int(rng.integers(12)), int(rng.integers(number // 2)))
        for _ in range(number)
    }
    return sorted(rows)


@pytest.mark.parametrize("seed", range(40))
def test_against_a_plain_loop(seed: int) -> None:
    rows = random_clicks(seed, 60)
    negatives, pool = 1 + seed % 4, 5 + seed % 17
    prepared = made(clicks(rows, negatives=negatives, pool=pool))
    blocks = naive_blocks(prepared, [time for *_, time in rows], pool)
    missing = 0
    positives = []
    for request in requests_of(prepared):
        user, time = request["user"], request["time"]
        own = {item for u, item, t in rows if (u, t) == (user, time)}
        block = next(block for block in blocks if time in block)
        others = {item for u, item, t in rows if u != user and t in block} - own
        shown = list(zip(request["item"], request["label label"], strict=True))
        starts = [n for n, (_, label) in enumerate(shown) if label == 1]
        assert starts[0] == 0
        for start, end in zip(starts, [*starts[1:], len(shown)], strict=True):
            positives.append((user, shown[start][0], time))
            drawn = [item for item, _ in shown[start + 1 : end]]
            assert len(set(drawn)) == len(drawn) == min(negatives, len(others))
            assert set(drawn) <= others
            missing += negatives - len(drawn)
    assert sorted(positives) == rows
    assert prepared.info.get("negatives_given_up", 0) == missing
    assert prepared.info["candidates"] == "drawn from others"


def test_a_seed_fixes_what_is_drawn() -> None:
    log = clicks(random_clicks(0, 200), negatives=2, pool=50)
    assert made(log).requests == made(log).requests != made(log, seed=1).requests


def test_draws_are_as_popular_as_the_events_of_others() -> None:
    rng = np.random.default_rng(0)
    share = np.arange(1, 31) ** -1.0
    share /= share.sum()
    items = rng.choice(30, 20_000, p=share)
    rows = [(time % 500, int(item), time) for time, item in enumerate(items)]
    prepared = made(clicks(rows, negatives=1, pool=10**6))
    drawn = np.bincount(
        [item for r in requests_of(prepared) for item in r["item"][1:]], minlength=30
    )
    # Of those that are not the positive's item, by their popularity.
    given = share / (1 - share)
    expected = share * (given.sum() - given)
    assert np.abs(drawn / drawn.sum() - expected).max() < 0.01


def test_what_cannot_be_drawn_is_counted_and_the_rest_is_found() -> None:
    # User 0 does everything but for one event of user 1 in a hundred.
    rows = [(int(t % 100 == 50), t % 7, t) for t in range(1000)]
    prepared = made(clicks(rows, negatives=3, pool=200))
    by_user = {0: [], 1: []}
    for request in requests_of(prepared):
        by_user[request["user"]].append(len(request["item"]) - 1)
    # In 200 events are two of user 1: of two items at most, and perhaps the positive's.
    assert max(by_user[0]) == 2
    assert set(by_user[1]) == {3}
    lacking = sum(3 - number for number in by_user[0])
    assert prepared.info["negatives_given_up"] == lacking


def test_a_log_of_one_user_is_refused() -> None:
    with pytest.raises(DataError, match="no item could be drawn as label 0"):
        made(clicks([(0, t % 9, t) for t in range(100)], negatives=1))


def test_labels_of_the_log_stay_among_draws() -> None:
    rows = [(t % 5, t % 11, t, int(t % 3 > 0), None, 0.0) for t in range(300)]
    requests = requests_of(made(toy_log(rows, negatives=2, pool=50)))
    for request in requests:
        label = request["time"] % 3 > 0
        assert request["label label"] == ([1, 0, 0] if label else [0])
        assert request["item"][0] == request["time"] % 11


# --- nothing gives the label away -----------------------------------------------------------------


def shown(prepared: Prepared, split: str = "test") -> tuple[NDArray, dict[str, NDArray]]:
    """Labels of the candidates of a split, and what may be said of each."""
    histories = prepared.histories["item"].to_pylist()
    rows = [row for row in prepared.requests.to_pylist() if row["split"] == split]
    label = [label for row in rows for label in row["label label"]]
    seen = [set(histories[row["user"]][: row["prefix"]]) for row in rows]
    inside = [item in own for row, own in zip(rows, seen, strict=True) for item in row["item"]]
    item = np.array([item for row in rows for item in row["item"]])
    said = {"in history": np.array(inside), "new": item >= prepared.info["num_items"]}
    said |= {
        name: np.array([value for row in rows for value in row[f"feature {name}"]])
        for name in prepared.info["features"]
    }
    said |= {name: prepared.items[name].to_numpy()[item] for name in prepared.info["item_features"]}
    return np.array(label), said


def test_being_in_the_history_says_what_returning_users_make_it_say() -> None:
    """Half of all events are returns, the rest any of 60 items: draws of what a user never touches
    would all be out of the history, and positives would nearly all be in it."""
    rng = np.random.default_rng(0)
    past: dict[int, list[int]] = {}
    rows, returns = [], np.zeros(20_000, bool)
    for time in range(20_000):
        own = past.setdefault(int(rng.integers(250)), [])
        user = next(u for u, items in past.items() if items is own)
        returns[time] = bool(own) and rng.random() < 0.5
        own.append(int(rng.choice(own)) if returns[time] else int(rng.integers(60)))
        rows.append((user, own[-1], time))
    label, said = shown(made(clicks(rows, negatives=1)))
    inside = said["in history"]
    planted = returns[-4000:].mean()
    anyhow = inside[label == 0].mean()
    assert 0.3 < anyhow < 0.9
    assert inside[label == 1].mean() == pytest.approx(planted + (1 - planted) * anyhow, abs=NEAR)
    assert roc_auc_score(label, inside) == pytest.approx(0.5 + planted * (1 - anyhow) / 2, abs=NEAR)


@pytest.fixture(scope="module")
def fleeting() -> Prepared:
    """A log in which a user's past says nothing: in each period everybody does a few of the items
    of that period, some much more often than others, and half of those of the test period are new.
    The category that an event names is not always its item's."""
    rng = np.random.default_rng(1)
    rows = []
    share = np.arange(1, 61) ** -0.7
    for time in range(20_000):
        item = 6 * (time // 1000) + int(rng.choice(60, p=share / share.sum()))
        category = "abcdef"[item % 6 if rng.random() < 0.7 else int(rng.integers(6))]
        rows.append((int(rng.integers(400)), item, time, 1, category, 0.0))
    return made(toy_log(rows, negatives=1))


def test_nothing_alone_tells_positives_from_draws(fleeting: Prepared) -> None:
    label, said = shown(fleeting)
    assert label.sum() == 4000 == len(label) / 2
    assert 0.2 < said["new"].mean() < 0.8
    assert set(said) == {"in history", "new", "popularity", "trend", "age", "category"}
    for name, value in said.items():
        assert len(np.unique(value)) > 1
        assert roc_auc_score(label, value) == pytest.approx(0.5, abs=NEAR), name
    # Nor does a category, in whatever order.
    train, codes = shown(fleeting, "train")[0], shown(fleeting, "train")[1]["category"]
    rate = np.bincount(codes, weights=train, minlength=7) / np.bincount(codes, minlength=7).clip(1)
    assert roc_auc_score(label, rate[said["category"]]) == pytest.approx(0.5, abs=NEAR)


def test_training_never_sees_an_item_of_later(fleeting: Prepared) -> None:
    train, said = shown(fleeting, "train")
    assert not said["new"].any()
    assert len(train) == 2 * 12_000
