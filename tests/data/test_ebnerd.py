"""The `ebnerd` source: EB-NeRD as Ekstra Bladet publishes it."""

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from impression_logs import Change, Frames, at, without, write

from click_data import DataError, open_dataset
from click_data.events import ClickLog
from click_data.sources import ebnerd
from click_data.sources.ebnerd import EbnerdOptions

_START = datetime(2023, 5, 18)
_LIST = pl.List(pl.Int32)
BEHAVIORS = {"impression_id": pl.UInt32, "user_id": pl.UInt32, "impression_time": pl.Datetime("us")}
BEHAVIORS |= {"article_ids_inview": _LIST, "article_ids_clicked": _LIST, "device_type": pl.Int8}
HISTORY = {"user_id": pl.UInt32, "impression_time_fixed": pl.List(pl.Datetime("us"))}
HISTORY |= {"scroll_percentage_fixed": pl.List(pl.Float32), "article_id_fixed": _LIST}
HISTORY |= {"read_time_fixed": pl.List(pl.Float32)}


def hour(number: float) -> datetime:
    return _START + timedelta(hours=number)


def train() -> Frames:
    behaviors = [
        (1, 7, hour(30), [10, 11, 12], [11], 1),
        (2, 8, hour(31), [11, 12], [12], 2),
        (3, 7, hour(40), [13, 10], [], 1),
    ]
    history = [
        (7, [hour(1), hour(2)], [None, 50.0], [10, 13], [1.0, 2.0]),
        (8, [hour(3)], [10.0], [12], [3.0]),
    ]
    return frames(behaviors, history)


def validation() -> Frames:
    behaviors = [
        (4, 7, hour(60), [14, 10], [14], 1),
        (5, 9, hour(61), [14, 11], [11], 3),
        (6, 7, hour(62), [15, 10], [10, 15], 2),
    ]
    # One event of before, and the click at hour 30 as the page that followed.
    history = [(7, [hour(2), hour(30.1)], [50.0, 5.0], [13, 11], [2.0, 9.0])]
    return frames(behaviors, history)


def frames(behaviors: list[Any], history: list[Any]) -> Frames:
    return {
        "behaviors": pl.DataFrame(behaviors, schema=BEHAVIORS, orient="row"),
        "history": pl.DataFrame(history, schema=HISTORY, orient="row"),
    }


def written(folder: Path, change: Change | None = None) -> Path:
    first = train()
    if change:
        change(first)
    folder.mkdir()
    write(first, folder / "train")
    write(validation(), folder / "validation")
    articles = {"article_id": [10, 11], "title": ["a", "b"], "category": [118, 140]}
    articles |= {"premium": [True, False], "total_pageviews": [5, 6]}
    pl.DataFrame(articles).write_parquet(folder / "articles.parquet")
    return folder


def load(folder: Path, **options: Any) -> ClickLog:
    return ebnerd.load(folder, EbnerdOptions(**options), 0)


def test_both_folders_are_one_log(tmp_path: Path) -> None:
    log = load(written(tmp_path / "ebnerd_demo"))
    assert (log.name, log.timed) == ("ebnerd_demo", "all")
    assert log.candidates is not None
    lists = log.candidates.group_by("request", maintain_order=True).agg(
        pl.col("user_id", "time", "split", "context device_type").first(), "item_id", "label label"
    )
    start = int((_START - datetime(1970, 1, 1)).total_seconds())
    assert lists["time"].to_list() == [start + 3600 * h for h in (30, 31, 40, 60, 61, 62)]
    assert lists.drop("request", "time").rows() == [
        (7, "train", 1, [10, 11, 12], [0, 1, 0]),
        (8, "train", 2, [11, 12], [0, 1]),
        (7, "train", 1, [13, 10], [0, 0]),
        (7, "valid", 1, [14, 10], [1, 0]),
        (9, "test", 3, [14, 11], [0, 1]),
        (7, "test", 2, [15, 10], [1, 1]),
    ]
    assert log.events.drop("time").rows(named=True)[:3] == [
        event(7, 10, 1.0, 0.0, 0.0),
        event(7, 13, 2.0, 50.0, 1.0),
        event(7, 11, 9.0, 5.0, 1.0),
    ]
    assert log.items is not None
    assert log.items.rows() == [(10, 118, 1), (11, 140, 0)]
    assert log.items.columns == ["item_id", "item category", "item premium"]


def event(user: int, item: int, read: float, scroll: float, known: float) -> dict[str, Any]:
    signals = {"read_time": read, "scroll_percentage": scroll, "scroll_percentage known": known}
    return {"user_id": user, "item_id": item, **{f"signal {n}": v for n, v in signals.items()}}


def test_clicks_that_the_histories_have_not_are_appended(tmp_path: Path) -> None:
    log = load(written(tmp_path / "all"), append_clicks=True)
    mine = log.events.filter(pl.col("user_id") == 7)
    # 11 was clicked at hour 30 and read at 30.1; 14, 10 and 15 are in no history.
    assert mine["item_id"].to_list()[:4] == [10, 13, 11, 14]
    assert sorted(mine["item_id"].to_list()[4:]) == [10, 15]
    assert log.events.filter(pl.col("user_id") == 9)["item_id"].to_list() == [11]


def test_from_the_command_to_requests(
    tmp_path: Path, prepare_command: Callable[..., tuple[int, str, str]]
) -> None:
    folder = written(tmp_path / "ebnerd")
    options = ("--context", "device_type")
    code, said, error = prepare_command(
        "ebnerd", "--from", folder, "--out", tmp_path / "o", *options
    )
    assert (code, error) == (0, "")
    assert "train 3 with 7 candidates" in said
    dataset = open_dataset(tmp_path / "o")
    assert [dataset.requests(split).prefix.tolist() for split in ("train", "valid", "test")] == [
        *([2, 1, 3], [3], [0, 3])
    ]
    by_time = load(folder, by_time=True).candidates
    assert by_time is not None
    assert "split" not in by_time.columns


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (without("behaviors", "article_ids_clicked"), "column article_ids_clicked: missing"),
        (without("behaviors", "device_type"), "column device_type: missing"),
        (without("history", "read_time_fixed"), "history.parquet: column read_time_fixed: missing"),
        (lambda frames: frames.pop("history"), "history.parquet: no such file"),
        (
            at("behaviors", "article_ids_inview", 1, []),
            "column article_ids_inview, row 1: no article was shown: a list without candidates",
        ),
        (
            at("history", "read_time_fixed", 0, [1.0]),
            "column read_time_fixed, row 0: the list has another length than that in column artic",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_bad_rows_are_refused(change: Change, line: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load(written(tmp_path / "bad", change))
    assert line in str(caught.value)


def test_what_a_list_cannot_hold_is_dropped(
    tmp_path: Path, prepare_command: Callable[..., tuple[int, str, str]]
) -> None:
    def change(frames: Frames) -> None:
        at("behaviors", "article_ids_inview", 0, [10, 11, 10])(frames)
        at("behaviors", "article_ids_clicked", 1, [12, 99])(frames)

    folder = written(tmp_path / "ebnerd", change)
    code, said, _ = prepare_command("ebnerd", "--from", folder, "--out", tmp_path / "out")
    assert code == 0
    assert "dropped, shown for the second time in one list: 1 of 13 rows (7.7%)\n" in said
    assert "dropped, clicks of what the list does not hold: 1 of 13 rows (7.7%)\n" in said
    train = open_dataset(tmp_path / "out").requests("train")
    assert train.offsets.tolist() == [0, 2, 4, 6]
    assert train.labels["label"].tolist() == [0, 1, 0, 1, 0, 0]
