"""Conversions of one input column each; a bad value is an error that names its row."""

import polars as pl

from click_data.table import Table

UNITS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


def ids(table: Table, column: str, *, optional: bool = False) -> pl.Series:
    """Ids as Int64 or String; text becomes integers only if every value reads back the same.

    With `optional`, a null is let through (it will be the unknown id).
    """
    raw = table.frame[column]
    if raw.dtype in (pl.Categorical, pl.Enum):
        raw = raw.cast(pl.String)
    if raw.dtype.is_float():
        missing = raw.is_null() | raw.is_nan()
        raw = raw.set(missing, None)
    if raw.dtype == pl.String:
        missing = raw.is_null() | (raw == "")
        raw = raw.set(missing, None)
    if not optional:
        _fail_first(table, column, raw.is_null(), "no id: the value is missing")
    if raw.dtype == pl.String:
        numbers = raw.cast(pl.Int64, strict=False)
        same = (numbers.cast(pl.String) == raw) | raw.is_null()
        return numbers if same.fill_null(False).all() else raw
    if not raw.dtype.is_numeric():
        table.fail(f"ids must be integers or strings, not {raw.dtype}", column=column)
    whole = raw.cast(pl.Int64, strict=False)
    bad = raw.is_not_null() & (whole.is_null() | (whole.cast(raw.dtype) != raw))
    _fail_first(table, column, bad, "is not an integer id", raw)
    return whole


def times(table: Table, column: str, *, unit: str = "s") -> pl.Series:
    """Times as Int64 in whole `unit`s since 1970 (fractions are cut off), none negative.

    Numbers are taken to be in `unit`; dates and ISO 8601 text are UTC unless they say otherwise.
    """
    raw = table.frame[column]
    _fail_first(table, column, raw.is_null(), "no time: the value is missing")
    if raw.dtype == pl.String:
        numbers = raw.cast(pl.Int64, strict=False)
        if numbers.null_count():
            numbers = numbers.fill_null(_floor(raw.cast(pl.Float64, strict=False)))
        out = numbers if numbers.null_count() < len(raw) else _clock(_iso(raw), unit)
        message = "is neither a number nor an ISO 8601 date"
    elif raw.dtype == pl.Date or isinstance(raw.dtype, pl.Datetime):
        out, message = _clock(raw, unit), "is not a time"
    elif raw.dtype.is_numeric():
        out = _floor(raw) if raw.dtype.is_float() else raw.cast(pl.Int64, strict=False)
        message = "is not a time"
    else:
        table.fail(f"times must be numbers or dates, not {raw.dtype}", column=column)
    _fail_first(table, column, out.is_null(), message, raw)
    _fail_first(table, column, out < 0, "is a negative time", raw)
    return out


def numbers(table: Table, column: str) -> pl.Series:
    """Finite Float64 values (text is read as numbers)."""
    raw = table.frame[column]
    _fail_first(table, column, raw.is_null(), "no number: the value is missing")
    if raw.dtype != pl.String and raw.dtype != pl.Boolean and not raw.dtype.is_numeric():
        table.fail(f"values must be numbers, not {raw.dtype}", column=column)
    out = raw.cast(pl.Float64, strict=False)
    bad = out.is_null() | ~out.is_finite().fill_null(False)
    _fail_first(table, column, bad, "is not a finite number", raw)
    return out


def labels(table: Table, column: str) -> pl.Series:
    """Labels as Int8, 0 or 1."""
    out = numbers(table, column)
    bad = (out != 0) & (out != 1)
    _fail_first(table, column, bad, "is not a label: 0 or 1", table.frame[column])
    return out.cast(pl.Int8)


def _floor(values: pl.Series) -> pl.Series:
    return values.floor().cast(pl.Int64, strict=False)


def _iso(text: pl.Series) -> pl.Series:
    """Dates and times in ISO 8601 as UTC microseconds; null for anything else."""
    # Only year first: of "01/02/2020" polars would guess which is the month.
    dated = text.set(~text.str.contains(r"^\d{4}-\d\d-\d\d"), None)
    zoned = dated.str.contains(r":\d\d(\.\d+)?(Z|[+-]\d\d:?\d\d)$")
    # polars infers one form from the first value, so those with a zone are read apart.
    with_zone = dated.set(~zoned, None).str.to_datetime("%+", strict=False, time_unit="us")
    without = dated.set(zoned, None).str.to_datetime(strict=False, time_unit="us", time_zone="UTC")
    return with_zone.fill_null(without) if zoned.any() else without


def _clock(values: pl.Series, unit: str) -> pl.Series:
    if unit == "s":
        return values.dt.epoch("us") // UNITS["us"]
    return values.dt.epoch(unit)  # pyright: ignore[reportArgumentType]


def _fail_first(
    table: Table, column: str, bad: pl.Series, message: str, raw: pl.Series | None = None
) -> None:
    """Raise about the first true row of `bad`, quoting its value where `raw` is given."""
    row = bad.arg_max() if bad.any() else None
    if row is None:
        return
    value = "" if raw is None else f"{raw[row]!r} "
    table.fail(f"{value}{message}", column=column, row=row)
