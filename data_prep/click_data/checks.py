"""Checks over whole rows of a log.

Events carry the row of the table that each comes from in a column `row`. What is missing in one is
told of where it was read.
"""

from collections.abc import Iterator

import polars as pl

from click_data import pieces
from click_data.table import Table

_EVENT = ("user_id", "item_id", "time")


def note_duplicates(table: Table, events: pl.DataFrame, *, hint: str = "") -> None:
    """Note the events whose user, item and time occurred in an earlier row."""
    again = [_again(part.drop_nulls(_EVENT)) for part in parts(events, "user_id", *_EVENT, "row")]
    message = f"the same user, item and time as in an earlier row{hint}"
    table.note(message, rows=pl.concat(again).sort())


def without_duplicates(events: pl.DataFrame) -> pl.DataFrame:
    """The first of events with the same user, item and time, in the order of their rows."""
    again = pl.concat([_again(part) for part in parts(events, "user_id", *_EVENT, "row")])
    return events.filter(~pl.col("row").is_in(again.implode())) if len(again) else events


def note_unsorted(table: Table, events: pl.DataFrame, column: str, *, hint: str = "") -> None:
    """Note the events that are earlier than their user's event before them in the file."""
    earlier = (pl.col("time") < pl.col("time").shift(1).over("user_id")).fill_null(False)
    back = [
        part.drop_nulls(("user_id", "time")).filter(earlier)["row"]
        for part in parts(events, "user_id", "user_id", "time", "row")
    ]
    table.note(
        f"time goes backwards within one user{hint}", column=column, rows=pl.concat(back).sort()
    )


def parts(frame: pl.DataFrame, by: str, *names: str) -> Iterator[pl.DataFrame]:
    """Columns of a frame in parts of some million rows; rows of one value `by` are in one part.

    What groups or compares rows needs several times their memory, and so only that of a part.
    """
    some, number = frame.select(names), -(-len(frame) // pieces.PIECE)
    if number <= 1:
        yield some
        return
    part = frame.select((pl.col(by).hash() % number).cast(pl.UInt16)).to_series()
    for index in range(number):
        yield some.filter(part == index)


def _again(events: pl.DataFrame) -> pl.Series:
    """The rows of events that are in an earlier one, too."""
    first = events.select(pl.struct(_EVENT).is_first_distinct()).to_series()
    return events["row"].filter(~first)
