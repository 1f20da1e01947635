"""Delimited text as a table of strings, with every line that cannot be read named."""

import csv
import functools
import json
import operator
import re
import shlex
import sys
import tempfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

import polars as pl

from click_data.arrays import give_back, held_once
from click_data.errors import DataError
from click_data.plain import UTF8, as_utf8, find_encoding, first_bytes, garbled, open_text
from click_data.table import Part, Problem, Table, refuse_repeated

_SEPARATORS = ",\t;|"
_PIECE = 2**20
_SAMPLE = 4096  # characters in which JSON shows
_BLANK = " \t\r\n\v\f"
_MAGIC = {  # of what people give as text; polars would unpack some of these
    b"PAR1": "Parquet",
    b"PK\x03\x04": "a zip, perhaps a spreadsheet",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"x\x01": "zlib",
    b"x\x9c": "zlib",
    b"x\xda": "zlib",
    b"SQLite": "SQLite",
}


def read_text(
    path: Path,
    *,
    wanted: Collection[str],
    separator: str | None = ",",
    usual: str = ",",
    names: Sequence[str] | None = None,
    encoding: str | None = None,
    hint: str = "",
    shown: str | None = None,
) -> Table:
    """Read delimited text, optionally gzipped, every column as strings.

    separator: None takes what gives `wanted` columns, the `usual` one first.
    encoding: None takes UTF-8, or what a byte order mark says.
    names: of the columns; without them the first line is the header.
    hint: what to do about bytes that are not of the encoding.

    Nothing is guessed from the first rows: columns are converted one by one later, where a bad
    value can be named. Lines with too many fields or bytes that are not of the encoding become
    problems of the table; blank lines are none, and no rows. A quote inside a field that does not
    begin with one stands for itself.
    """
    shown = shown or str(path)
    encoding = find_encoding(path, shown, encoding)
    refuse_other(path, shown, encoding)
    header = names is None
    what = f"bytes that are not {'UTF-8' if encoding == UTF8 else encoding}{hint}"
    problems: list[Problem] = []
    with as_utf8(path, encoding, shown) as plain:
        separator = separator or _find_separator(plain, usual, wanted)
        try:
            first, fields = next(records(plain, separator), (1, []))
            if header and any(map(garbled, fields)):
                raise DataError(what, file=shown, row=f"line {first}")
            if names is not None and 0 < len(fields) < len(names):
                have, need = (
                    [n for n in some if n in wanted] for some in (names[: len(fields)], names)
                )
                message = f"{len(have)} columns where {len(need)} belong: {', '.join(need)}"
                raise DataError(message, file=shown, row=f"line {first}")
            try:
                frame = _read(plain, separator, names, first)
                if _merges_fields(plain, separator, frame):
                    frame = None
            except pl.exceptions.NoDataError as error:
                raise DataError("the file is empty", file=shown) from error
            except pl.exceptions.PolarsError:
                frame = None
            if frame is None:
                frame, problems = _read_slowly(plain, separator, names, what)
        except (pl.exceptions.PolarsError, OSError, csv.Error) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            message = f"not readable as text with columns ({reason})"
            raise DataError(message, file=shown) from error
    # Where no column is one of those wanted, the caller has more to say.
    if len(frame) == 0 and (names or not fields or set(wanted) & set(fields)):
        raise DataError("the file is empty: it has no rows", file=shown)
    if header:
        refuse_repeated(fields, wanted, shown)
    columns = tuple(frame.columns)
    part = Part(shown, len(frame), lambda rows: _lines_of(path, separator, rows, header, encoding))
    frame = frame.select(name for name in columns if name in wanted)
    for name in frame.columns:  # one at a time lets go of what it replaces
        frame = frame.with_columns(held_once(frame[name]))
    give_back()
    other = None if encoding == UTF8 else encoding
    return Table(frame, (part,), columns, separator=separator, encoding=other, problems=problems)


