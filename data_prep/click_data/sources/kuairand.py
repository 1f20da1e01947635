"""KuaiRand (Gao et al., CIKM 2022): videos that a feed showed, and all that users did about them.

log_standard_*.csv     user_id, video_id, time_ms, play_time_ms, 0/1 columns for each task; and tab,
    where in the app the video was shown, a context; may be absent
video_features_basic_*.csv   video_id, author_id, video_type, upload_type, music_type, tag; may be
    absent

The logs of videos that were shown at random (log_random_*.csv) are not read.
"""

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from click_data import columns
from click_data.errors import DataError
from click_data.events import ClickLog
from click_data.plain import refuse_absent
from click_data.schema import file_digest
from click_data.sources import features
from click_data.table import concatenate
from click_data.text import read_text

TASKS = ("is_click", "is_like", "is_follow", "is_comment", "is_forward", "long_view")
_LOGGED = ("user_id", "video_id", "time_ms", *TASKS, "play_time_ms")
_TAB = "tab"
_VIDEO = ("author_id", "video_type", "upload_type", "music_type", "tag")


@dataclass(frozen=True)
class KuaiRandOptions:
    """Nothing is to be chosen."""


def load(path: Path | None, options: KuaiRandOptions, seed: int) -> ClickLog:
    """Read all standard logs: each video shown is asked about, with one label a task."""
    del options, seed  # nothing here is random
    assert path is not None
    refuse_absent(path)
    folder = path / "data" if (path / "data").is_dir() else path
    files = sorted(folder.glob("log_standard_*.csv"))
    if not files:
        raise DataError("no log_standard_*.csv in this folder", file=path)
    tables = [read_text(file, wanted=(*_LOGGED, _TAB)) for file in files]
    for table in tables:
        table.require(*_LOGGED)
    table = concatenate(tables)
    tabbed = _TAB in table.columns
    read = (*_LOGGED, *((_TAB,) if tabbed else ()))
    events = pl.DataFrame(
        {
            "user_id": columns.ids(table, "user_id"),
            "item_id": columns.ids(table, "video_id"),
            "time": columns.times(table, "time_ms", unit="ms"),
            **{f"label {task}": columns.labels(table, task) for task in TASKS},
            **({f"context {_TAB}": features.ids(table, _TAB)} if tabbed else {}),
            "signal play_time_s": (columns.numbers(table, "play_time_ms") / 1000).cast(pl.Float32),
        }
    )
    table.refuse()
    described = sorted(folder.glob("video_features_basic_*.csv"))[:1]
    return ClickLog(
        name=path.resolve().name,
        events=events,
        items=_videos(described[0]) if described else None,
        tasks=TASKS,
        time_unit="ms",
        inputs=tuple({"file": f.name, "sha256": file_digest(f)} for f in (*files, *described)),
        read={
            "columns": {name: name for name in read},
            "unread": [name for name in table.columns if name not in read],
        },
    )


def _videos(file: Path) -> pl.DataFrame:
    """Categories of videos; of several tags the first."""
    table = read_text(file, wanted=("video_id", *_VIDEO))
    table.require("video_id")
    out = {"item_id": columns.ids(table, "video_id")}
    for column in _VIDEO:
        if column in table.columns:
            out[f"item {column.removesuffix('_id')}"] = features.ids(table, column)
    table.refuse()
    if "item tag" in out and out["item tag"].dtype == pl.String:
        out["item tag"] = columns.as_integers(out["item tag"].str.split(",").list.first())
    return pl.DataFrame(out).unique("item_id", keep="first", maintain_order=True)
