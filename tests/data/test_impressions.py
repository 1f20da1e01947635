"""The `impressions` source: what was shown, and the histories beside it, as Parquet."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from impression_logs import Frames, listed_log, timed_log, write

from click_data import DataError, open_dataset, prepare
from click_data.events import ClickLog
from click_data.sources import impressions
from click_data.sources.candidates import with_clicks
from click_data.sources.impressions import ImpressionOptions


def load(frames: Frames, folder: Path, **options: Any) -> ClickLog:
    return impressions.load(write(frames, folder), ImpressionOptions(**options), 0)


def test_events_with_times_and_given_prefixes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"contexts": ("device",), "features": ("price",)}
    log = load(timed_log(), tmp_path / "shop", signals=("action",), **options)
    assert (log.name, log.timed, log.tasks, log.time_unit) == ("shop", "all", ("label",), "s")
    assert log.candidates is not None
    assert log.candidates.columns == [
        *("request", "user_id", "time", "item_id", "label label", "split", "prefix"),
        *("context device", "feature price"),
    ]
    last = log.candidates.tail(3)
    assert last["item_id"].to_list() == [9, 6, 7]
    assert last["label label"].to_list() == [0, 1, 0]
    assert last["feature price"].to_list() == [90, 60, 70]
    assert last["prefix"].to_list() == [0, 0, 0]
    split = log.candidates["split"].to_list()
    assert split == ["train"] * 12 + ["valid"] * 6 + ["test"] * 6
    assert log.events.columns == [
        *("user_id", "item_id", "time"),
        *("signal action=0", "signal action=1", "signal action=2"),
    ]
    first = log.events.head(3)
    assert first.select("^signal.*$").rows() == [(0, 1, 0), (1, 0, 0), (0, 0, 1)]
    assert log.items is not None
    assert log.items.columns == ["item_id", "item category", "dense weight"]
    assert log.items["item category"].to_list() == ["a", "b", "a", None]
    assert [entry["file"] for entry in log.inputs] == [
        *("impressions.parquet", "interactions.parquet", "items.parquet")
    ]
    assert log.read["unread"] == ["position"]


def test_lists_with_times_and_signals(tmp_path: Path) -> None:
    log = load(listed_log(timed=True), tmp_path)
    assert log.timed == "all"
    assert log.events.rows(named=True)[0] == {
        **{"user_id": 1, "item_id": 6, "time": 10, "signal read_time": 1.0},
        **{"signal scroll": 0.0, "signal scroll known": 0.0},
    }
    assert log.events["signal scroll known"].to_list() == [0, 1, 1, 0, 1]
    assert log.candidates is not None
    assert set(log.candidates.select("user_id", "prefix").rows()) == {(1, 3), (2, 2), (3, 0)}


@pytest.mark.parametrize("stated", [True, False])
def test_lists_without_times_come_before_every_request(stated: bool, tmp_path: Path) -> None:
    frames = listed_log(timed=False)
    if not stated:
        frames["impressions"] = frames["impressions"].drop("hist_len")
    log = load(frames, tmp_path)
    assert log.timed == "requests"
    assert log.events["time"].to_list() == [0, 1, 2, 0, 1]
    assert log.candidates is not None
    assert set(log.candidates.select("user_id", "prefix").rows()) == {(1, 3), (2, 2), (3, 0)}


def test_clicks_of_earlier_lists_are_appended_by_time(tmp_path: Path) -> None:
    frames = listed_log(timed=True)
    # The history of user 1 has the click at 110 itself, later, as another program saw it.
    more = {"hist_items": [6, 5, 9, 6], "hist_timestamps": [10, 20, 20, 111]}
    more |= {"hist_read_time": [1.0] * 4, "hist_scroll": [None] * 4}
    held = [{"user_id": 1} | more, *frames["histories"].to_dicts()[1:]]
    frames["histories"] = pl.DataFrame(held, schema=frames["histories"].schema)
    frames["impressions"] = frames["impressions"].drop("hist_len")
    log = load(frames, tmp_path, append_clicks=True)
    assert log.candidates is not None
    assert "prefix" not in log.candidates.columns
    rows = log.events.select("user_id", "item_id", "time", "signal read_time known").rows()
    assert rows[:7] == [
        *[(1, 6, 10, 1), (1, 5, 20, 1), (1, 9, 20, 1), (1, 5, 100, 0)],
        *[(1, 6, 111, 1), (1, 7, 130, 0), (1, 9, 150, 0)],
    ]
    assert rows[7:] == [
        (2, 8, 30, 1),
        (2, 8, 40, 1),
        (2, 7, 105, 0),
        (2, 8, 140, 0),
        (3, 6, 150, 0),
    ]


def test_a_click_that_the_events_hold_at_that_time_or_later_is_not_appended() -> None:
    names = ["user_id", "item_id", "time"]
    events = pl.DataFrame([(1, 6, 90), (1, 5, 100), (1, 7, 101)], schema=names, orient="row")
    shown = [(1, 5, 100, 1), (1, 6, 100, 1), (1, 7, 100, 1), (1, 8, 100, 0)]
    candidates = pl.DataFrame(shown, schema=[*names, "label label"], orient="row")
    found = with_clicks(events, candidates)
    assert found.rows() == [(1, 6, 90), (1, 5, 100), (1, 6, 100), (1, 7, 101)]


def test_the_split_column_is_named_or_left_out(tmp_path: Path) -> None:
    frames = timed_log()
    swapped = pl.col("split").replace({"train": "test", "test": "train"})
    frames["impressions"] = frames["impressions"].with_columns(swapped.alias("split_user"))
    by_user = load(frames, tmp_path, split_column="split_user").candidates
    assert by_user is not None
    assert by_user["split"].to_list() == ["test"] * 12 + ["valid"] * 6 + ["train"] * 6
    by_time = load(frames, tmp_path, split_column="").candidates
    assert by_time is not None
    assert "split" not in by_time.columns


def test_ids_are_text_everywhere_if_they_are_somewhere(tmp_path: Path) -> None:
    frames = timed_log()
    frames["items"] = frames["items"].with_columns(pl.Series("item_id", ["5", "6", "7", "x"]))
    log = load(frames, tmp_path)
    assert log.items is not None
    assert log.candidates is not None
    for frame in (log.items, log.candidates, log.events):
        assert frame["item_id"].dtype == pl.String
    assert log.events["user_id"].dtype == pl.Int64


def test_a_set_of_a_known_name_has_its_counts(tmp_path: Path) -> None:
    known, mine = (write(timed_log(), tmp_path / name) for name in ("trivago_val100k", "mine"))
    line = (
        "has 24 rows, and trivago_val100k is published with 312,539: it is not whole, or another "
        "set, which --name calls by another name"
    )
    for folder, name in ((known, None), (mine, "trivago_val100k")):
        with pytest.raises(DataError, match=f"{folder}: {line}"):
            prepare("impressions", from_path=folder, out=tmp_path / "out", name=name)
    prepared = prepare("impressions", from_path=known, out=tmp_path / "out", name="mine")
    assert open_dataset(prepared).name == "mine"


def test_two_kinds_of_histories_are_refused(tmp_path: Path) -> None:
    both = {**listed_log(timed=True), **timed_log()}
    with pytest.raises(DataError, match="take one of them away"):
        load(both, tmp_path)


def test_clicks_alone_are_a_history(tmp_path: Path) -> None:
    frames = {"impressions": timed_log()["impressions"]}
    log = load(frames, tmp_path, append_clicks=True)
    assert log.events.height == 7
    assert log.events.columns == ["user_id", "item_id", "time"]


def test_from_the_command_to_requests(
    tmp_path: Path, prepare_command: Callable[..., tuple[int, str, str]]
) -> None:
    folder = write(timed_log(), tmp_path / "shop")
    asked = ("--from", folder, "--out", tmp_path / "out", "--context", "device")
    more = ("--feature", "price", "--feature", "position", "--signal", "action")
    code, said, error = prepare_command("impressions", *asked, *more)
    assert (code, error) == (0, "")
    assert "split as the log has it" in said
    dataset = open_dataset(tmp_path / "out")
    assert (dataset.name, dataset.info["timed"], dataset.info["split"]) == ("shop", "all", "given")
    test, item_ids = dataset.requests("test"), dataset.items["item_id"].to_pylist()
    assert (test.prefix.tolist(), test.offsets.tolist()) == ([5, 0], [0, 3, 6])
    assert [item_ids[item] for item in test.item] == [9, 6, 5, 9, 6, 7]
    assert test.labels["label"].tolist() == [1, 0, 0, 0, 1, 0]
    assert test.features["position"].tolist() == [0, 1, 2] * 2
    assert test.features["price"].tolist() == [90, 60, 50, 90, 60, 70]
    assert test.context["device"].dtype == np.int32
    assert dataset.context == {"device": 3}
    assert dataset.histories.signals["action=2"].tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    refused = prepare_command("mind", *asked, "--force")
    assert refused == (1, "", "jagged: source mind has no option 'contexts'; it has: by_time\n")
