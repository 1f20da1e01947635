"""Your own click log, as Parquet or CSV."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq

from click_data import columns
from click_data.checks import note_duplicates, note_unsorted, without_duplicates
from click_data.errors import DataError
from click_data.events import ClickLog, label_column, signal_column
from click_data.negatives import POOL
from click_data.plain import check_encoding, find_encoding, refuse_absent
from click_data.schema import file_digest
from click_data.table import UNREADABLE, Table, concatenate, read_parquet
from click_data.text import read_text, refuse_other
from click_data.time_units import UNITS

REQUIRED = ("user_id", "item_id", "timestamp")
OPTIONAL = ("label", "category")
_RESERVED = ("user_id", "item", "time", "label")  # columns of histories.parquet
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_JSON = (".jsonl", ".ndjson", ".json")
_TOLD = 10  # bad rows that are told one by one where they are left out


@dataclass(frozen=True)
class LogOptions:
    """How to read a log.

    columns: the file's names, by ours (user_id, item_id, timestamp, label, category), where they
        differ.
    signals: further numeric columns to carry in the histories as float32.
    time_unit: "s", "ms", "us" or "ns": what numeric timestamps count since 1970, and what every
        time is stored in (fractions are cut off). Dates and ISO 8601 text are UTC by default.
    negatives: label-0 candidates to draw for each positive event, out of what other users did at
        that time (see `click_data.negatives`). None: 1 if there is no label column, else 0.
    pool: how many events, at least, are of that time.
    sort: accept times that go backwards within a user.
    drop_duplicates: keep the first of events with the same user, item and time.
    drop_bad_rows: leave out rows that cannot be read, instead of refusing the file.
    separator: of the fields of text, one character; None: what gives the columns that are wanted
        (comma, tab, semicolon or bar).
    encoding: of text, by Python's name; None: UTF-8, or what a byte order mark says.
    """

    columns: dict[str, str] = field(default_factory=dict)
    signals: tuple[str, ...] = ()
    time_unit: str = "s"
    negatives: int | None = None
    pool: int = POOL
    sort: bool = False
    drop_duplicates: bool = False
    drop_bad_rows: bool = False
    separator: str | None = None
    encoding: str | None = None


def load(path: Path | None, options: LogOptions, seed: int) -> ClickLog:
    """Read a log; without a label column every event is a positive (label 1).

    Rows may mix users in any way, but one user's must be in time order unless `options.sort`;
    the order of one user's events at one time is kept. Raises DataError about all bad rows at once,
    unless `options.drop_bad_rows`.
    """
    del seed  # negatives are drawn once the training vocabulary is known
    assert path is not None
    names = _names(options)
    wanted = {*names.values(), *options.signals}
    files = log_files(path, needed={names[name] for name in REQUIRED})
    form = {"separator": options.separator, "encoding": options.encoding}
    table = concatenate([read_log(file, wanted=wanted, **form) for file in files])
    hint = "; name yours with --column, as in --column user_id=uid"
    table.require(*(names[name] for name in REQUIRED), hint=hint)
    table.require(*(names[name] for name in options.columns), *options.signals)

    labelled = names["label"] in table.columns
    every_one = pl.repeat(1, len(table.frame), dtype=pl.Int8, eager=True)
    category = {}
    if names["category"] in table.columns:
        category = {"item category": columns.ids(table, names["category"], optional=True)}
    events = pl.DataFrame(
        {
            "user_id": columns.ids(table, names["user_id"]),
            "item_id": columns.ids(table, names["item_id"]),
            "time": columns.times(table, names["timestamp"], unit=options.time_unit),
            label_column("label"): (
                columns.labels(table, names["label"]) if labelled else every_one
            ),
            **category,
            **{
                signal_column(name): columns.numbers(table, name).cast(pl.Float32)
                for name in options.signals
            },
        }
    ).with_row_index("row")
    dropped: dict[str, Any] = {}
    hint = _drop_hint(table)
    if options.drop_bad_rows:
        events, dropped = _without_bad(table, events)
    if not options.sort:
        note_unsorted(table, events, names["timestamp"], hint="; --sort accepts this")
    if not options.drop_duplicates:
        note_duplicates(table, events, hint="; --drop-duplicates keeps the first")
    table.refuse(hint=hint)
    if options.drop_duplicates:
        before = len(events)
        events = without_duplicates(events)
        dropped |= {"rows": len(table.frame), "duplicates": before - len(events)}

    negatives = options.negatives
    if negatives is None:
        negatives = 0 if labelled else 1
    label = events[label_column("label")]
    if negatives == 0 and label.n_unique() == 1:
        message = f"every label is {label[0]}: nothing to tell apart"
        if label[0] == 1:
            message += "; --negatives 1 draws items of other users at that time as label 0"
        table.fail(message, column=names["label"])
    named = path if path.stem != "interactions" else path.resolve().parent
    return ClickLog(
        name=named.resolve().name.removesuffix(".gz").rsplit(".", 1)[0],
        events=events.drop("row"),
        time_unit=options.time_unit,
        inputs=tuple({"file": file.name, "sha256": file_digest(file)} for file in files),
        negatives=negatives,
        pool=options.pool,
        options={"negatives": negatives},
        read=_told(table, names, options.signals),
        dropped=dropped,
    )


def _drop_hint(table: Table) -> str:
    """What to do about bad rows, if there are some and rows are all that is bad."""
    if not table.problems or any(problem.rows is None for problem in table.problems):
        return ""
    bad, rows = len(table.bad_rows()), len(table.frame)
    return f"; --drop-bad-rows leaves out the bad rows, {bad:,} of {rows:,}"


def _without_bad(table: Table, events: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Events of the good rows, and what to tell of the others; raises if there are no good ones."""
    bad = table.bad_rows()
    if len(bad) == len(table.frame):
        table.refuse()
    told = table.describe(bad[:_TOLD].to_list())
    table.problems.clear()
    events = events.join(bad.to_frame("row"), on="row", how="anti", maintain_order="left")
    # A word among numbers makes ids text; it may be gone.
    ids = [
        columns.as_integers(events[name])
        for name in ("user_id", "item_id", "item category")
        if name in events.columns
    ]
    dropped = {"rows": len(table.frame), "bad_rows": len(bad), "first_bad_rows": told}
    return events.with_columns(ids), dropped


