"""Small impression logs, as frames to change and to write."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

Frames = dict[str, pl.DataFrame]

# Lists of three: user, time, how much of the history, items, which of them was clicked.
_LISTS = [
    (1, 100, 1, (5, 6, 7), 5),
    (1, 110, 3, (6, 8, 5), 6),
    (2, 105, 0, (7, 6, 5), 7),
    (2, 120, 2, (8, 5, 6), None),
    (1, 130, 4, (5, 7, 9), 7),
    (2, 140, 2, (6, 7, 8), 8),
    (1, 150, 5, (9, 6, 5), 9),
    (3, 150, 0, (9, 6, 7), 6),
]
_SPLITS = ("train", "train", "train", "train", "val", "val", "test", "test")
# A user's events: item, time, action. Clicks are among them, behind their lists' prefix.
_EVENTS = {
    1: [(6, 90, 1), (5, 100, 0), (6, 108, 2), (6, 110, 0), (7, 130, 0), (9, 150, 0)],
    2: [(7, 105, 0), (8, 119, 1), (8, 140, 0)],
    3: [(6, 150, 0)],
}


def timed_log() -> Frames:
    """impressions with price and device, interactions with actions, items with a category."""
    rows = [
        (n, user, time, place, item, int(item == click), prefix, split, item * 10.0, user % 2)
        for n, (split, asked) in enumerate(zip(_SPLITS, _LISTS, strict=True))
        for user, time, prefix, items, click in (asked,)
        for place, item in enumerate(items)
    ]
    names = ("impression_id", "user_id", "timestamp", "position", "item_id", "label", "hist_len")
    shown = pl.DataFrame(rows, schema=[*names, "split", "price", "device"], orient="row")
    events = [(user, *event) for user, mine in _EVENTS.items() for event in mine]
    logged = pl.DataFrame(
        events, schema=["user_id", "item_id", "timestamp", "action"], orient="row"
    )
    return {"impressions": shown, "interactions": logged, "items": items()}


def items() -> pl.DataFrame:
    """Item 9 is not described, nor is the category of item 8."""
    columns = {"item_id": [5, 6, 7, 8], "category": ["a", "b", "a", None]}
    return pl.DataFrame(columns | {"weight": [0.5, 1.5, 2.5, 3.5], "tags": [[1], [2], [], [3]]})


def listed_log(*, timed: bool) -> Frames:
    """The same lists after histories that are whole before all of them; user 3 has none."""
    lengths = {1: 3, 2: 2, 3: 0}
    length = pl.col("user_id").replace_strict(lengths)
    shown = timed_log()["impressions"].with_columns(length.alias("hist_len"))
    held = pl.DataFrame(
        {
            "user_id": [1, 2],
            "hist_items": [[6, 5, 9], [8, 8]],
            "hist_timestamps": [[10, 20, 20], [30, 40]],
            "hist_read_time": [[1.0, 2.0, 3.0], [4.0, 5.0]],
            "hist_scroll": [[None, 50.0, 60.0], [None, 0.0]],
        },
        schema_overrides={"hist_read_time": pl.List(pl.Float32)},
    )
    if not timed:
        held = held.select("user_id", "hist_items")
    return {"impressions": shown, "histories": held, "items": items()}


def write(frames: Frames, folder: Path) -> Path:
    """The frames as Parquet files of a folder."""
    folder.mkdir(exist_ok=True)
    for name, frame in frames.items():
        frame.write_parquet(folder / f"{name}.parquet")
    return folder


Change = Callable[[Frames], Any]


def at(frame: str, column: str, rows: int | tuple[int, ...], value: Any) -> Change:
    """Puts a value into some rows of a column."""

    def change(frames: Frames) -> None:
        values = frames[frame][column].to_list()
        for row in (rows,) if isinstance(rows, int) else rows:
            values[row] = value
        kind = None if isinstance(value, str) else frames[frame].schema[column]
        frames[frame] = frames[frame].with_columns(pl.Series(column, values, kind, strict=False))

    return change


def without(frame: str, column: str) -> Change:
    """Takes a column away."""

    def change(frames: Frames) -> None:
        frames[frame] = frames[frame].drop(column)

    return change


def twice(frame: str, row: int) -> Change:
    """Appends a row once more."""

    def change(frames: Frames) -> None:
        frames[frame] = pl.concat([frames[frame], frames[frame][row : row + 1]])

    return change


def nothing(frames: Frames) -> None:
    """Changes nothing: the options are bad."""
