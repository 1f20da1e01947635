"""How many events each user has: all that measuring needs of a log, small enough to carry along.

`history_lengths` reads them out of whatever there is; `jagged lengths` writes them as a Parquet
file of one column for a machine that has no copy of the log.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from click_data import schema
from click_data.errors import DataError
from click_data.holding import abandoned, delete, held, unfinished

LENGTH, USER = "length", "user_id"
_NOT_EVENTS = (
    "a row a user (or a session), not a row an event; give the log itself, "
    "or the folder of a prepared data set"
)


def history_lengths(source: str | Path) -> NDArray[np.int64]:
    """Events of each user, users without events left out; int64 [U].

    Args:
        source: a prepared data set; or a log as `jagged prepare log` takes it, a row an event,
            with a column `user_id`; or a Parquet file that `write_lengths` wrote.

    Raises:
        DataError: it is none of these; the line says what is missing or what it looks like.
    """
    path = Path(source)
    if schema.is_prepared(path):
        schema.verify(path, schema.read_info(path))
        prepared = path / schema.HISTORIES
        return _positive(_read(prepared, "item", lambda items: items.value_lengths()), path)
    if path.suffix == ".parquet" and path.is_file():
        columns = _arrow_schema(path).names
        if LENGTH in columns and USER not in columns:  # a log may have a length of something else
            return _positive(_read(path, LENGTH), path)
    return _count_events(path)


def _count_events(path: Path) -> NDArray[np.int64]:
    """Rows of each user of a log, users in the order in which they first come."""
    # polars, which who only reads a prepared data set or a file of lengths does not need
    from click_data import columns
    from click_data.sources.log import log_files, read_log
    from click_data.table import concatenate

    files = log_files(path, needed={USER})
    for file in files:
        if file.suffix == ".parquet":
            _refuse_lists(file)
    table = concatenate([read_log(file, wanted={USER}) for file in files])
    if USER not in table.columns:
        table.fail(f"has neither a column `{LENGTH}` nor `{USER}`")
    users = columns.ids(table, USER).to_frame()
    table.refuse()
    lengths = users.group_by(USER, maintain_order=True).len()["len"].to_numpy().astype(np.int64)
    if len(lengths) == len(users):
        raise DataError(f"every user has one row: it looks like {_NOT_EVENTS}", file=path)
    return lengths


def _refuse_lists(path: Path) -> None:
    for column in _arrow_schema(path):
        kind = column.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind):
            message = f"its rows hold lists: it looks like {_NOT_EVENTS}"
            raise DataError(message, file=path, column=column.name)


def write_lengths(source: str | Path, path: Path) -> NDArray[np.int64]:
    """Write the lengths of `source` to a Parquet file of one column, and return them.

    Raises DataError as `history_lengths`, or if the file cannot be written; then none is left.
    """
    lengths = history_lengths(source)
    new = unfinished(path, "new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in abandoned(path.parent, path.name, "new"):  # by a process that was killed
            delete(left)
        new.touch()
        with held(new):
            pq.write_table(pa.table({LENGTH: lengths.astype(np.int32)}), new, compression="zstd")
            new.replace(path)
    except OSError as error:
        raise DataError(f"cannot be written ({error})", file=path) from error
    finally:
        with suppress(OSError):
            new.unlink(missing_ok=True)
    return lengths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jagged lengths`."""
    parser.add_argument(
        "sources",
        nargs="+",
        type=Path,
        metavar="SOURCE",
        help="a prepared data set's folder, or a log with a row an event and a column user_id: "
        ".parquet, .csv, .tsv, or a folder of Parquet files",
    )
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        metavar="DIR",
        help="each becomes DIR/NAME.parquet, by the name of the folder or file",
    )


def run(arguments: argparse.Namespace) -> int:
    """`jagged lengths`."""
    for path, source in _targets(arguments.sources, arguments.out).items():
        found = write_lengths(source, path)
        print(f"{path}: {len(found):,} users, mean {found.mean():.1f}, longest {found.max():,}")
    return 0


def _targets(sources: Sequence[Path], out: Path) -> dict[Path, Path]:
    """The file to write -> its source; refused where one would overwrite another or a source."""
    targets: dict[Path, Path] = {}
    for source in sources:
        path = out / f"{_name(source)}.parquet"
        if path in targets:
            raise DataError(f"{targets[path]} and {source} would both be written here", file=path)
        targets[path] = source
    for path in targets:
        if path.resolve() in {source.resolve() for source in sources}:
            raise DataError("would be overwritten; choose another --out", file=path)
    return targets


def _name(source: Path) -> str:
    """What a source is called: a file `interactions` by its folder, as `jagged prepare` does."""
    path = source.resolve()
    if path.is_dir():
        return path.stem
    plain = Path(path.name.removesuffix(".gz")).stem
    return path.parent.stem if plain == "interactions" else plain


def _arrow_schema(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"not a readable Parquet file, truncated? ({error})", file=path) from error


def _read(
    path: Path, name: str, count: Callable[[Any], Any] = lambda column: column
) -> NDArray[np.int64]:
    try:
        column = pq.read_table(path, columns=[name]).column(name).combine_chunks()
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"not readable ({error})", file=path, column=name) from error
    return np.asarray(count(column), dtype=np.int64)


def _positive(lengths: NDArray[np.int64], path: Path) -> NDArray[np.int64]:
    if not (lengths > 0).any():
        raise DataError("nobody in it has an event", file=path)
    return lengths[lengths > 0]
