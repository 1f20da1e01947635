"""Checks over whole rows of a log.

Events carry the row of the table that each comes from in a column `row`. What is missing in one is
told of where it was read.
"""

import polars as pl

from click_data.table import Table


def note_duplicates(table: Table, events: pl.DataFrame, *, hint: str = "") -> None:
    """Note the events whose user, item and time occurred in an earlier row."""
    whole = events.drop_nulls(("user_id", "item_id", "time"))
    again = ~whole.select(pl.struct("user_id", "item_id", "time").is_first_distinct()).to_series()
    message = f"the same user, item and time as in an earlier row{hint}"
    table.note(message, rows=whole["row"].filter(again))


def note_unsorted(table: Table, events: pl.DataFrame, column: str, *, hint: str = "") -> None:
    """Note the events that are earlier than their user's event before them in the file."""
    whole = events.drop_nulls(("user_id", "time"))
    earlier = pl.col("time") < pl.col("time").shift(1).over("user_id")
    back = whole.select(earlier.fill_null(False)).to_series()
    message = f"time goes backwards within one user{hint}"
    table.note(message, column=column, rows=whole["row"].filter(back))
