"""Leaks that are planted in a log are told when it is prepared; in what is made here are none."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from impression_logs import write
from toy_logs import clicks, requests_of, toy_log

from click_data.errors import DataError
from click_data.events import ClickLog, build
from click_data.leaks import auc
from click_data.summary import summary

SPLIT = (0.6, 0.2, 0.2)


def shown_log(seed: int = 0, requests: int = 200) -> ClickLog:
    """Lists of two, one of which is clicked, with a price, an hour and a device that say nothing.

    Users and items are those of events of their own, before all requests.
    """
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    for request in range(requests):
        clicked = int(rng.integers(2))
        whole = {"request": request, "user_id": request % 7, "time": 1000 + request}
        whole |= {"context hour": float(rng.integers(24)), "context device": int(rng.integers(3))}
        for place, item in enumerate(rng.choice(30, 2, replace=False)):
            rows.append(
                {
                    **whole,
                    "item_id": int(item),
                    "label label": int(place == clicked),
                    "feature price": float(rng.random()),
                }
            )
    events = [(int(rng.integers(7)), int(rng.integers(30)), time) for time in range(100)]
    kinds = {"label label": pl.Int8, "feature price": pl.Float32, "context hour": pl.Float32}
    return ClickLog(
        name="shown",
        events=pl.DataFrame(events, schema=["user_id", "item_id", "time"], orient="row"),
        candidates=pl.DataFrame(rows, schema_overrides=kinds),
    )


def told(log: ClickLog) -> list[str]:
    info = build(log, split=SPLIT, min_history=0, seed=0).info
    return info.get("warnings", [])


def with_candidates(log: ClickLog, **columns: pl.Expr) -> ClickLog:
    assert log.candidates is not None
    return replace(log, candidates=log.candidates.with_columns(**columns))


def test_a_log_without_leaks_is_told_none() -> None:
    assert told(shown_log()) == []
    rows = [(t % 5, t % 11, t, t // 3 % 2, "ab"[t % 2], float(t)) for t in range(600)]
    assert told(toy_log(rows)) == []


LABEL = pl.col("label label")
PLANTED = {
    "the label": LABEL.cast(pl.Float32),
    "its opposite": (1 - LABEL).cast(pl.Float32),
    "a copy with noise": (LABEL * 10 + pl.col("feature price")).cast(pl.Float32),
}


@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_a_label_among_the_features(planted: pl.Expr) -> None:
    log = with_candidates(shown_log(), **{"feature mood": planted})
    (line,) = told(log)
    assert line.startswith("feature 'mood' separates the labels 'label' perfectly (AUC ")
    assert line.endswith("on train): a leak?")
    assert ("AUC 0.000" in line) == (planted is PLANTED["its opposite"])


@pytest.mark.parametrize("kind", [pl.Float32, pl.Int64, pl.String])
def test_a_label_among_the_contexts(kind: Any) -> None:
    # Lists of one: where a list has both labels, nothing that is told of the list tells them.
    single = shown_log(requests=300)
    assert single.candidates is not None
    single = replace(single, candidates=single.candidates.unique("request", keep="first"))
    assert told(single) == []
    (line,) = told(with_candidates(single, **{"context mood": LABEL.cast(kind)}))
    assert line.startswith("context 'mood' separates the labels 'label' perfectly (AUC 1.000")


def test_ids_of_requests_are_no_leak() -> None:
    single = shown_log(requests=300)
    assert single.candidates is not None
    single = replace(single, candidates=single.candidates.unique("request", keep="first"))
    assert told(with_candidates(single, **{"context id": pl.col("request")})) == []


def test_each_task_is_looked_at() -> None:
    log = with_candidates(shown_log(), **{"label buy": (pl.col("request") % 2).cast(pl.Int8)})
    log = with_candidates(log, **{"feature paid": pl.col("label buy").cast(pl.Float32)})
    (line,) = told(replace(log, tasks=("label", "buy")))
    assert line.startswith("feature 'paid' separates the labels 'buy'")


def test_a_history_without_times_that_holds_the_clicks() -> None:
    log = shown_log()
    assert log.candidates is not None
    before = log.candidates.filter(LABEL == 1).select("user_id", "item_id")
    place = pl.int_range(pl.len(), dtype=pl.Int64).over("user_id")
    events = before.with_columns(place.alias("time"))
    # Each request may see its user's clicks up to its own.
    number = log.candidates.select(pl.col("request").rank("dense").over("user_id")).to_series()
    log = replace(log, events=events, timed="requests")
    sees = with_candidates(log, prefix=pl.lit(number.cast(pl.Int64)))
    (line,) = told(sees)
    assert line.startswith("histories hold 100.0% of the clicked candidates and ")
    assert told(with_candidates(log, prefix=pl.lit(number.cast(pl.Int64) - 1))) == []


def test_the_summary_warns(
    tmp_path: Path, prepare_command: Callable[..., tuple[int, str, str]]
) -> None:
    log = shown_log()
    assert log.candidates is not None
    names = {"request": "impression_id", "time": "timestamp", "label label": "label"}
    shown = log.candidates.rename(names).with_columns(mood=pl.col("label"))
    events = log.events.rename({"time": "timestamp"})
    folder = write({"impressions": shown, "interactions": events}, tmp_path / "shop")
    asked = ("--from", folder, "--out", tmp_path / "out", "--split", *SPLIT)
    code, said, error = prepare_command("impressions", *asked, "--feature", "mood")
    assert (code, error) == (0, "")
    assert said.splitlines()[-1].startswith("  warning: feature 'mood' separates the labels")
    prepared = build(log, split=SPLIT, min_history=0, seed=0)
    assert "warning" not in summary({**prepared.info, "name": "shown"}, tmp_path)
    shown.with_columns(trend=1.0).write_parquet(folder / "impressions.parquet")
    refused = prepare_command("impressions", *asked, "--feature", "trend", "--force")
    assert refused == (
        1,
        "",
        "jagged: feature trend: the name is taken by what is made of clicks\n",
    )


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1)), min_size=2, max_size=40))
def test_auc_against_all_pairs(rows: list[tuple[int, int]]) -> None:
    score, label = (np.array(column) for column in zip(*rows, strict=True))
    above, below = score[label == 1], score[label == 0]
    if len(above) and len(below):
        pairs = [(a > b) + (a == b) / 2 for a in above for b in below]
        assert auc(score.astype(float), label == 1) == pytest.approx(np.mean(pairs))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_nothing_of_a_request_or_later_is_in_it(seed: int, drawn: bool) -> None:
    """Histories end strictly before their request, counts before it (or its block); the counts of
    the vocabulary end where validation begins."""
    rng = np.random.default_rng(seed)
    last = int(rng.integers(10, 60))
    rows = sorted(
        {(int(rng.integers(4)), int(rng.integers(6)), int(rng.integers(last))) for _ in range(70)}
    )
    log = clicks(rows, negatives=1, pool=6)
    if not drawn:
        log = toy_log([(*row, n % 2, None, 0.0) for n, row in enumerate(rows)])
    try:
        prepared = build(log, split=SPLIT, min_history=0, seed=0)
    except DataError:
        return  # too few distinct times
    names = prepared.items["item_id"].to_pylist()
    histories = {
        row["user_id"]: [names[item] for item in row["item"]]
        for row in prepared.histories.to_pylist()
    }
    for request in requests_of(prepared):
        user, time = request["user"], request["time"]
        mine = sorted((t, item) for u, item, t in rows if u == user)
        earlier = [item for t, item in mine if t < time]
        assert sorted(histories[user][: request["prefix"]]) == sorted(earlier)
        for item, popularity in zip(request["item"], request["feature popularity"], strict=True):
            before = sum(other == item and t < time for _, other, t in rows)
            known = math.expm1(popularity)
            assert known <= before + 1e-3 if drawn else known == pytest.approx(before, abs=1e-3)
    valid = prepared.info["split_times"]["valid"]
    counted = dict(zip(names, prepared.items["train_count"].to_pylist(), strict=True))
    assert counted == {
        None: 0,
        **{name: sum(i == name and t < valid for _, i, t in rows) for name in names[1:]},
    }
