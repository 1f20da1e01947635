"""Prepared folders that hold what cannot be, or know what they must not, are refused at once."""

import math
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from impression_logs import listed_log, timed_log, write
from planted_rows import Row, planted, put, rows_of

from click_data import DataError, open_dataset, prepare, schema

LISTS = {"contexts": ("device",), "features": ("price",)}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logged") / "data"
    return prepare("synthetic", out=folder, users=9, items=9, categories=3, events=300)


@pytest.fixture(scope="module", params=["times", "lists with times", "lists without"])
def given(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("given")
    frames = (
        timed_log()
        if request.param == "times"
        else listed_log(timed="without" not in request.param)
    )
    return prepare("impressions", from_path=write(frames, folder / "log"), out=folder / "data")


def refused(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        open_dataset(folder)
    line = str(caught.value)
    assert line.startswith(str(folder))
    assert "\n" not in line
    return line.removeprefix(f"{folder}/")


CASES = {
    "an item beyond the table in a history": (
        *(schema.HISTORIES, put(4, "item", 10**6, 2)),
        "column item, row 4: item 1000000, and items.parquet has ",
    ),
    "a negative item in a history": (
        *(schema.HISTORIES, put(0, "item", -1, 0)),
        "column item, row 0: item -1, and items.parquet has ",
    ),
    "a candidate beyond the table": (
        *(schema.REQUESTS, put(250, "item", 10**6, 0)),
        "column item, row 250: item 1000000, and items.parquet has ",
    ),
    "a label of 2": (
        *(schema.REQUESTS, put(7, "label label", 2, 0)),
        "column label label, row 7: 2 is not a label: 0 or 1",
    ),
    "nobody's request": (
        *(schema.REQUESTS, put(3, "user", 9)),
        "column user, row 3: user 9 of 9",
    ),
    "a prefix of more than there is": (
        *(schema.REQUESTS, put(5, "prefix", 10**6)),
        "column prefix, row 5: may see 1000000 events of a user with ",
    ),
    "a history that goes backwards": (
        *(schema.HISTORIES, put(2, "time", 4 * 10**9, 0)),
        "column time, row 2: time goes backwards",
    ),
}


@pytest.mark.parametrize(("table", "change", "line"), CASES.values(), ids=CASES)
def test_what_cannot_be(
    table: str, change: Callable, line: str, logged: Path, tmp_path: Path
) -> None:
    folder = planted(logged, tmp_path / "data", table, change)
    assert refused(folder).startswith(f"{table}: {line}")


def test_what_was_prepared_is_sound_and_looked_at_once(
    logged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = planted(logged, tmp_path / "data", schema.ITEMS, lambda rows: None)
    assert open_dataset(folder).num_users == 9
    monkeypatch.setattr("click_data.opening.refuse_unsound", lambda dataset: pytest.fail("again"))
    assert open_dataset(folder).num_users == 9


def test_given_candidates_are_sound(given: Path) -> None:
    assert open_dataset(given).info["candidates"] == "given"


def test_a_prefix_that_reaches_the_requests_own_event(logged: Path, tmp_path: Path) -> None:
    rows = rows_of(logged, schema.REQUESTS)
    for row in (
        next(n for n, of in enumerate(rows) if of["split"] == split) for split in ("train", "test")
    ):
        folder = tmp_path / f"data {row}"
        planted(logged, folder, schema.REQUESTS, put(row, "prefix", rows[row]["prefix"] + 1))
        time = rows[row]["time"]
        line = refused(folder)
        assert f"column prefix, row {row}: may see an event at {time}, which is not before" in line


def test_a_given_prefix_that_reaches_the_click(tmp_path: Path) -> None:
    source = prepare(
        "impressions", from_path=write(timed_log(), tmp_path / "log"), out=tmp_path / "as it is"
    )
    rows = rows_of(source, schema.REQUESTS)
    # The last list of user 1, whose click is its last event.
    row = next(n for n, of in enumerate(rows) if of["time"] == 150 and of["prefix"] == 5)
    folder = planted(source, tmp_path / "data", schema.REQUESTS, put(row, "prefix", 6))
    assert f"row {row}: may see the event that it is about, of item " in refused(folder)
    early = planted(source, tmp_path / "early", schema.REQUESTS, put(0, "prefix", 3))
    assert "row 0: may see an event at 108, which is not before its time, 100" in refused(early)


def test_clicks_of_validation_and_test_in_the_counts_of_training(
    logged: Path, given: Path, tmp_path: Path
) -> None:
    for number, source in enumerate((logged, given)):
        item = all_clicks(source)
        folder = planted(source, tmp_path / f"data {number}", schema.ITEMS, item)
        assert "those of validation and test must not be counted" in refused(folder)


def all_clicks(source: Path) -> Callable[[list[Row]], None]:
    """Counts all events and positives, as who does not split them would."""
    held = [item for row in rows_of(source, schema.HISTORIES) for item in row["item"]]
    for row in rows_of(source, schema.REQUESTS):
        pairs = zip(row["item"], row["label label"], strict=True)
        held += [item for item, label in pairs if label]

    def change(rows: list[Row]) -> None:
        for item, row in enumerate(rows):
            row["train_count"] = held.count(item)

    return change


def test_popularity_that_counts_what_comes_later(logged: Path, given: Path, tmp_path: Path) -> None:
    for number, source in enumerate((logged, given)):
        last = max(rows_of(source, schema.REQUESTS), key=lambda row: row["time"])
        most = max(last["feature popularity"]) + 1

        def change(rows: list[Row], most: float = most) -> None:
            for row in rows:
                row["feature popularity"] = [most] * len(row["item"])

        folder = planted(source, tmp_path / f"data {number}", schema.REQUESTS, change)
        line = refused(folder)
        assert line.startswith("requests.parquet: column feature popularity, row 0: ")
        assert "later ones must not be counted" in line


def test_popularity_that_counts_the_end_of_a_growing_list(tmp_path: Path) -> None:
    """Of a list without times, what some request may not see yet comes later."""
    users = range(30)
    shown = [(user, 100 + user, item, item == 77) for user in users for item in (77, 78)]
    frames = {
        "impressions": pl.DataFrame(
            [(user, user, time, item, int(clicked), 2) for user, time, item, clicked in shown],
            schema=["impression_id", "user_id", "timestamp", "item_id", "label", "hist_len"],
            orient="row",
        ),
        "histories": pl.DataFrame(
            [(user, [1, 2, 77]) for user in users],
            schema=["user_id", "hist_items"],
            orient="row",
        ),
    }
    source = prepare("impressions", from_path=write(frames, tmp_path / "log"), out=tmp_path / "a")
    told = [row["feature popularity"][0] for row in rows_of(source, schema.REQUESTS)]
    assert told == pytest.approx([math.log1p(user) for user in users])
    folder = planted(
        source, tmp_path / "b", schema.REQUESTS, put(0, "feature popularity", math.log1p(30), 0)
    )
    assert "30 clicks of item" in refused(folder)
