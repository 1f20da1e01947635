"""Requests that a log brings with the candidates that were shown, against plain loops."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import roc_auc_score
from toy_logs import requests_of

from click_data import open_dataset, schema
from click_data.errors import DataError
from click_data.events import ClickLog, build
from click_data.schema import Prepared
from click_data.summary import summary

SPLIT = (0.5, 0.25, 0.25)
SPLITS = ("train", "valid", "test")
# Without times nothing can be split by time.
MADE = [(timed, split) for timed in ("all", "requests") for split in (False, True)]
MADE.append(("none", True))


def shown_log(seed: int, timed: str = "all", *, split: bool = False, prefix: bool = False):
    """Users 0 to 5, of whom 5 has no events; items 0 to 9 in events, 3 to 14 as candidates."""
    rng = np.random.default_rng(seed)
    each = [(int(rng.integers(5)), f"i{int(rng.integers(10)):02}") for _ in range(60)]
    position: Counter = Counter()
    events = []
    for user, item in each:
        time = int(rng.integers(30)) if timed == "all" else position[user]
        position[user] += 1
        events.append({"user_id": user, "item_id": item, "time": time,
                       "signal dwell": float(rng.integers(9))})  # fmt: skip
    rows = []
    for request in rng.permutation(40).tolist():
        user = int(rng.integers(6))
        time = int(rng.integers(30)) if timed != "none" else position[user]
        whole: dict[str, Any] = {"request": request, "user_id": user, "time": time}
        whole |= {"context device": [None, "app", "web"][int(rng.integers(3))],
                  "context hour": float(rng.integers(24))}  # fmt: skip
        if split:
            whole["split"] = SPLITS[int(rng.integers(3))]
        if prefix:
            mine = [e for e in events if e["user_id"] == user]
            seen = [e for e in mine if timed != "all" or e["time"] <= time]
            whole["prefix"] = int(rng.integers(len(seen) + 1))
        for _ in range(int(rng.integers(1, 6))):
            item = f"i{int(rng.integers(3, 15)):02}"
            rows.append({**whole, "item_id": item, "label click": int(rng.random() < 0.4),
                         "label buy": int(rng.random() < 0.1),
                         "feature price": float(rng.random())})  # fmt: skip
    items = [{"item_id": f"i{n:02}", "item shop": [None, "a", "b"][n % 3], "item size": n // 8,
              "dense weight": None if n == 3 else n / 4} for n in range(2, 20)]  # fmt: skip
    log = ClickLog(
        name="shown",
        events=pl.DataFrame(events).with_columns(pl.col("signal dwell").cast(pl.Float32)),
        candidates=pl.DataFrame(rows, infer_schema_length=None).with_columns(
            pl.col("label click", "label buy").cast(pl.Int8),
            pl.col("feature price", "context hour").cast(pl.Float32),
        ),
        items=pl.DataFrame(items),
        tasks=("click", "buy"),
        timed=timed,
    )
    return log, events, rows, items


def built(log: ClickLog, **options: Any) -> Prepared:
    return build(log, **{"split": SPLIT, "min_history": 0, "seed": 0, **options})


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("timed", "split"), MADE)
@pytest.mark.parametrize("prefix", [False, True])
def test_against_a_plain_loop(seed: int, timed: str, split: bool, prefix: bool) -> None:
    log, events, rows, items = shown_log(seed, timed, split=split, prefix=prefix)
    prepared = built(log)
    info = prepared.info
    assert info["split"] == ("given" if split else "time")
    assert info["candidates"] == "given"
    histories = {
        user: sorted((e for e in events if e["user_id"] == user), key=lambda e: e["time"])
        for user in range(6)
    }
    requests: dict[int, list[dict]] = {}
    for row in rows:
        requests.setdefault(row["request"], []).append(row)

    def split_of(row: dict) -> str:
        if split:
            return row["split"]
        return SPLITS[sum(row["time"] >= bound for bound in info["split_times"].values())]

    def prefix_of(row: dict) -> int:
        if prefix:
            return row["prefix"]
        mine = histories[row["user_id"]]
        return len(mine) if timed == "requests" else sum(e["time"] < row["time"] for e in mine)

    # What training sees.
    train = [of for of in requests.values() if split_of(of[0]) == "train"]
    if timed == "all" and not split:
        seen = [e for e in events if e["time"] < info["split_times"]["valid"]]
    else:
        reach = {u: max([prefix_of(of[0]) for of in train if of[0]["user_id"] == u], default=0)
                 for u in range(6)}  # fmt: skip
        seen = [event for user in range(6) for event in histories[user][: reach[user]]]
    keys = ("user_id", "item_id", "time")
    before = {tuple(event[key] for key in keys) for event in seen}
    every = {tuple(event[key] for key in keys) for event in events}
    liked = [row for of in train for row in of if row["label click"]]
    more = [tuple(row[key] for key in keys) for row in liked]
    more = [key for key in more if key not in before]
    if timed == "all":
        more = sorted({key for key in more if key in every})
    counts = Counter([event["item_id"] for event in seen] + [key[1] for key in more])
    known = {*counts} | {row["item_id"] for of in train for row in of}
    known = sorted(known, key=lambda item: (-counts[item], item))
    new = {e["item_id"] for e in events} | {row["item_id"] for row in rows}
    order = [None, *known, *sorted(new - {*known})]
    table = prepared.items.to_pylist()
    assert [row["item_id"] for row in table] == order
    assert [row["train_count"] for row in table] == [counts[item] for item in order]
    assert (info["num_items"], info["item_rows"]) == (len(known) + 1, len(order))
    said = {row["item_id"]: row for row in items}
    for row in table[1:]:
        own = said.get(row["item_id"], {})
        assert row["original shop"] == own.get("item shop")
        assert row["original size"] == own.get("item size")
        assert (row["shop"] == 0) == (own.get("item shop") is None)
        assert row["weight"] == (own.get("dense weight") or 0)
    assert info["item_dense"] == ["weight"]

    # Histories, and who has none.
    assert prepared.histories["user_id"].to_pylist() == sorted(
        {e["user_id"] for e in events} | {row["user_id"] for row in rows}
    )
    for row in prepared.histories.to_pylist():
        mine = histories[row["user_id"]]
        assert [order[item] for item in row["item"]] == [e["item_id"] for e in mine]
        assert row["dwell"] == [e["signal dwell"] for e in mine]

    # Events without times precede the requests that may see them: of all of a user's, those in
    # the shortest prefix.
    old = events
    if timed == "requests":
        least = {u: min([prefix_of(of[0]) for of in requests.values() if of[0]["user_id"] == u],
                        default=len(histories[u])) for u in range(6)}  # fmt: skip
        old = [event for user in range(6) for event in histories[user][: least[user]]]

    # Requests, with their candidates in the order of the log.
    made = ("popularity", "trend", "age", "shown")[: 3 if timed == "none" else 4]
    expected = []
    for of in requests.values():
        one = of[0]
        own = [split_of(one) == "train" and row["label click"] for row in of]
        features = [
            naive(row, one, old, rows, counts[row["item_id"]] - mine, timed)
            for row, mine in zip(of, own, strict=True)
        ]
        expected.append(
            {
                "user": one["user_id"],
                "prefix": prefix_of(one),
                "time": one["time"],
                "split": split_of(one),
                "item": [row["item_id"] for row in of],
                "label click": [row["label click"] for row in of],
                "label buy": [row["label buy"] for row in of],
                "feature price": pytest.approx([row["feature price"] for row in of]),
                **{
                    f"feature {name}": pytest.approx([f[n] for f in features], rel=1e-6)
                    for n, name in enumerate(made)
                },
                "context hour": one["context hour"],
                "device": one["context device"],
                "request": one["request"],
            }
        )
    expected.sort(key=lambda r: (SPLITS.index(r["split"]), r["time"], r["user"], r["request"]))
    devices = [one["device"] for one in expected if one["split"] == "train" and one["device"]]
    codes = {None: 0, **{d: n for n, (d, _) in enumerate(sorted(Counter(devices).items(), key=lambda of: (-of[1], of[0])), 1)}}  # fmt: skip # noqa: E501
    assert info["context"] == {"device": len(codes), "hour": None}
    for one in expected:
        one["context device"] = codes.get(one.pop("device"), 0)
        del one["request"]
    assert requests_of(prepared) == expected
    assert info["features"] == [*made, "price"]


def naive(row: dict, one: dict, events: list, rows: list, trained: int, timed: str) -> list:
    """Popularity, trend (of all: there are less than 1,000 clicks) and age of a candidate, and how
    often it was shown.

    events: that are old, or have times. trained: clicks of the item in training, but for this one.
    """
    if timed == "none":
        return [math.log1p(trained), 0.0, 0.0]
    shown = sum(o["item_id"] == row["item_id"] and o["time"] < one["time"] for o in rows)
    if timed == "all":
        times = [e["time"] for e in events if e["item_id"] == row["item_id"]]
    else:
        start = min(other["time"] for other in rows) - 1
        times = [start for e in events if e["item_id"] == row["item_id"]]
        liked = [other for other in rows if other["label click"]]
        times += [other["time"] for other in liked if other["item_id"] == row["item_id"]]
    times = [time for time in times if time < one["time"]]
    known = math.log1p(len(times))
    age = math.log1p(one["time"] - min(times)) if times else 0.0
    return [known, known, age, math.log1p(shown)]


@pytest.mark.parametrize("timed", ["requests", "none"])
def test_features_tell_nothing_where_labels_are_noise(timed: str) -> None:
    """Growing lists without times, each clicked item at their end: so no feature of a candidate
    may be of the click that is asked about, nor of what came later."""
    rng = np.random.default_rng(0)
    events, rows, user_requests = [], [], 6
    for user in range(200):
        for n in range(3 + user_requests):
            events.append({"user_id": user, "item_id": int(rng.integers(4000)), "time": n})
        for n in range(user_requests):
            clicked = events[len(events) - user_requests + n]["item_id"]
            shown = [clicked, *rng.integers(4000, size=3).tolist()]
            times = {"requests": n * 200 + user, "none": 3 + n}
            whole = {"request": user * 10 + n, "user_id": user, "time": times[timed],
                     "split": SPLITS[max(n - 3, 0)], "prefix": 3 + n}  # fmt: skip
            rows += [
                {**whole, "item_id": i, "label click": int(k == 0)} for k, i in enumerate(shown)
            ]
    log = ClickLog(
        name="noise",
        events=pl.DataFrame(events),
        candidates=pl.DataFrame(rows).with_columns(pl.col("label click").cast(pl.Int8)),
        tasks=("click",),
        timed=timed,
    )
    for min_history in (0, 5):  # which leaves out requests that see less
        requests = requests_of(built(log, min_history=min_history))
        for split in SPLITS:
            here = [request for request in requests if request["split"] == split]
            label = np.concatenate([request["label click"] for request in here])
            for name in ("popularity", "trend", "age"):
                told = np.concatenate([request[f"feature {name}"] for request in here])
                assert abs(roc_auc_score(label, told) - 0.5) < 0.06, (split, name)


def test_a_request_sees_nothing_of_its_own_instant() -> None:
    log, *_ = shown_log(0)
    prepared = built(log)
    times = prepared.histories["time"].to_pylist()
    ends = 0
    for request in prepared.requests.to_pylist():
        mine = times[request["user"]]
        assert all(time < request["time"] for time in mine[: request["prefix"]])
        assert all(time >= request["time"] for time in mine[request["prefix"] :])
        ends += request["time"] in mine
    assert ends > 0


@pytest.mark.parametrize(
    ("prefix", "timed", "message"),
    [
        (61, "all", r"request 7 of user 0 at \d+ may see 61 events of a user with \d+"),
        (-1, "requests", r"request 7 of user 0 at \d+ may see -1 events"),
        (None, "all", r"request 7 of user 0 at 3 may see \d+ events, the last of them at \d+, whi"),
    ],
)
def test_prefixes_beyond_the_history_or_the_time_are_refused(
    prefix: int | None, timed: str, message: str
) -> None:
    log, events, *_ = shown_log(0, timed, prefix=True)
    assert log.candidates is not None
    whole = sum(event["user_id"] == 0 for event in events)
    bad = pl.col("request") == 7
    candidates = log.candidates.with_columns(
        user_id=pl.when(bad).then(0).otherwise("user_id"),
        prefix=pl.when(bad).then(whole if prefix is None else prefix).otherwise("prefix"),
        time=pl.when(bad & (prefix is None)).then(3).otherwise("time"),
    )
    with pytest.raises(DataError, match=message):
        built(replace(log, candidates=candidates))


def test_a_short_history_drops_the_request() -> None:
    log, *_ = shown_log(1, split=True)
    whole, some = built(log), built(log, min_history=4)
    kept = [row for row in requests_of(whole) if row["prefix"] >= 4]
    assert 0 < len(kept) < whole.requests.num_rows
    names = ("user", "prefix", "time", "split", "item", "label buy")
    assert [[row[name] for name in names] for row in requests_of(some)] == [
        [row[name] for name in names] for row in kept
    ]


def test_what_a_log_cannot_be() -> None:
    log, *_ = shown_log(0)
    assert log.candidates is not None
    with pytest.raises(ValueError, match="timed is one of all, requests, none"):
        replace(log, timed="some")
    with pytest.raises(ValueError, match="events without times"):
        replace(log, candidates=None, timed="none")
    with pytest.raises(ValueError, match="not beside candidates"):
        replace(log, negatives=1)
    with pytest.raises(DataError, match="feature age: the name is taken"):
        replace(log, candidates=log.candidates.rename({"feature price": "feature age"}))
    with pytest.raises(ValueError, match="split is one of train, valid, test"):
        built(replace(log, candidates=log.candidates.with_columns(split=pl.lit("dev"))))


def test_it_opens_as_it_was_made(tmp_path: Path) -> None:
    log, *_ = shown_log(2, "requests", split=True)
    prepared = built(log)
    info = schema.write(prepared, tmp_path, {"name": "shown", "source": "shown"})
    dataset = open_dataset(tmp_path)
    assert (dataset.tasks, dataset.signals) == (("click", "buy"), ("dwell",))
    assert dataset.features == ("popularity", "trend", "age", "shown", "price")
    assert dataset.context == {"device": 3, "hour": None}
    assert dataset.item_features == {"shop": 3, "size": 3}
    assert dataset.item_dense["weight"].dtype == np.float32
    assert dataset.item_categories["shop"].dtype == np.int32
    assert len(dataset.item_dense["weight"]) == dataset.item_rows == prepared.items.num_rows
    told = prepared.requests.to_pylist()
    for split in SPLITS:
        requests = dataset.requests(split)
        mine = [row for row in told if row["split"] == split]
        assert len(requests) == len(mine) > 0
        assert requests.offsets[0] == 0
        for number, row in enumerate(mine):
            of = slice(*requests.offsets[number : number + 2])
            assert requests.item[of].tolist() == row["item"]
            assert requests.labels["buy"][of].tolist() == row["label buy"]
            assert requests.features["price"][of].tolist() == row["feature price"]
            assert requests.context["device"][number] == row["context device"]
            assert requests.context["hour"][number] == row["context hour"]
        assert requests.context["device"].dtype == np.int32
        assert requests.context["hour"].dtype == np.float32
    said = summary(info, tmp_path)
    assert "split as the log has it" in said
    assert "tasks: click, buy; candidates' features: popularity, trend, age, shown, price; " in said
    assert "items': shop (2), size (2), weight; requests': device, hour; events': dwell" in said
