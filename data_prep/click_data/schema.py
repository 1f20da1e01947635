"""The common form on disk: a folder of three Parquet files and dataset.json.

histories.parquet  one row per user, ordered by user index
    user_id (original, int64 or string) and time-ordered lists: item int32, time int64, and one
    float32 list for each signal: what an event says besides, labels among it
requests.parquet   what a ranker is asked, ordered by split, time, user
    user int32 (row of histories), prefix int32 (events of that user that it may see), time int64,
    split "train" | "valid" | "test"; lists of the candidates: item int32, "label TASK" int8 for
    each task, "feature NAME" float32 for each feature; "context NAME" int32 (categorical, 0
    unknown) or float32 (dense)
items.parquet      row i describes item id i; row 0 is the unknown item
    item_id (original), train_count int64; an int32 column of codes for each categorical feature,
    by its name, with its values in "original NAME"; a float32 column for each dense one
dataset.json       what it is, how it was made, what was read and what was dropped of the input,
    counts, warnings of what seems to leak, and the sha256 of each table; a function of input and
    options alone

Item ids: 0 is unknown, 1 to V the training vocabulary, most frequent first (num_items is V + 1),
and from V + 1 on the new items, which first occur later: a candidate of these can be found in a
history, but nothing was learned of it. Codes of features: 0 is unknown, 1, 2, ... are the values
of the training vocabulary, most frequent first. The features of an item are those of items.parquet,
for candidates and for histories.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from click_data.errors import DataError
from click_data.renewal import renewal
from click_data.split import SPLITS

FORMAT = 2
HISTORIES = "histories.parquet"
REQUESTS = "requests.parquet"
ITEMS = "items.parquet"
INFO = "dataset.json"
TABLES = (HISTORIES, REQUESTS, ITEMS)
FORMER = ("samples.parquet",)  # tables of earlier formats, which a new data set replaces

# What readers take from dataset.json.
_NEEDED = {
    **dict.fromkeys(("name", "digest", "timed", "candidates"), str),
    **dict.fromkeys(("num_items", "item_rows", "counts.users"), int),
    **{
        f"counts.{what}.{split}": int
        for what in ("requests", "candidates", "positives")
        for split in SPLITS
    },
    **dict.fromkeys(("tasks", "signals", "features", "item_dense"), list),
    **dict.fromkeys(("item_features", "context"), dict),
}

# One row group, so that what `datasets` opens has each column in one piece of memory.
_ROW_GROUP = 2**26


def label_column(task: str) -> str:
    """What the column of a task's labels is called."""
    return f"label {task}"


def signal_column(name: str) -> str:
    """What the column of a signal is called among the events of a log."""
    return f"signal {name}"


def feature_column(name: str) -> str:
    """What the column of a candidate feature is called."""
    return f"feature {name}"


def context_column(name: str) -> str:
    """What the column of a request's context is called."""
    return f"context {name}"


@dataclass(frozen=True)
class Prepared:
    """The common form in memory: the three tables and what dataset.json says about them."""

    histories: pa.Table
    requests: pa.Table
    items: pa.Table
    info: dict[str, Any]


