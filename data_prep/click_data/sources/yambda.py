"""Yambda (Ploshkin et al., RecSys 2025), flat: listens.parquet of what users listened to.

uid, timestamp (seconds since a start that is not told, in steps of 5), item_id, is_organic,
played_ratio_pct, track_length_seconds.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from click_data import columns
from click_data.errors import DataError
from click_data.events import ClickLog
from click_data.plain import refuse_absent
from click_data.schema import file_digest
from click_data.sources import features
from click_data.table import read_parquet

_COLUMNS = ("uid", "item_id", "timestamp", "is_organic", "played_ratio_pct", "track_length_seconds")


@dataclass(frozen=True)
class YambdaOptions:
    """threshold: the least share of a track played, in percent, that is a positive label."""

    threshold: float = 50.0


def load(path: Path | None, options: YambdaOptions, seed: int) -> ClickLog:
    """Read listens: each is asked about, and is a positive if enough of the track was played."""
    del seed  # nothing here is random
    assert path is not None
    if not math.isfinite(options.threshold):
        raise DataError(f"--threshold {options.threshold}: not a share in percent")
    refuse_absent(path)
    file = path / "listens.parquet" if path.is_dir() else path
    if not file.is_file():
        raise DataError("no listens.parquet in this folder", file=path)
    table = read_parquet(file, wanted=_COLUMNS)
    table.require(*_COLUMNS)
    played = columns.numbers(table, "played_ratio_pct").cast(pl.Float32)
    events = pl.DataFrame(
        {
            "user_id": columns.ids(table, "uid"),
            "item_id": columns.ids(table, "item_id"),
            "time": columns.times(table, "timestamp"),
            "label listened": (played >= options.threshold).cast(pl.Int8),
            "signal played_ratio_pct": played,
            "signal is_organic": features.numbers(table, "is_organic").fill_null(0),
        }
    )
    length = features.numbers(table, "track_length_seconds").fill_null(0)
    table.refuse()
    tracks = events.select("item_id").with_columns(length.alias("dense track_length_seconds"))
    return ClickLog(
        name=f"yambda_{file.resolve().parent.name}",
        events=events,
        items=tracks.unique("item_id", keep="first", maintain_order=True),
        tasks=("listened",),
        inputs=({"file": file.name, "sha256": file_digest(file)},),
        read={
            "columns": {name: name for name in _COLUMNS},
            "unread": [name for name in table.columns if name not in _COLUMNS],
        },
    )
