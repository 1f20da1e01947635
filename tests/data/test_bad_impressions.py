"""Impression logs that the `impressions` source refuses, each in one line."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import polars as pl
import pytest
from impression_logs import (
    Change,
    Frames,
    at,
    listed_log,
    nothing,
    timed_log,
    twice,
    without,
    write,
)

from click_data import DataError
from click_data.sources import impressions
from click_data.sources.impressions import ImpressionOptions

SHOWN, LOGGED, LISTED = "impressions", "interactions", "histories"


class Case(NamedTuple):
    """What is changed of a good log, and what the error says of it."""

    name: str
    change: Change
    line: str
    options: Mapping[str, Any] = MappingProxyType({})
    listed: bool = False


def listed(name: str, change: Change, line: str, **options: Any) -> Case:
    return Case(name, change, line, options, listed=True)


def many_actions(frames: Frames) -> None:
    numbers = pl.int_range(pl.len()).alias("action")
    frames[LOGGED] = pl.concat([frames[LOGGED]] * 3).with_columns(numbers)


def no_lists(frames: Frames) -> None:
    frames[LISTED] = frames[LISTED].with_columns(hist_items=5)


CASES = [
    Case("no label", without(SHOWN, "label"), "impressions.parquet: column label: missing"),
    Case("no item", without(LOGGED, "item_id"), "interactions.parquet: column item_id: missing"),
    Case("no context", nothing, "column phone: missing", {"contexts": ("phone",)}),
    Case("no signal", nothing, "ons.parquet: column swipe: missing", {"signals": ("swipe",)}),
    Case("a name twice", nothing, "price: taken for two", {"features": ("price", "price")}),
    Case("a time unit", nothing, "--time-unit h: not one of s, ms", {"time_unit": "h"}),
    Case("label 2", at(SHOWN, "label", 4, 2), "column label, row 4: 2 is not a label: 0 or 1"),
    Case(
        "no price",
        at(SHOWN, "price", 3, None),
        "column price, row 3: no number: the value is missing",
        {"features": ("price",)},
    ),
    Case("a split", at(SHOWN, "split", 2, "late"), "column split, row 2: 'late' is not a split"),
    Case(
        "another user",
        at(SHOWN, "user_id", 1, 2),
        "column user_id, row 1: 2 is not what the first row of the same list says",
    ),
    Case("another time", at(SHOWN, "timestamp", 5, 111), "timestamp, row 5: 111 is not what the"),
    Case("an item twice", at(SHOWN, "item_id", 4, 6), "item_id, row 4: 6 is in this list already"),
    Case(
        "a history that is too long",
        at(SHOWN, "hist_len", (12, 13, 14), 7),
        "column hist_len, row 12: 7 is more than the events that the user has (and 2 more rows)",
    ),
    Case(
        "a negative length",
        at(SHOWN, "hist_len", (12, 13, 14), -1),
        "column hist_len, row 12: -1 is a negative length (and 2 more rows)",
    ),
    Case(
        "a history of later events",
        at(SHOWN, "hist_len", (0, 1, 2), 4),
        "column hist_len, row 0: 4 takes in events that are later than the request",
    ),
    Case(
        "the click itself",
        at(SHOWN, "hist_len", (12, 13, 14), 5),
        "column hist_len, row 13: 5 takes in the click that the request is about",
    ),
    Case("an item described twice", twice("items", 2), "items.parquet: column item_id, row 4: 7"),
    Case("no events", lambda frames: frames.pop(LOGGED), "no interactions.parquet or histories."),
    Case("nothing shown", lambda f: f.pop(SHOWN), "not a folder with impressions.parquet"),
    Case(
        "many actions",
        many_actions,
        "column action: 30 values, where each is a signal of its own and 16 can be",
        {"signals": ("action",)},
    ),
    listed("a user twice", twice(LISTED, 1), "histories.parquet: column user_id, row 2: 2 is the"),
    listed("no list", at(LISTED, "hist_items", 0, None), "row 0: the list has another length than"),
    listed("no lists", no_lists, "column hist_items: lists are needed, not Int32"),
    listed("a short list", at(LISTED, "hist_scroll", 1, [1.0]), "hist_scroll, row 1: the list has"),
    listed(
        "a list that goes backwards",
        at(LISTED, "hist_timestamps", 0, [10, 30, 20]),
        "column hist_timestamps, row 0, element 2: time goes backwards in one list",
    ),
    listed("no id", at(LISTED, "hist_items", 1, [8, None]), "row 1, element 1: no id: the value"),
    listed("a signal", nothing, "--signal action: no interactions", signals=("action",)),
    listed(
        "clicks beside no times",
        without(LISTED, "hist_timestamps"),
        "column hist_timestamps: missing: --append-clicks needs the times of events",
        append_clicks=True,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bad_log_is_refused(case: Case, tmp_path: Path) -> None:
    frames = listed_log(timed=True) if case.listed else timed_log()
    case.change(frames)
    with pytest.raises(DataError) as caught:
        impressions.load(write(frames, tmp_path), ImpressionOptions(**case.options), 0)
    said = str(caught.value)
    assert case.line in said
    assert str(tmp_path) in said or not case.line.startswith("column")
    assert "\n" not in said