def _told(table: Table, names: dict[str, str], signals: tuple[str, ...]) -> dict[str, Any]:
    """What was read, for dataset.json."""
    read = {ours: theirs for ours, theirs in names.items() if theirs in table.columns}
    unread = [name for name in table.columns if name not in {*read.values(), *signals}]
    form = {"separator": table.separator, "encoding": table.encoding}
    return {"columns": read, "unread": unread, **{k: v for k, v in form.items() if v}}


def _names(options: LogOptions) -> dict[str, str]:
    """The file's column for each of ours; checks the options on the way."""
    known = (*REQUIRED, *OPTIONAL)
    for name in options.columns:
        if name not in known:
            raise DataError(f"--column {name}=...: not one of {', '.join(known)}")
    for name in options.signals:
        if name in _RESERVED:
            raise DataError(f"--signal {name}: the name is taken by a column of the histories")
        if options.signals.count(name) > 1:
            raise DataError(f"--signal {name}: given twice")
    if options.time_unit not in UNITS:
        raise DataError(f"--time-unit {options.time_unit}: not one of {', '.join(UNITS)}")
    if options.negatives is not None and options.negatives < 0:
        raise DataError(f"--negatives {options.negatives}: must not be negative")
    if options.pool < 2:
        raise DataError(f"--pool {options.pool}: must be 2 events at least")
    separator = options.separator
    if separator is not None and (len(separator.encode()) != 1 or separator in '"\r\n'):
        raise DataError(f"--separator {separator!r}: not one character (of ASCII)")
    if options.encoding is not None:
        check_encoding(options.encoding)
    names = {name: options.columns.get(name, name) for name in known}
    _refuse_shared(names, given=options.columns)
    return names


def _refuse_shared(names: dict[str, str], *, given: dict[str, str]) -> None:
    """Raise if one column of the file would be read as two of ours; categories may be ids."""
    alone = {ours: theirs for ours, theirs in names.items() if ours != "category"}
    for ours, theirs in given.items():
        others = [name for name in alone if name != ours and names[name] == theirs]
        if others and ours in alone:
            raise DataError(
                f"--column {ours}={theirs}: {theirs} is read as {others[0]} already; say which "
                f"column that is, with --column {others[0]}=..., or rename one in the file"
            )


def log_files(path: Path, *, needed: set[str]) -> list[Path]:
    """The files of a log: the path itself, or the Parquet files of a folder by name.

    Raises DataError if not all files of a folder have the `needed` columns.
    """
    refuse_absent(path)
    if not path.is_dir():
        return [path]
    interactions = path / "interactions.parquet"  # may have other tables beside it
    files = [interactions] if interactions.is_file() else sorted(path.glob("*.parquet"))
    if not files:
        text = sorted(file.name for file in path.iterdir() if _kind(file) in (*_SEPARATORS, *_JSON))
        hint = f"; name one of its files: {', '.join(text)}" if text else ""
        raise DataError(f"no Parquet files in this folder{hint}", file=path)
    whole = [file for file in files if needed <= _column_names(file, unreadable=needed)]
    if 0 < len(whole) < len(files):
        raise DataError(
            f"holds several tables; name the one of events, of those that have "
            f"{', '.join(sorted(needed))}: {', '.join(map(str, whole))}",
            file=path,
        )
    return files


def read_log(
    path: Path, *, wanted: set[str], separator: str | None = None, encoding: str | None = None
) -> Table:
    """The `wanted` columns of one file, by what its name ends in; of text see `read_text`."""
    kind = _kind(path)
    if kind == ".parquet":
        for option, given in (("separator", separator), ("encoding", encoding)):
            if given is not None:
                raise DataError(f"is Parquet, which needs no --{option}", file=path)
        return read_parquet(path, wanted=wanted)
    if separator is None and kind not in _SEPARATORS:
        refuse_other(path, str(path), find_encoding(path, str(path), encoding))
        raise DataError(
            "not .parquet, .csv or .tsv (.gz), nor a folder of Parquet; other text is read with "
            "--separator",
            file=path,
        )
    return read_text(
        path,
        wanted=wanted,
        separator=separator,
        usual=_SEPARATORS.get(kind, ","),
        encoding=encoding,
        hint="; --encoding of jagged prepare log reads others, as in --encoding cp1252",
    )


def _kind(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _column_names(path: Path, *, unreadable: set[str]) -> set[str]:
    """The columns of a Parquet file; `unreadable` of one that reading will refuse."""
    try:
        return set(pq.read_schema(path).names)
    except UNREADABLE:
        return unreadable
