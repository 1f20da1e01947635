"""Conversions of one input column each; a bad value becomes null and a problem of the table."""

from datetime import UTC, datetime

import polars as pl

from click_data.table import Table
from click_data.time_units import UNITS

_LAST_YEAR = 2100
_WEB = datetime(1990, 1, 1, tzinfo=UTC).timestamp()  # no log of clicks is older
_END = datetime(_LAST_YEAR + 1, 1, 1, tzinfo=UTC).timestamp()
# How programs spell "no value" in text: the list of pandas' `read_csv`, and Hive's.
_NO_VALUE = (
    *("#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("<NA>", "N/A", "NA", "NULL", "NaN", "None", "n/a", "nan", "null", "\\N"),
)


def ids(table: Table, column: str, *, optional: bool = False, integers: bool = False) -> pl.Series:
    """Ids as Int64 or String; text becomes integers only if every value reads back the same.

    With `optional`, a missing value is let through as null (it will be the unknown id). With
    `integers`, text that is not a plain integer is bad.
    """
    raw = _spelled_out(table.frame[column])
    if raw.dtype.is_float():
        raw = raw.set(raw.is_nan().fill_null(False), None)
    if raw.dtype == pl.String:
        return _text_ids(table, column, raw, optional=optional, integers=integers)
    if not optional:
        _note(table, column, raw.is_null(), "no id: the value is missing")
    if not raw.dtype.is_numeric():
        table.note(f"ids must be integers or strings, not {raw.dtype}", column=column)
        return _nothing(table)
    whole = raw.cast(pl.Int64, strict=False)
    bad = raw.is_not_null() & (whole.is_null() | (whole.cast(raw.dtype) != raw))
    _note(table, column, bad, "is not an integer id", raw)
    return whole.set(bad.fill_null(True), None)


def as_integers(values: pl.Series) -> pl.Series:
    """Text as Int64 if every value reads back the same; else, and what is no text, as it is."""
    if values.dtype != pl.String:
        return values
    whole = values.cast(pl.Int64, strict=False)
    return whole if _reads_back(values, whole).all() else values


def times(table: Table, column: str, *, unit: str = "s") -> pl.Series:
    """Times as Int64 in whole `unit`s since 1970 (fractions are cut off), in 1970 to 2100.

    Numbers are taken to be in `unit`; dates and ISO 8601 text are UTC unless they say otherwise.
    """
    raw = _spelled_out(table.frame[column])
    _note(table, column, raw.is_null(), "no time: the value is missing")
    if raw.dtype == pl.String:
        count = raw.cast(pl.Float64, strict=False)
        if count.null_count() > raw.null_count():
            clock = _iso(raw)
            if clock.null_count() < count.null_count():
                return _from_clock(table, column, raw, clock, unit, "is not an ISO 8601 date")
        return _from_count(table, column, raw, unit, "is neither a number nor an ISO 8601 date")
    if raw.dtype == pl.Date or isinstance(raw.dtype, pl.Datetime):
        return _from_clock(table, column, raw, raw, unit, "is not a time")
    if not raw.dtype.is_numeric():
        table.note(f"times must be numbers or dates, not {raw.dtype}", column=column)
        return _nothing(table)
    return _from_count(table, column, raw, unit, "is not a time")


def numbers(table: Table, column: str) -> pl.Series:
    """Float64 values that are finite in float32, too (text is read as numbers)."""
    raw = _spelled_out(table.frame[column])
    _note(table, column, raw.is_null(), "no number: the value is missing")
    if raw.dtype != pl.String and raw.dtype != pl.Boolean and not raw.dtype.is_numeric():
        table.note(f"values must be numbers, not {raw.dtype}", column=column)
        return _nothing(table).cast(pl.Float64)
    out = raw.cast(pl.Float64, strict=False)
    finite = out.is_finite().fill_null(False)
    _note(table, column, raw.is_not_null() & ~finite, "is not a finite number", raw)
    fits = out.cast(pl.Float32).is_finite().fill_null(False)
    _note(table, column, finite & ~fits, "is beyond the range of float32, 3.4e38", raw)
    return out.set(~fits, None)


def labels(table: Table, column: str) -> pl.Series:
    """Labels as Int8, 0 or 1."""
    out = numbers(table, column)
    bad = ((out != 0) & (out != 1)).fill_null(False)
    _note(table, column, bad, "is not a label: 0 or 1", table.frame[column])
    return out.set(bad, None).cast(pl.Int8)


def _spelled_out(raw: pl.Series) -> pl.Series:
    return raw.cast(pl.String) if raw.dtype in (pl.Categorical, pl.Enum) else raw


def _text_ids(
    table: Table, column: str, raw: pl.Series, *, optional: bool, integers: bool
) -> pl.Series:
    empty = raw.is_null() | (raw == "")
    spelled = raw.is_in(_NO_VALUE).fill_null(False)
    padded = (raw.str.strip_chars() != raw).fill_null(False)
    if not optional:
        _note(table, column, empty, "no id: the value is missing")
        _note(table, column, spelled, "is no id: it stands for a missing value", raw)
    _note(table, column, padded, "has spaces around it: it would be another id", raw)
    raw = raw.set(empty | spelled | padded, None)
    if not integers:
        return as_integers(raw)
    whole = raw.cast(pl.Int64, strict=False)
    same = _reads_back(raw, whole)
    _note(table, column, ~same, "is not an integer id", raw)
    return whole.set(~same, None)


def _reads_back(text: pl.Series, whole: pl.Series) -> pl.Series:
    return (whole.cast(pl.String) == text).fill_null(False) | text.is_null()


def _from_count(table: Table, column: str, raw: pl.Series, unit: str, message: str) -> pl.Series:
    """Times from numbers, which are compared as floats: what is beyond int64 is late, too."""
    count = raw.cast(pl.Float64, strict=False)
    known = count.is_finite().fill_null(False)
    early, late = known & (count < 0), known & (count >= _END * UNITS[unit])
    _note(table, column, raw.is_not_null() & ~known, message, raw)
    _note(table, column, early, "is a negative time", raw)
    _note(table, column, late, _in_another_unit(count.filter(late), unit), raw)
    out = raw.cast(pl.Int64, strict=False) if not raw.dtype.is_float() else _floor(raw)
    return out.fill_null(_floor(count)).set(~known | early | late, None)


def _in_another_unit(late: pl.Series, unit: str) -> str:
    message = f"is after the year {_LAST_YEAR} as {unit} since 1970"
    for other, parts in UNITS.items():
        if len(late) and _WEB * parts <= late[0] < _END * parts:
            day = datetime.fromtimestamp(late[0] / parts, UTC).date()
            return f"{message}; it is {day} with: jagged prepare log --time-unit {other}"
    return f"{message}; --time-unit of jagged prepare log says what such numbers count"


def _from_clock(
    table: Table, column: str, raw: pl.Series, clock: pl.Series, unit: str, message: str
) -> pl.Series:
    """Times from dates; years are compared first, since nanoseconds end in the year 2262."""
    unknown = clock.is_null() & raw.is_not_null()
    year = clock.dt.year()
    early, late = (year < 1970).fill_null(False), (year > _LAST_YEAR).fill_null(False)
    _note(table, column, unknown, message, raw)
    _note(table, column, early, "is a negative time", raw)
    _note(table, column, late, f"is after the year {_LAST_YEAR}", raw)
    known = clock.set(early | late, None)
    if unit == "s":
        return known.dt.epoch("us") // UNITS["us"]
    return known.dt.epoch(unit)  # pyright: ignore[reportArgumentType]


def _floor(values: pl.Series) -> pl.Series:
    return values.floor().cast(pl.Int64, strict=False)


def _iso(text: pl.Series) -> pl.Series:
    """Dates and times in ISO 8601 as UTC microseconds; null for anything else."""
    # Only year first: of "01/02/2020" polars would guess which is the month.
    dated = text.set(~text.str.contains(r"^\d{4}-\d\d-\d\d"), None)
    # As BigQuery and PostgreSQL write zones: 02:30:00 UTC, 02:30:00+02.
    if dated.str.contains(r":\d\d(\.\d+)?( ?UTC| Z| [+-][\d:]+|[+-]\d\d)$").any():
        dated = dated.str.replace(r" ?(?:Z|UTC)$", "Z")
        dated = dated.str.replace(r"(:\d\d(?:\.\d+)?) ?([+-]\d\d)$", "${1}${2}:00")
        dated = dated.str.replace(r" ([+-]\d\d:?\d\d)$", "${1}")
    zoned = dated.str.contains(r":\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d)$")
    # polars infers one form from the first value, so those with a zone are read apart.
    with_zone = dated.set(~zoned, None).str.to_datetime("%+", strict=False, time_unit="us")
    without = dated.set(zoned, None).str.to_datetime(strict=False, time_unit="us", time_zone="UTC")
    return with_zone.fill_null(without) if zoned.any() else without


def _nothing(table: Table) -> pl.Series:
    """In the place of a column that cannot be read at all."""
    return pl.repeat(None, len(table.frame), dtype=pl.Int64, eager=True)


def _note(
    table: Table, column: str, bad: pl.Series, message: str, raw: pl.Series | None = None
) -> None:
    table.note(message, column=column, rows=bad.fill_null(False).arg_true(), raw=raw)
