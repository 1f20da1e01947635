"""Columns of unknown kind as what a ranker is given: signals, contexts, features of items."""

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from click_data import columns
from click_data.errors import DataError
from click_data.table import UNREADABLE, Table, read_parquet

MAX_VALUES = 16  # of a categorical signal


def signals(table: Table, names: Iterable[str], *, prefix: str = "") -> dict[str, pl.Series]:
    """Float32 columns "signal NAME" of the table's `names`, null where a value is missing.

    Of text, and of integers that are more than 0 and 1, each value becomes a 0/1 signal of its own,
    NAME=VALUE. prefix: what the table's names begin with and the signals' do not.
    """
    out: dict[str, pl.Series] = {}
    for column in names:
        name, raw = column.removeprefix(prefix), table.frame[column]
        if raw.dtype.is_float() or raw.dtype == pl.Boolean or _flag(raw):
            out[f"signal {name}"] = numbers(table, column)
            continue
        values = columns.ids(table, column, optional=True)
        found = values.drop_nulls().unique().sort()
        if len(found) > MAX_VALUES:
            message = (
                f"{len(found):,} values, where each is a signal of its own and {MAX_VALUES} can "
                "be; numbers that are amounts are taken as such if the column is of floats"
            )
            table.note(message, column=column)
            continue
        for value in found:
            out[f"signal {name}={value}"] = (values == value).cast(pl.Float32).fill_null(0)
    return out


def _flag(raw: pl.Series) -> bool:
    return raw.dtype.is_integer() and bool(raw.is_in((0, 1)).all())


def numbers(table: Table, column: str) -> pl.Series:
    """Float32 values, null where one is missing or not a number."""
    raw = table.frame[column]
    raw = raw.fill_nan(None) if raw.dtype.is_float() else raw
    missing = raw.is_null()
    filled = raw.cast(pl.Int8) if raw.dtype == pl.Boolean else raw
    whole = replace(table, frame=table.frame.with_columns(filled.fill_null(0).alias(column)))
    return columns.numbers(whole, column).cast(pl.Float32).set(missing, None)


def with_known(events: pl.DataFrame) -> pl.DataFrame:
    """Missing signals as 0, beside a 0/1 signal "NAME known" for each that misses some."""
    some = [n for n in events.columns if n.startswith("signal ") and events[n].null_count()]
    known = (pl.col(name).is_not_null().cast(pl.Float32).alias(f"{name} known") for name in some)
    return events.with_columns(known).with_columns(pl.col(some).fill_null(0))


def context(table: Table, column: str) -> pl.Series:
    """A context of requests: floats as Float32, 0 where one is missing; else categorical ids."""
    if table.frame[column].dtype.is_float():
        return numbers(table, column).fill_null(0)
    return ids(table, column)


def ids(table: Table, column: str) -> pl.Series:
    """Categorical values as Int64 or String, null where one is missing; true is 1."""
    if table.frame[column].dtype == pl.Boolean:
        whole = table.frame.with_columns(pl.col(column).cast(pl.Int8))
        table = replace(table, frame=whole)
    return columns.ids(table, column, optional=True)


def items(
    path: Path, *, item_id: str = "item_id", wanted: Collection[str] | None = None
) -> pl.DataFrame | None:
    """Features of items from a Parquet file of them; None if there is no such file.

    Columns of integers, text and 0/1 are categorical, those of floats dense; of other kinds none
    is taken. A name loses its "_id". wanted: those to take, where they are there; None: all.
    """
    if not path.is_file():
        return None
    simple = simple_columns(path)
    taken = [name for name in simple if wanted is None or name in (item_id, *wanted)]
    table = read_parquet(path, wanted=taken)
    table.require(item_id)
    out = {"item_id": columns.ids(table, item_id)}
    again = ~out["item_id"].is_first_distinct() & out["item_id"].is_not_null()
    message = "is the item of an earlier row"
    table.note(message, column=item_id, rows=again.arg_true(), raw=table.frame[item_id])
    for column, kind in table.frame.drop(item_id).schema.items():
        name = column.removesuffix("_id")
        if kind.is_float():
            out[f"dense {name}"] = numbers(table, column).fill_null(0)
        else:
            out[f"item {name}"] = ids(table, column)
    table.refuse()
    return pl.DataFrame(out)


def simple_columns(path: Path) -> list[str]:
    """The columns of a Parquet file that hold one number or text a row."""
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    kinds += (pa.types.is_string, pa.types.is_large_string, pa.types.is_dictionary)
    schema = parquet_schema(path)
    return [field.name for field in schema if any(is_kind(field.type) for is_kind in kinds)]


def parquet_schema(path: Path) -> pa.Schema:
    """The columns of a Parquet file."""
    try:
        return pq.read_schema(path)
    except UNREADABLE as error:
        raise DataError(f"not a readable Parquet file, truncated? ({error})", file=path) from error
