"""The columns of a prepared table as flat files, mapped into memory.

Parquet has to be decoded, and a long column that is decoded whole is memory that the system cannot
take back. Decoded a piece at a time, into files of nothing but numbers, it is pages of those files:
the system drops them when memory is short, and reads them again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from click_data.errors import DataError
from click_data.holding import abandoned, delete, held, unfinished

_VALUES = 2**20  # of a column that are decoded at once, about
_STARTS = "starts.flat"  # of lists


@dataclass(frozen=True)
class FlatTable:
    """A table in parts of consecutive rows, its columns flat.

    values: of each column, of lists one behind the other, as the table has them; of each part
    offsets int64 [rows + 1], where its lists begin, from 0. All of it read-only, from files.
    """

    values: dict[str, NDArray[Any]]
    offsets: tuple[NDArray[np.int64], ...]
    rows: tuple[slice, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(one.nbytes for one in (*self.values.values(), *self.offsets))

    def plain(self, name: str, part: int) -> NDArray[Any]:
        """A column of numbers."""
        return self.values[name][self.rows[part]]

    def lists(self, name: str, part: int) -> NDArray[Any]:
        """What the lists of a column hold."""
        first = sum(int(offsets[-1]) for offsets in self.offsets[:part])
        return self.values[name][first : first + int(self.offsets[part][-1])]


def flat_table(
    path: Path, *, lists: Sequence[str], plain: Sequence[str], parts: Sequence[int], cache: Path
) -> FlatTable:
    """Open a Parquet file whose digest names `cache` as flat files there, made on first use.

    Args:
        path: of the table.
        lists: columns of lists of numbers, which have as many values a row as the first of them.
        plain: columns of numbers.
        parts: rows of each part.
        cache: folder of what is made of data sets.

    Raises:
        DataError: the file cannot be read as such a table.
    """
    said = repr((path.name, [*lists], [*plain], [*parts]))
    folder = cache / f"flat-{hashlib.sha256(said.encode()).hexdigest()[:16]}"
    try:
        table = pq.ParquetFile(path, memory_map=True)
        kinds = {name: _kind(table.schema_arrow.field(name).type) for name in (*lists, *plain)}
        if not folder.is_dir():
            _make(folder, table, lists, plain, parts)
    except (pa.ArrowException, OSError, NotImplementedError) as error:
        raise DataError(f"not a readable Parquet file ({error})", file=path) from error
    starts = _mapped(folder / _STARTS, np.dtype(np.int64))
    ends = np.cumsum([0, *parts])
    return FlatTable(
        values={name: _mapped(folder / _file(name), kind) for name, kind in kinds.items()},
        # each part has one more start than rows
        offsets=tuple(
            starts[begin + part : end + part + 1]
            for part, (begin, end) in enumerate(pairwise(ends.tolist()))
        ),
        rows=tuple(slice(begin, end) for begin, end in pairwise(ends.tolist())),
    )


def _kind(of: pa.DataType) -> np.dtype:
    listed = pa.types.is_list(of) or pa.types.is_large_list(of)
    return np.dtype((of.value_type if listed else of).to_pandas_dtype())


def _file(name: str) -> str:
    return f"column {quote(name, safe=' ')}.flat"


def _mapped(path: Path, kind: np.dtype) -> NDArray[Any]:
    if path.stat().st_size == 0:  # nothing that could be mapped
        empty = np.empty(0, kind)
        empty.flags.writeable = False
        return empty
    # plainly an array: a view of a memmap would be one, and NumPy is slow with those
    return np.asarray(np.memmap(path, kind, "r"))


def _make(
    folder: Path,
    table: pq.ParquetFile,
    lists: Sequence[str],
    plain: Sequence[str],
    parts: Sequence[int],
) -> None:
    """Write all files whole or not at all; another process may do the same at this time."""
    for left in abandoned(folder.parent, folder.name, "new"):
        delete(left)
    new = unfinished(folder, "new")
    # Until it is held others would take it for abandoned, and delete it: it has its name from then.
    unheld = new.with_name(f"{new.name}.unheld")
    unheld.mkdir(parents=True, exist_ok=True)
    try:
        with held(unheld):
            unheld.rename(new)
            _write(new, table, lists, plain, parts)
            with suppress(OSError):  # another was first
                os.rename(new, folder)
    finally:
        delete(unheld)
        delete(new)


def _write(
    folder: Path,
    table: pq.ParquetFile,
    lists: Sequence[str],
    plain: Sequence[str],
    parts: Sequence[int],
) -> None:
    with ExitStack() as stack:
        files = {
            name: stack.enter_context((folder / _file(name)).open("wb"))
            for name in (*lists, *plain)
        }
        starts = stack.enter_context((folder / _STARTS).open("wb"))
        ends = _Starts(parts)
        for batch in table.iter_batches(_rows_at_once(table), use_threads=False):
            for name in plain:
                batch.column(name).to_numpy().tofile(files[name])
            for name in lists:
                batch.column(name).flatten().to_numpy().tofile(files[name])
            for some in ends.of(np.diff(batch.column(lists[0]).offsets.to_numpy())):
                some.tofile(starts)
        ends.last().tofile(starts)


def _rows_at_once(table: pq.ParquetFile) -> int:
    """Rows that hold about `_VALUES` values in the column that has most of them."""
    most, rows = 1, max(1, table.metadata.num_rows)
    for number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(number)
        most = max(most, *(group.column(at).num_values for at in range(group.num_columns)))
    return max(1, min(rows, _VALUES * rows // most))


class _Starts:
    """Where lists begin, and the last one of a part ends, from the lengths of lists in pieces."""

    def __init__(self, parts: Sequence[int]) -> None:
        self.left = list(parts)
        self.begin = 0

    def of(self, lengths: NDArray[np.integer]) -> Iterator[NDArray[np.int64]]:
        """Starts of so many lists, with the end of each part that ends in front of one."""
        while len(lengths):
            while self.left[0] == 0:
                yield self._end()
            some, lengths = lengths[: self.left[0]], lengths[self.left[0] :]
            ends = self.begin + np.cumsum(some, dtype=np.int64)
            yield ends - some
            self.begin, self.left[0] = int(ends[-1]), self.left[0] - len(some)

    def last(self) -> NDArray[np.int64]:
        """The ends of parts that are left."""
        return np.concatenate([self._end() for _ in range(len(self.left))])

    def _end(self) -> NDArray[np.int64]:
        end = np.array([self.begin])
        self.left.pop(0)
        self.begin = 0
        return end
