"""How many events each user has: all that measuring needs of a log, small enough to carry along.

`history_lengths` reads them out of whatever there is; `jagged lengths` writes them as a Parquet
file of one column for a machine that has no copy of the log.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from click_data import schema
from click_data.errors import DataError

EVENTS = "interactions.parquet"
LENGTH, USER = "length", "user_id"


def history_lengths(source: str | Path) -> NDArray[np.int64]:
    """Events of each user, users without events left out; int64 [U].

    Args:
        source: a prepared data set; or a folder with `interactions.parquet`, or a Parquet file,
            with a row an event and a column `user_id`; or a Parquet file that `write_lengths`
            wrote.

    Raises:
        DataError: it is none of these; the line says what is missing.
    """
    path = Path(source)
    if path.is_dir():
        prepared = path / schema.HISTORIES
        if (path / schema.INFO).is_file():
            return _positive(_read(prepared, "item", lambda items: items.value_lengths()))
        path /= EVENTS
    try:
        columns = pq.read_schema(path).names
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"no history lengths here ({error})", file=path) from error
    if LENGTH in columns:
        return _positive(_read(path, LENGTH))
    if USER in columns:
        return _positive(_read(path, USER, lambda users: users.value_counts().field("counts")))
    raise DataError(f"has neither a column `{LENGTH}` nor `{USER}`", file=path)


def write_lengths(source: str | Path, path: Path) -> NDArray[np.int64]:
    """Write the lengths of `source` to a Parquet file of one column, and return them."""
    lengths = history_lengths(source)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({LENGTH: lengths.astype(np.int32)}), path, compression="zstd")
    return lengths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jagged lengths`."""
    parser.add_argument(
        "sources", nargs="+", type=Path, metavar="SOURCE", help="a data set's folder, or a file"
    )
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="each becomes DIR/NAME.parquet"
    )


def run(arguments: argparse.Namespace) -> int:
    """`jagged lengths`."""
    for source in arguments.sources:
        path = arguments.out / f"{source.resolve().stem}.parquet"
        found = write_lengths(source, path)
        print(f"{path}: {len(found):,} users, mean {found.mean():.1f}, longest {found.max():,}")
    return 0


def _read(
    path: Path, name: str, count: Callable[[Any], Any] = lambda column: column
) -> NDArray[np.int64]:
    try:
        column = pq.read_table(path, columns=[name]).column(name).combine_chunks()
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"not readable ({error})", file=path, column=name) from error
    return np.asarray(count(column), dtype=np.int64)


def _positive(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    if not (lengths > 0).any():
        raise DataError("nobody in it has an event")
    return lengths[lengths > 0]