def records(
    path: Path, separator: str, *, encoding: str = UTF8, strict: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Records of a text file as (line number where it starts, fields), blank ones left out.

    For small files and for naming lines in errors: slow, but it knows quoted line breaks. Raises
    csv.Error with the line, of quotes that do not match only if `strict`.
    """
    quoting = csv.QUOTE_NONE if _quote(separator) is None else csv.QUOTE_MINIMAL
    with open_text(path, encoding) as file:
        reader = csv.reader(file, delimiter=separator, quoting=quoting, strict=strict)
        line = 1
        try:
            for fields in reader:
                if any(fields[1:]) or (fields and fields[0].strip(_BLANK)):
                    yield line, fields
                line = reader.line_num + 1
        except csv.Error as error:
            raise csv.Error(f"line {line}: {error}") from error


def _find_separator(path: Path, usual: str, wanted: Collection[str]) -> str:
    """What separates the fields of a header: what gives wanted columns, the usual one first."""
    try:
        for separator in dict.fromkeys((usual, *_SEPARATORS)):
            if set(wanted) & set(_header(path, separator)):
                return separator
        header = _header(path, usual)
        return usual if len(header) > 1 else csv.Sniffer().sniff(header[0], _SEPARATORS).delimiter
    except (csv.Error, OSError, IndexError):
        return usual  # reading will say what is wrong


def _header(path: Path, separator: str) -> list[str]:
    return next(records(path, separator), (1, []))[1]


def refuse_other(path: Path, shown: str, encoding: str = UTF8) -> None:
    """Raise if a file is JSON, packed in another way than its name says, or no text."""
    magic = first_bytes(path, shown)
    kind = next((kind for mark, kind in _MAGIC.items() if magic.startswith(mark)), None)
    if kind:
        how = "name it so, as in .gz" if kind == "gzip" else "save it as text"
        raise DataError(f"is no text, but by its first bytes {kind}; {how}", file=shown)
    try:
        with open_text(path, encoding) as file:
            start = file.read(_SAMPLE)
    except (OSError, EOFError, UnicodeError, zlib.error) as error:
        raise DataError(f"cannot be read ({error})", file=shown) from error
    if json_start := re.match(r"\s*(\[?)\s*\{", start):
        reader = "read_json" if json_start[1] else "read_ndjson"
        old, new = json.dumps(shown), json.dumps(f"{shown}.parquet")
        # All rows say what type a column has: the first hundred may have none of its values.
        read = f"polars.{reader}({old}, infer_schema_length=None)"
        code = shlex.quote(f"import polars; {read}.write_parquet({new})")
        raise DataError(
            f"holds JSON; write it as Parquet first, as with: {sys.executable} -c {code}",
            file=shown,
        )
    if "\r" in start[:-1] and "\n" not in start:
        message = "its lines end in \\r alone; change that, as with: tr '\\r' '\\n' < OLD > NEW"
        raise DataError(message, file=shown)
    if "\0" in start:
        raise DataError(
            "holds zero bytes: not text, or UTF-16 without its mark, which --encoding utf-16-le "
            "of jagged prepare log reads",
            file=shown,
        )


def _read(
    path: Path, separator: str, names: Sequence[str] | None, first: int, *, lenient: bool = False
) -> pl.DataFrame:
    """All rows from line `first` on, but for blank ones, as `records` sees them."""
    frame = pl.read_csv(
        path,
        separator=separator,
        has_header=names is None,
        new_columns=None if names is None else list(names),
        quote_char=_quote(separator),
        infer_schema=False,
        skip_lines=first - 1,
        truncate_ragged_lines=lenient,
        encoding="utf8-lossy" if lenient else "utf8",
        glob=False,
    )
    begin, *others = frame.columns
    blank = frame[begin].fill_null("").str.strip_chars(_BLANK) == ""
    if not blank.any():
        return frame
    empty = [frame[name].fill_null("") == "" for name in others]
    return frame.filter(~functools.reduce(operator.and_, empty, blank))


def _merges_fields(path: Path, separator: str, frame: pl.DataFrame) -> bool:
    """Whether polars may have read several fields, or lines, as one.

    It loses count where a quote stands inside an unquoted field behind a quoted one, and may take
    what follows for that field: with the quote and a line break, or a separator of a row that is
    then too short.
    """
    if _quote(separator) is None or not _holds(path, b'"'):
        return False
    quote, line, fields = (pl.all().str.contains(x, literal=True) for x in ('"', "\n", separator))
    short = pl.col(frame.columns[-1]).is_null()
    merged = (quote & (line | (fields & short))).any()
    return any(map(any, frame.lazy().select(merged).collect().rows()))


def _holds(path: Path, byte: bytes) -> bool:
    with path.open("rb") as file:
        return any(byte in piece for piece in iter(lambda: file.read(_PIECE), b""))


def _read_slowly(
    path: Path, separator: str, names: Sequence[str] | None, what: str
) -> tuple[pl.DataFrame, list[Problem]]:
    """All rows as Python's csv module reads them, and their problems.

    It writes them once more, quoted where polars needs it, so that columns are made as ever.
    """
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "quoted"
        problems = _rewrite(path, plain, separator, names is None, what)
        return _read(plain, separator, names, 1, lenient=True), problems


def _quote(separator: str) -> str | None:
    """Text with tabs is not quoted, nor are the lines of GroupLens."""
    return '"' if separator in ",;|" else None


def _lines_of(
    path: Path, separator: str, rows: Sequence[int], header: bool, encoding: str
) -> list[str]:
    """Where some rows stand, ascending, in one walk over the file."""
    walk = records(path, separator, encoding=encoding)
    names, done = [], 0
    try:
        for row in rows:
            line, _ = next(islice(walk, row + header - done, None))
            names.append(f"line {line}")
            done = row + header + 1
    except (csv.Error, StopIteration):  # it reads less than polars does
        names += [f"row {row}" for row in rows[len(names) :]]
    return names


def _rewrite(path: Path, plain: Path, separator: str, header: bool, what: str) -> list[Problem]:
    """Write all records to `plain`; problems are lines with more fields than the first, and garbled
    ones (told by `what`)."""
    wide: list[int] = []
    bad: list[int] = []
    width, fields_of_wide = 0, 0
    quote = _quote(separator)
    with plain.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
        write = csv.writer(
            file,
            delimiter=separator,
            quotechar=quote,
            quoting=csv.QUOTE_NONE if quote is None else csv.QUOTE_MINIMAL,
            lineterminator="\n",
        ).writerow
        for number, (_, fields) in enumerate(records(path, separator, strict=True)):
            write(fields)
            width = width if number else len(fields)
            if any(map(garbled, fields)):
                bad.append(number - header)
            elif len(fields) > width:
                fields_of_wide = fields_of_wide or len(fields)
                wide.append(number - header)
    problems = []
    if wide:
        message = f"{fields_of_wide} fields where {width} belong"
        problems.append(Problem(message, rows=pl.Series(wide)))
    if bad:
        problems.append(Problem(what, rows=pl.Series(bad)))
    return problems
