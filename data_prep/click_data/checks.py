"""Checks over whole rows of a log, naming the first that is wrong."""

import polars as pl

from click_data.table import Table


def refuse_duplicates(table: Table, events: pl.DataFrame, *, hint: str = "") -> None:
    """Raise at the first event whose user, item and time occurred in an earlier row."""
    again = ~events.select(pl.struct("user_id", "item_id", "time").is_first_distinct()).to_series()
    row = again.arg_max() if again.any() else None
    if row is not None:
        table.fail(f"the same user, item and time as in an earlier row{hint}", row=row)


def refuse_unsorted(table: Table, events: pl.DataFrame, column: str, *, hint: str = "") -> None:
    """Raise at the first event that is earlier than its user's event before it in the file."""
    earlier = pl.col("time") < pl.col("time").shift(1).over("user_id")
    back = events.select(earlier.fill_null(False)).to_series()
    row = back.arg_max() if back.any() else None
    if row is not None:
        table.fail(f"time goes backwards within one user{hint}", column=column, row=row)