def write(prepared: Prepared, folder: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Write the tables and dataset.json into an existing folder; returns dataset.json's content."""
    tables = (prepared.histories, prepared.requests, prepared.items)
    for name, table in zip(TABLES, tables, strict=True):
        _write_table(table, folder / name)
    files = file_digests(folder)
    made = {"files": files, "digest": digest(files)}
    info = {"format": FORMAT, **description, **prepared.info, **made}
    (folder / INFO).write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    return info


def digest(files: Mapping[str, str]) -> str:
    """sha256 over the names and contents of the Parquet files, given as in `file_digests`."""
    total = hashlib.sha256()
    for name in TABLES:
        total.update(f"{name} {files[name]}\n".encode())
    return total.hexdigest()


def file_digests(folder: Path) -> dict[str, str]:
    """sha256 of each Parquet file, by name."""
    return {name: file_digest(folder / name) for name in TABLES}


def verify(folder: Path, info: Mapping[str, Any]) -> None:
    """Raise unless the tables are those that dataset.json was written with.

    Reads all of them, at a GB or so a second.
    """
    try:
        files = file_digests(folder)
    except OSError as error:
        raise DataError(f"cannot be read ({error})", file=folder) from error
    if digest(files) == info["digest"]:
        _verify_counts(folder, info)
        return
    known = info.get("files")
    known = known if isinstance(known, dict) else {}
    changed = [name for name in TABLES if files[name] != known.get(name)] or [INFO]
    which = "one of " if not known else ""
    raise DataError(
        f"{which}{', '.join(changed)} changed since the data set was prepared, or is of another "
        "one: put it back, or prepare the data set again with --force",
        file=folder,
    )


def _verify_counts(folder: Path, info: Mapping[str, Any]) -> None:
    """Raise unless dataset.json says of its tables what they hold: it is no part of the digest."""
    counts = info["counts"]
    said = {
        HISTORIES: counts["users"],
        REQUESTS: sum(counts["requests"].values()),
        ITEMS: info["item_rows"],
    }
    named = {
        HISTORIES: ["user_id", "item", "time", *info["signals"]],
        REQUESTS: [
            *("user", "prefix", "time", "split", "item"),
            *map(label_column, info["tasks"]),
            *map(feature_column, info["features"]),
            *map(context_column, info["context"]),
        ],
        ITEMS: ["item_id", "train_count", *info["item_features"], *info["item_dense"]],
    }
    again = "prepare the data set again"
    for name, number in said.items():
        metadata = pq.read_metadata(folder / name)
        if metadata.num_rows != number:
            message = f"says {number:,} where {name} has {metadata.num_rows:,} rows; {again}"
            raise DataError(message, file=folder / INFO)
        lacking = set(named[name]) - set(metadata.schema.to_arrow_schema().names)
        if lacking:
            message = f"names columns that {name} has not: {', '.join(sorted(lacking))}; {again}"
            raise DataError(message, file=folder / INFO)
    said_shown, shown = sum(counts["candidates"].values()), _list_values(folder / REQUESTS, "item")
    if said_shown != shown:
        message = f"says {said_shown:,} candidates where {REQUESTS} has {shown:,}; {again}"
        raise DataError(message, file=folder / INFO)
    if not 0 < info["num_items"] <= info["item_rows"]:
        message = f"says {info['num_items']:,} of {info['item_rows']:,} items are known; {again}"
        raise DataError(message, file=folder / INFO)


def _list_values(path: Path, column: str) -> int:
    """How many values the lists of a column have together; none of the lists may be empty."""
    metadata = pq.read_metadata(path)
    total = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        parts = (group.column(index) for index in range(group.num_columns))
        total += sum(p.num_values for p in parts if p.path_in_schema.split(".")[0] == column)
    return total


def file_digest(path: Path) -> str:
    """sha256 of one file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_prepared(folder: Path) -> bool:
    """Whether a folder says of itself that it is a prepared data set, whole or damaged."""
    return (folder / INFO).is_file()


def read_info(folder: Path) -> dict[str, Any]:
    """The content of dataset.json, checked to be of this format with its tables beside it."""
    path = folder / INFO
    if not path.is_file():
        raise DataError(
            f"not a prepared data set (no {INFO}); make one with: jagged prepare SOURCE --out DIR",
            file=folder,
        )
    try:
        info = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"not readable as JSON ({error})", file=path) from error
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        message = f"not a data set of format {FORMAT}; prepare it again: {renewal(info, folder)}"
        raise DataError(message, file=path)
    lacking = _lacking(info)
    if lacking:
        raise DataError(f"says nothing of {lacking}; prepare the data set again", file=path)
    for name in TABLES:
        if not (folder / name).is_file():
            raise DataError("missing; prepare the data set again", file=folder / name)
    return info


def _lacking(info: dict[str, Any]) -> str:
    """The first entry that readers need and dataset.json lacks, or nothing."""
    for name, kind in _NEEDED.items():
        entry: Any = info
        for key in name.split("."):
            entry = entry.get(key) if isinstance(entry, dict) else None
        if not isinstance(entry, kind):
            return name
    for name, kind in _NEEDED.items():
        if kind is list and not all(isinstance(one, str) for one in info[name]):
            return name
    for name, kinds in (("item_features", int), ("context", int | None)):
        if not all(isinstance(number, kinds) for number in info[name].values()):
            return name
    return "" if info["tasks"] else "tasks"


def _write_table(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd", row_group_size=_ROW_GROUP)
