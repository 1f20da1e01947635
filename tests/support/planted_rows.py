"""Prepared folders with other rows, told by dataset.json as if they had been made so."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from click_data import schema

Row = dict[str, Any]


def planted(
    source: Path, folder: Path, table: str, change: Callable[[list[Row]], object], **told: Any
) -> Path:
    """The data set with other rows in one table, told by dataset.json as if it were made so."""
    folder.mkdir()
    for name in schema.TABLES:
        frame = pl.read_parquet(source / name)
        if name == table:
            rows = frame.to_dicts()
            change(rows)
            frame = pl.DataFrame(rows, schema=frame.schema)
        frame.write_parquet(folder / name)
    files = schema.file_digests(folder)
    info = json.loads((source / schema.INFO).read_text()) | told
    info |= {"files": files, "digest": schema.digest(files)}
    (folder / schema.INFO).write_text(json.dumps(info))
    return folder


def put(row: int, column: str, value: Any, place: int | None = None) -> Callable[[list[Row]], None]:
    def change(rows: list[Row]) -> None:
        if place is None:
            rows[row][column] = value
        else:
            rows[row][column][place] = value

    return change


def rows_of(folder: Path, table: str) -> list[Row]:
    return pl.read_parquet(folder / table).to_dicts()
