"""Delimited text as a table of strings, with every line that cannot be read named."""

import codecs
import csv
import gzip
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

import polars as pl

from click_data.errors import DataError
from click_data.table import Part, Problem, Table, refuse_repeated

_SEPARATORS = ",\t;|"
_SAMPLE = 4096  # bytes in which an encoding shows
_MARKS = {  # the longer first: UTF-32's begins with UTF-16's
    b"\xff\xfe\x00\x00": "UTF-32",
    b"\x00\x00\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def read_text(
    path: Path,
    *,
    wanted: Collection[str],
    separator: str = ",",
    names: Sequence[str] | None = None,
    shown: str | None = None,
) -> Table:
    """Read delimited text (UTF-8, with or without a byte order mark, optionally gzipped), every
    column as strings.

    Without `names` the first line is the header. Nothing is guessed from the first rows: columns
    are converted one by one later, where a bad value can be named. Lines with too many fields or
    bytes that are not UTF-8 become problems of the table.
    """
    shown = shown or str(path)
    refuse_other(path, shown)
    header = names is None
    problems: list[Problem] = []
    try:
        try:
            frame = _read(path, separator, names)
        except pl.exceptions.NoDataError as error:
            raise DataError("the file is empty", file=shown) from error
        except pl.exceptions.PolarsError as error:
            problems, rows = _bad_lines(path, separator, shown, header)
            if not problems:
                raise
            frame = _read(path, separator, names, lenient=True)
            if len(frame) != rows:  # the two readers disagree: no line can be named
                raise error
    except (pl.exceptions.PolarsError, OSError, EOFError, csv.Error) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        message = f"not readable as text with columns ({reason})"
        raise DataError(message, file=shown) from error
    if len(frame) == 0:
        raise DataError("the file is empty: it has no rows", file=shown)
    if header:
        refuse_repeated(_header(path, separator), wanted, shown)
    columns = tuple(frame.columns)
    if names is not None and len(columns) < len(names):
        raise DataError(
            f"{len(columns)} columns where {len(names)} belong: {', '.join(names)}", file=shown
        )
    part = Part(shown, len(frame), lambda rows: _lines_of(path, separator, rows, header))
    frame = frame.select(name for name in columns if name in wanted)
    return Table(frame, (part,), columns, separator=separator, problems=problems)


def records(path: Path, separator: str, *, strict: bool = False) -> Iterator[tuple[int, list[str]]]:
    """Records of a text file as (line number where it starts, fields).

    For small files and for naming lines in errors: slow, but it knows quoted line breaks. Bytes
    that are not UTF-8 come as surrogates, see `is_utf8`. Raises csv.Error with the line, of quotes
    that do not match only if `strict`.
    """
    quoting = csv.QUOTE_NONE if _quote(separator) is None else csv.QUOTE_MINIMAL
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        reader = csv.reader(file, delimiter=separator, quoting=quoting, strict=strict)
        line = 1
        try:
            for fields in reader:
                yield line, fields
                line = reader.line_num + 1
        except csv.Error as error:
            raise csv.Error(f"line {line}: {error}") from error


def is_utf8(fields: Sequence[str]) -> bool:
    """Whether the fields of a record were UTF-8."""
    return not any("\udc80" <= char <= "\udcff" for field in fields for char in field)


def find_separator(path: Path, usual: str, wanted: Collection[str]) -> str:
    """What separates the fields of a header: what gives wanted columns, the usual one first."""
    refuse_other(path, str(path))
    try:
        for separator in dict.fromkeys((usual, *_SEPARATORS)):
            if set(wanted) & set(_header(path, separator)):
                return separator
        header = _header(path, usual)
        return usual if len(header) > 1 else csv.Sniffer().sniff(header[0], _SEPARATORS).delimiter
    except (csv.Error, OSError, EOFError, IndexError):
        return usual  # reading will say what is wrong


def _header(path: Path, separator: str) -> list[str]:
    return next(records(path, separator), (1, []))[1]


def refuse_other(path: Path, shown: str) -> None:
    """Raise if a file is JSON, in an encoding of two or four bytes a character, or no text."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            start = file.read(_SAMPLE)
    except (OSError, EOFError) as error:
        raise DataError(f"cannot be read ({error})", file=shown) from error
    found = next((name for mark, name in _MARKS.items() if start.startswith(mark)), None)
    if found:
        raise DataError(
            f"encoded in {found}; save it as UTF-8, as with: iconv -f {found} -t UTF-8 OLD > NEW",
            file=shown,
        )
    if start.removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"{", b"[{")):
        reader = "read_ndjson" if start.lstrip().startswith(b"{") else "read_json"
        raise DataError(
            f"holds JSON; write it as Parquet first, as with: python -c "
            f"\"import polars; polars.{reader}('OLD').write_parquet('NEW.parquet')\"",
            file=shown,
        )
    if b"\0" in start:
        raise DataError("holds zero bytes: not text, or UTF-16; save it as UTF-8 text", file=shown)


def _read(
    path: Path, separator: str, names: Sequence[str] | None, *, lenient: bool = False
) -> pl.DataFrame:
    return pl.read_csv(
        path,
        separator=separator,
        has_header=names is None,
        new_columns=None if names is None else list(names),
        quote_char=_quote(separator),
        infer_schema=False,
        truncate_ragged_lines=lenient,
        encoding="utf8-lossy" if lenient else "utf8",
    )


def _quote(separator: str) -> str | None:
    """Text with tabs is not quoted, nor are the lines of GroupLens."""
    return '"' if separator in ",;|" else None


def _lines_of(path: Path, separator: str, rows: Sequence[int], header: bool) -> list[str]:
    """Where some rows stand, ascending, in one walk over the file."""
    walk = records(path, separator)
    names, done = [], 0
    try:
        for row in rows:
            line, _ = next(islice(walk, row + header - done, None))
            names.append(f"line {line}")
            done = row + header + 1
    except (csv.Error, StopIteration):  # it reads less than polars does
        names += [f"row {row}" for row in rows[len(names) :]]
    return names


def _bad_lines(path: Path, separator: str, shown: str, header: bool) -> tuple[list[Problem], int]:
    """Lines with more fields than the first, and lines that are not UTF-8; how many rows."""
    wide: list[int] = []
    garbled: list[int] = []
    width, fields_of_wide, number = 0, 0, -1
    for number, (line, fields) in enumerate(records(path, separator, strict=True)):
        width = width if number else len(fields)
        if not is_utf8(fields):
            if number == 0 and header:
                raise DataError("bytes that are not UTF-8", file=shown, row=f"line {line}")
            garbled.append(number - header)
        elif len(fields) > width:
            fields_of_wide = fields_of_wide or len(fields)
            wide.append(number - header)
    problems = []
    if wide:
        message = f"{fields_of_wide} fields where {width} belong"
        problems.append(Problem(message, rows=pl.Series(wide)))
    if garbled:
        problems.append(Problem("bytes that are not UTF-8", rows=pl.Series(garbled)))
    return problems, number + 1 - header
