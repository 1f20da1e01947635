"""Shown lists of candidates: what the readers of impression logs check of them.

`candidates` is a frame with one row a shown candidate, row i from row i of the table: request,
user_id, time, item_id, labels, and optionally split, prefix, "context NAME", "feature NAME".
`events` has user_id, item_id and time, ordered by user and time.
"""

from collections.abc import Mapping

import polars as pl

from click_data.table import Table

_SPLITS = {
    "train": "train",
    **dict.fromkeys(("valid", "val", "validation", "dev"), "valid"),
    "test": "test",
}


def splits(table: Table, column: str) -> pl.Series:
    """A column of official splits as "train", "valid" or "test"."""
    raw = table.frame[column].cast(pl.String, strict=False)
    out = raw.replace_strict(_SPLITS, default=None, return_dtype=pl.String)
    message = "is not a split: train, valid (or val, validation, dev) or test"
    table.note(message, column=column, rows=out.is_null().arg_true(), raw=raw)
    return out


def note_uneven(table: Table, candidates: pl.DataFrame, columns: Mapping[str, str]) -> None:
    """Note rows that say something else of their list than its first row does.

    columns: the table's by ours.
    """
    for ours, theirs in columns.items():
        first = pl.col(ours).first().over("request")
        differs = candidates.select(pl.col(ours).ne_missing(first)).to_series()
        message = "is not what the first row of the same list says"
        table.note(message, column=theirs, rows=differs.arg_true(), raw=table.frame[theirs])


def note_repeated(table: Table, candidates: pl.DataFrame, column: str) -> None:
    """Note items that are in one list for the second time."""
    whole = candidates.select("request", "item_id").with_row_index("row").drop_nulls()
    again = ~whole.select(pl.struct("request", "item_id").is_first_distinct()).to_series()
    message = "is in this list already"
    table.note(message, column=column, rows=whole["row"].filter(again), raw=table.frame[column])


def shown_once(candidates: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, int]]:
    """Candidates without those that are in their list already, and what to tell of these.

    Of published logs, which nobody can mend. What is clicked in one of its places is clicked.
    """
    place = ("request", "item_id")
    once = candidates.unique(place, keep="first", maintain_order=True)
    if len(once) < len(candidates):
        labels = candidates.group_by(place).agg(pl.col("^label .*$").max())
        once = once.update(labels, on=place)
    again = len(candidates) - len(once)
    return once, {"rows": len(candidates), "shown_again": again} if again else {}


def note_prefixes(
    table: Table, candidates: pl.DataFrame, events: pl.DataFrame, column: str, *, timed: bool
) -> None:
    """Note given prefixes that are not of the user's events before the request.

    timed: events have times, so that none of a prefix may be later than its request, nor be the
    click that the request is asked about. An event of the same item and second may stand in a
    prefix beside the click (a look at a hotel, then the click), so a click is told to be inside
    only if no such event lies behind the prefix.
    """
    prefix, raw = candidates["prefix"], table.frame[column]
    counts = events.group_by("user_id").agg(pl.len().cast(pl.Int64).alias("held"))
    held = candidates.select("user_id").join(
        counts, on="user_id", how="left", maintain_order="left"
    )
    beyond = (prefix > held["held"].fill_null(0)).fill_null(False)
    table.note("is a negative length", column=column, rows=(prefix < 0).arg_true(), raw=raw)
    message = "is more than the events that the user has"
    table.note(message, column=column, rows=beyond.arg_true(), raw=raw)
    if not timed or table.problems:
        return
    placed = events.with_columns(place=pl.int_range(pl.len()).over("user_id"))
    asked = candidates.select("user_id", "item_id", "time", "prefix").with_row_index("row")
    last = placed.select("user_id", prefix=pl.col("place") + 1, last="time")
    late = asked.join(last, on=("user_id", "prefix")).filter(pl.col("last") > pl.col("time"))
    message = "takes in events that are later than the request"
    table.note(message, column=column, rows=late["row"].sort(), raw=raw)
    label = candidates.select(pl.col("^label .*$")).to_series(0)
    twins = (
        asked.filter(label == 1)
        .join(placed, on=("user_id", "item_id", "time"))
        .group_by("row")
        .agg((pl.col("place") < pl.col("prefix")).all().alias("inside"))
        .filter("inside")
    )
    message = "takes in the click that the request is about"
    table.note(message, column=column, rows=twins["row"].sort(), raw=raw)


def with_clicks(events: pl.DataFrame, candidates: pl.DataFrame) -> pl.DataFrame:
    """Events with the clicked candidates among them, at the times of their requests.

    A click whose item the user's events hold at that time or later is one of them already. What a
    click has no signals of is null.
    """
    clicks = candidates.filter(pl.col("label label") == 1)
    clicks = clicks.select("user_id", "item_id", "time").unique(maintain_order=True)
    last = events.group_by("user_id", "item_id").agg(pl.col("time").max().alias("last"))
    clicks = clicks.join(last, on=("user_id", "item_id"), how="left", maintain_order="left")
    clicks = clicks.filter((pl.col("last") < pl.col("time")).fill_null(True)).drop("last")
    both = pl.concat([events, clicks], how="diagonal")
    return both.sort("user_id", "time", maintain_order=True)


def same_ids(
    candidates: pl.DataFrame, events: pl.DataFrame, items: pl.DataFrame | None
) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame | None]:
    """The same with ids and features of items of one type each: text, if they are text anywhere."""
    frames = [candidates, events, *([] if items is None else [items])]
    names = {name for frame in frames for name in frame.columns if name.startswith("item ")}
    for name in ("user_id", "item_id", *names):
        kinds = {frame[name].dtype for frame in frames if name in frame.columns and len(frame)}
        kind = pl.String if pl.String in kinds else pl.Int64
        frames = [
            frame.with_columns(pl.col(name).cast(kind)) if name in frame.columns else frame
            for frame in frames
        ]
    return frames[0], frames[1], frames[2] if items is not None else None
