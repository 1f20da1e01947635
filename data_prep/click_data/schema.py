"""The common form on disk: a folder of three Parquet files and dataset.json.

histories.parquet  one row per user, ordered by user index
    user_id (original, int64 or string) and time-ordered lists: item int32, category int32,
    time int64, label int8, and one float32 list for each extra signal
samples.parquet    what a ranker is asked, ordered by split, time, user; where negatives were drawn,
                   of known items only
    user int32 (row of histories), prefix int32 (events of that user at strictly earlier times),
    item int32, category int32, label int8, time int64, split "train" | "valid" | "test"
items.parquet      row i describes item id i; row 0 is the unknown item
    item_id (original), category int32, category_id (original), train_count int64
dataset.json       what it is, how it was made, what was read and what was dropped of the input,
    counts, and the sha256 of each table; a function of input and options alone

Item and category ids: 0 is unknown (not seen in the training period), 1, 2, ... are the training
vocabulary, most frequent first.
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
from click_data.split import SPLITS

FORMAT = 1
HISTORIES = "histories.parquet"
SAMPLES = "samples.parquet"
ITEMS = "items.parquet"
INFO = "dataset.json"
TABLES = (HISTORIES, SAMPLES, ITEMS)
SAMPLE_COLUMNS = ("user", "prefix", "item", "category", "label", "time")

# What readers take from dataset.json.
_NEEDED = {
    **dict.fromkeys(("name", "digest"), str),
    **dict.fromkeys(("num_items", "num_categories", "counts.users"), int),
    **{f"counts.{what}.{split}": int for what in ("samples", "positives") for split in SPLITS},
    "signals": list,
}

# One row group keeps each column in one piece of memory when it is opened.
_ROW_GROUP = 2**26


@dataclass(frozen=True)
class Prepared:
    """The common form in memory: the three tables and what dataset.json says about them."""

    histories: pa.Table
    samples: pa.Table
    items: pa.Table
    info: dict[str, Any]


def write(prepared: Prepared, folder: Path, description: dict[str, Any]) -> dict[str, Any]:
    """Write the tables and dataset.json into an existing folder; returns dataset.json's content."""
    tables = (prepared.histories, prepared.samples, prepared.items)
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
    said = {
        HISTORIES: info["counts"]["users"],
        SAMPLES: sum(info["counts"]["samples"].values()),
        ITEMS: info["num_items"],
    }
    for name, number in said.items():
        rows = pq.read_metadata(folder / name).num_rows
        if rows != number:
            message = f"says {number:,} where {name} has {rows:,} rows; prepare the data set again"
            raise DataError(message, file=folder / INFO)
    lacking = set(info["signals"]) - set(pq.read_schema(folder / HISTORIES).names)
    if lacking:
        message = f"names signals that {HISTORIES} has not: {', '.join(sorted(lacking))}"
        raise DataError(f"{message}; prepare the data set again", file=folder / INFO)


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
        raise DataError(f"not a data set of format {FORMAT}; prepare it again", file=path)
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
    return "" if all(isinstance(name, str) for name in info["signals"]) else "signals"


def _write_table(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd", row_group_size=_ROW_GROUP)
