"""Input files as tables that can still say where each row came from."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from click_data import pieces
from click_data.arrays import give_back, text_of
from click_data.errors import DataError

UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)  # what broken Parquet raises
_SHOWN = 20  # column names that an error lists
_LONGEST = 60  # characters of a value or a name that an error quotes


@dataclass(frozen=True)
class Part:
    """One file of a table: the name to show, its number of rows, and how to name some of them."""

    file: str
    rows: int
    name_rows: Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True)
class Problem:
    """What is wrong with some rows, or (rows None) with a column; `raw` has values to quote."""

    message: str
    column: str | None = None
    rows: pl.Series | None = None
    raw: pl.Series | None = None

    def say(self, row: int | None) -> str:
        if self.raw is None or row is None:
            return self.message
        return f"{_shortened(repr(self.raw[row]))} {self.message}"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


@dataclass(frozen=True)
class Table:
    """The wanted columns of one or more files, rows in file order.

    `columns` are all names in the (first) file; `metadata` is a Parquet schema's own, `separator`
    and `encoding` (None for UTF-8) are those of text. `problems` gathers what is wrong, so that one
    error tells all of it.
    """

    frame: pl.DataFrame
    parts: tuple[Part, ...]
    columns: tuple[str, ...]
    metadata: dict[str, str] = field(default_factory=dict)
    separator: str | None = None
    encoding: str | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def file(self) -> str:
        return self.parts[0].file

    def fail(self, message: str, *, column: str | None = None) -> NoReturn:
        """Raise a `DataError` about this table as a whole or one column of it."""
        raise DataError(message, file=self.file, column=column)

    def note(
        self,
        message: str,
        *,
        column: str | None = None,
        rows: pl.Series | None = None,
        raw: pl.Series | None = None,
    ) -> None:
        """Keep a problem for `refuse`; `rows` (ascending, from 0 over all parts) may be none."""
        if rows is None or len(rows):
            self.problems.append(Problem(message, column, rows, raw))

    def refuse(self, *, hint: str = "") -> None:
        """Raise one `DataError` about all problems, each with its first row and how many follow."""
        told, last = [], None
        for problem in self.problems:
            row = None if problem.rows is None else int(problem.rows[0])
            file, place = self._places([row])[0] if row is not None else (self.file, None)
            more = len(problem.rows) - 1 if problem.rows is not None else 0
            message = problem.say(row) + (
                f" (and {more:,} more row{'s' * (more > 1)})" if more else ""
            )
            shown = None if file == last else file
            told.append(str(DataError(message, file=shown, column=problem.column, row=place)))
            last = file
        if told:
            raise DataError("; ".join(told) + hint)

    def bad_rows(self) -> pl.Series:
        """The rows with a problem, ascending; raises as `refuse` if a whole column has one."""
        if any(problem.rows is None for problem in self.problems):
            self.refuse()
        found = [problem.rows for problem in self.problems if problem.rows is not None]
        empty = pl.Series(dtype=pl.get_index_type())
        return pl.concat([empty, *(rows.cast(empty.dtype) for rows in found)]).unique().sort()

    def describe(self, rows: Sequence[int]) -> list[str]:
        """What is wrong with each of these rows, and where it stands."""
        lines = []
        for row, (file, place) in zip(rows, self._places(rows), strict=True):
            said = [
                f"{problem.column}: {problem.say(row)}" if problem.column else problem.say(row)
                for problem in self.problems
                if problem.rows is not None and row in problem.rows
            ]
            lines.append(f"{Path(file).name}: {place}: {'; '.join(said)}")
        return lines

    def require(self, *names: str, hint: str = "") -> None:
        """Raise unless every name is a column."""
        missing = [name for name in names if name not in self.columns]
        if missing:
            some = [_shortened(n if n == n.strip() else repr(n)) for n in self.columns[:_SHOWN]]
            have = ", ".join(some) + ", ..." * (len(self.columns) > _SHOWN)
            also = f", and so are: {', '.join(missing[1:])}" if missing[1:] else ""
            self.fail(f"missing{also}; the file has: {have}{hint}", column=missing[0])

    def _places(self, rows: Sequence[int]) -> list[tuple[str, str]]:
        """The file and the place in it of each row, ascending."""
        places: list[tuple[str, str]] = []
        start = 0
        for part in self.parts:
            mine = [row - start for row in rows if start <= row < start + part.rows]
            places += [(part.file, name) for name in part.name_rows(mine)] if mine else []
            start += part.rows
        return places


def read_parquet(path: Path, *, wanted: Collection[str], shown: str | None = None) -> Table:
    """Read those of the `wanted` columns that a Parquet file has."""
    shown = shown or str(path)
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            refuse_repeated(schema.names, wanted, shown)
            names = [name for name in schema.names if name in wanted]
            frame = pl.DataFrame([_column(file, name, shown) for name in names])
            rows = file.metadata.num_rows
    except UNREADABLE as error:
        raise DataError(f"not a readable Parquet file, truncated? ({error})", file=shown) from error
    give_back()
    if rows == 0:
        raise DataError("the file is empty: it has no rows", file=shown)
    metadata = {
        key.decode(errors="replace"): value.decode(errors="replace")
        for key, value in (schema.metadata or {}).items()
    }
    part = Part(shown, rows, lambda some: [f"row {row}" for row in some])
    return Table(frame, (part,), tuple(schema.names), metadata)


def _column(file: pq.ParquetFile, name: str, shown: str) -> pl.Series:
    """One column; text in pieces, so that what is read is not there twice."""
    if not _is_text(file.schema_arrow.field(name).type):
        return _series(file.read(columns=[name]).column(name), name, shown)
    batches = file.iter_batches(pieces.PIECE, columns=[name])
    parts = [_series(batch.column(name), name, shown) for batch in batches]
    return pl.concat(parts, rechunk=True) if parts else pl.Series(name, dtype=pl.String)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _series(column: pa.Array | pa.ChunkedArray, name: str, shown: str) -> pl.Series:
    try:
        column.validate(full=True)  # polars trusts that offsets and indices are in range
        if not _is_text(column.type):
            return pl.Series(name, column)
        return text_of(name, column)
    except (pl.exceptions.PolarsError, pa.ArrowException) as error:
        reason = str(error).partition(".")[0]
        message = f"cannot be read as {column.type} ({reason})"
        raise DataError(message, file=shown, column=name) from error


def refuse_repeated(names: Sequence[str], wanted: Collection[str], shown: str) -> None:
    """Raise if one of the `wanted` columns is there twice: nobody knows which is meant."""
    for name in names:
        if name in wanted and names.count(name) > 1:
            message = f"{names.count(name)} columns have this name; rename all but one"
            raise DataError(message, file=shown, column=name)


def concatenate(tables: Sequence[Table]) -> Table:
    """Rows of several files with the same columns, in the order given."""
    first = tables[0]
    if len(tables) == 1:
        return first
    problems: list[Problem] = []
    start = 0
    for table in tables:
        if table.frame.schema != first.frame.schema:
            table.fail(
                f"columns or their types differ from those of {first.file}; where a folder holds "
                "several tables, name the one of events"
            )
        problems += [
            replace(problem, rows=None if problem.rows is None else problem.rows + start)
            for problem in table.problems
        ]
        start += len(table.frame)
    parts = tuple(part for table in tables for part in table.parts)
    frame = pl.concat([table.frame for table in tables])
    return replace(first, frame=frame, parts=parts, problems=problems)
