"""Input files as tables that can still say where each row came from."""

import csv
import gzip
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NoReturn

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from click_data.errors import DataError

_SHOWN = 20  # column names that an error lists


@dataclass(frozen=True)
class Part:
    """One file of a table: the name to show, its number of rows, and how to name row `i`."""

    file: str
    rows: int
    name_row: Callable[[int], str]


@dataclass(frozen=True)
class Table:
    """The wanted columns of one or more files, rows in file order.

    `columns` are all names in the (first) file; `metadata` is a Parquet schema's own.
    """

    frame: pl.DataFrame
    parts: tuple[Part, ...]
    columns: tuple[str, ...]
    metadata: dict[str, str]

    @property
    def file(self) -> str:
        return self.parts[0].file

    def fail(self, message: str, *, column: str | None = None, row: int | None = None) -> NoReturn:
        """Raise a `DataError` about row `row` (counted from 0 over all parts) of this table."""
        if row is None:
            raise DataError(message, file=self.file, column=column)
        part = 0
        while row >= self.parts[part].rows:
            row -= self.parts[part].rows
            part += 1
        found = self.parts[part]
        raise DataError(message, file=found.file, column=column, row=found.name_row(row))

    def require(self, *names: str, hint: str = "") -> None:
        """Raise unless every name is a column."""
        for name in names:
            if name not in self.columns:
                have = ", ".join(self.columns[:_SHOWN]) + ", ..." * (len(self.columns) > _SHOWN)
                self.fail(f"missing; the file has: {have}{hint}", column=name)


def read_parquet(path: Path, *, wanted: Collection[str], shown: str | None = None) -> Table:
    """Read those of the `wanted` columns that a Parquet file has."""
    shown = shown or str(path)
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            names = [name for name in schema.names if name in wanted]
            arrow = file.read(columns=names)
            rows = file.metadata.num_rows
        frame = pl.DataFrame(arrow) if names else pl.DataFrame()
    except (pa.ArrowException, pl.exceptions.PolarsError, OSError) as error:
        raise DataError(f"not a readable Parquet file, truncated? ({error})", file=shown) from error
    if rows == 0:
        raise DataError("the file is empty: it has no rows", file=shown)
    metadata = {
        key.decode(errors="replace"): value.decode(errors="replace")
        for key, value in (schema.metadata or {}).items()
    }
    part = Part(shown, rows, lambda row: f"row {row}")
    return Table(frame, (part,), tuple(schema.names), metadata)


def read_text(
    path: Path,
    *,
    wanted: Collection[str],
    separator: str = ",",
    names: Sequence[str] | None = None,
    shown: str | None = None,
) -> Table:
    """Read delimited text (UTF-8, optionally gzipped), every column as strings.

    Without `names` the first line is the header. Nothing is guessed from the first rows: columns
    are converted one by one later, where a bad value can be named.
    """
    shown = shown or str(path)
    header = names is None
    try:
        frame = pl.read_csv(
            path,
            separator=separator,
            has_header=header,
            new_columns=None if names is None else list(names),
            quote_char='"' if separator == "," else None,
            infer_schema=False,
        )
    except pl.exceptions.NoDataError as error:
        raise DataError("the file is empty", file=shown) from error
    except (pl.exceptions.PolarsError, OSError) as error:
        _fail_at_bad_line(path, separator, shown)
        raise DataError(f"not readable as text with columns ({error})", file=shown) from error
    if len(frame) == 0:
        raise DataError("the file is empty: it has no rows", file=shown)
    columns = tuple(frame.columns)
    if names is not None and len(columns) < len(names):
        raise DataError(
            f"{len(columns)} columns where {len(names)} belong: {', '.join(names)}", file=shown
        )
    part = Part(
        shown, len(frame), lambda row: f"line {_line_of(path, separator, row + int(header))}"
    )
    frame = frame.select(name for name in columns if name in wanted)
    return Table(frame, (part,), columns, {})


def concatenate(tables: Sequence[Table]) -> Table:
    """Rows of several files with the same columns, in the order given."""
    first = tables[0]
    for table in tables[1:]:
        if table.frame.schema != first.frame.schema:
            table.fail(f"columns or their types differ from those of {first.file}")
    parts = tuple(part for table in tables for part in table.parts)
    frame = pl.concat([table.frame for table in tables])
    return Table(frame, parts, first.columns, first.metadata)


def _records(path: Path, separator: str):
    """Records of a text file as (line number where it starts, fields).

    Only for naming lines in errors: slow, but it knows quoted line breaks.
    """
    quoting = csv.QUOTE_MINIMAL if separator == "," else csv.QUOTE_NONE
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", newline="", encoding="utf-8", errors="surrogateescape") as file:
        reader = csv.reader(file, delimiter=separator, quoting=quoting)
        line = 1
        for fields in reader:
            yield line, fields
            line = reader.line_num + 1


def _line_of(path: Path, separator: str, record: int) -> int:
    return next(islice(_records(path, separator), record, None))[0]


def _fail_at_bad_line(path: Path, separator: str, shown: str) -> None:
    """Raise naming the first line with too many fields or bytes that are not UTF-8, if any."""
    width: int | None = None
    try:
        for line, fields in _records(path, separator):
            width = len(fields) if width is None else width
            if len(fields) > width:
                message = f"{len(fields)} fields where {width} belong"
                raise DataError(message, file=shown, row=f"line {line}")
            if any("\udc80" <= char <= "\udcff" for field in fields for char in field):
                raise DataError("bytes that are not UTF-8", file=shown, row=f"line {line}")
    except (OSError, EOFError, csv.Error):
        return  # the reader's own message is all there is to say
