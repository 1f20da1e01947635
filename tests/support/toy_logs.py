"""Small logs in memory, and what is made of them as plain Python."""

from collections import Counter
from typing import Any

import polars as pl

from click_data.events import ClickLog, label_column, signal_column
from click_data.schema import Prepared

SCHEMA = {
    "user_id": pl.Int64,
    "item_id": pl.Int64,
    "time": pl.Int64,
    label_column("label"): pl.Int8,
    "item category": pl.String,
    signal_column("price"): pl.Float32,
}


def toy_log(rows: list[tuple], **options: Any) -> ClickLog:
    """Of rows of user, item, time, label, category and price."""
    return ClickLog(name="toy", events=pl.DataFrame(rows, schema=SCHEMA, orient="row"), **options)


def clicks(triples: list[tuple[int, int, int]], **options: Any) -> ClickLog:
    """Of rows of user, item and time: every one a positive."""
    return toy_log([(*row, 1, None, 0.0) for row in triples], **options)


def requests_of(prepared: Prepared) -> list[dict[str, Any]]:
    """Rows of requests.parquet, items by their ids in the log."""
    names = prepared.items["item_id"].to_pylist()
    users = prepared.histories["user_id"].to_pylist()
    rows = prepared.requests.to_pylist()
    return [
        {**row, "user": users[row["user"]], "item": [names[item] for item in row["item"]]}
        for row in rows
    ]


def frequent(values: list) -> list:
    """Distinct values, most frequent first."""
    counts = Counter(values)
    return sorted(counts, key=lambda value: (-counts[value], value))
