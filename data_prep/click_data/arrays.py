"""Columns of lists, order and places of values: in pieces, so that a long log needs little memory
beside its columns."""

from typing import TypeVar

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from click_data.pieces import pieces

_T = TypeVar("_T", bound=np.generic)
_IN_VIEW = 12  # bytes of text that a view has room for (Arrow's layout of string views)


def encode(values: pl.Series, known: pl.Series) -> NDArray[np.int32]:
    """The place of each value among the `known` distinct ones; -1 for what is not there."""
    places = pl.DataFrame({"value": known, "place": pl.int_range(len(known), eager=True)})
    found = np.empty(len(values), np.int32)
    for some in pieces(len(values)):
        piece = values.slice(some.start, some.stop - some.start).alias("value").to_frame()
        joined = piece.join(places, on="value", how="left", maintain_order="left")
        found[some] = joined["place"].fill_null(-1).to_numpy()
    return found


def gather(values: NDArray[_T], index: NDArray[np.integer]) -> NDArray[_T]:
    """values[index] of a long index, which NumPy would copy as int64."""
    found = np.empty(len(index), values.dtype)
    for some in pieces(len(index)):
        found[some] = values[index[some]]
    return found


def stable_order(*keys: NDArray[np.integer]) -> NDArray[np.int64]:
    """The order that sorts by the last key, then by the one before it, and so on: `np.lexsort`.

    Faster, and with one array of work beside the order: a key and its row are sorted as one number
    where they fit into 63 bits.
    """
    order: NDArray[np.int64] | None = None
    for key in keys:
        key = key if order is None else key[order]
        if len(key) == 0 or not (key[1:] < key[:-1]).any():
            continue
        again = _order_of(key)
        order = again if order is None else order[again]
    return np.arange(len(keys[0])) if order is None else order


def _order_of(key: NDArray[np.integer]) -> NDArray[np.int64]:
    least, bits = int(key.min()), (len(key) - 1).bit_length()
    if (int(key.max()) - least) >> (63 - bits):
        return np.argsort(key, kind="stable")
    packed = key.astype(np.int64)
    packed -= least
    packed <<= bits
    packed |= np.arange(len(key))
    packed.sort()
    packed &= (1 << bits) - 1
    return packed


def frequent_first(
    values: pl.Series, weight: NDArray[np.int64], known: NDArray[np.bool_]
) -> tuple[NDArray[np.int32], int]:
    """Codes int32 of categorical values, and how many there are.

    0 is unknown (null, or no value of the `known` rows); 1, 2, ... are the values of these, by
    their total weight, and where that is the same, by themselves.
    """
    frame = pl.DataFrame({"value": values, "weight": weight, "known": known})
    counted = frame.filter(pl.col("known") & pl.col("value").is_not_null())
    counted = counted.group_by("value").agg(pl.col("weight").sum())
    counted = counted.sort("weight", "value", descending=[True, False])
    return encode(values, counted["value"]) + np.int32(1), len(counted) + 1


def rows_of(offsets: NDArray[np.int64], chosen: NDArray[np.integer]) -> NDArray[np.int64]:
    """The rows of some lists, one list after the other: `offsets` say where each begins."""
    starts = offsets[chosen]
    lengths = offsets[chosen + 1] - starts
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)


def lists(values: NDArray, offsets: pa.Array) -> pa.ListArray:
    """Values cut into lists at `offsets`, int32."""
    return pa.ListArray.from_arrays(offsets, pa.array(values))


def text_of(name: str, values: pa.Array) -> pl.Series:
    """Text, of which each distinct value is held once and a row is a view: ids come again."""
    coded = values.dictionary_encode()
    return pl.Series(name, coded.dictionary).gather(pl.Series(coded.indices))


def held_once(text: pl.Series) -> pl.Series:
    """The same text, held as `text_of` does, a piece at a time."""
    if not (text.str.len_bytes() > _IN_VIEW).any():
        return text
    parts = [
        text_of(text.name, text.slice(some.start, some.stop - some.start).to_arrow())
        for some in pieces(len(text))
    ]
    return pl.concat(parts, rechunk=True)


def as_arrow(series: pl.Series) -> pa.Array:
    """As a plain int64 or string array (polars exports large or view strings)."""
    return series.to_arrow().cast(pa.string() if series.dtype == pl.String else pa.int64())


def give_back() -> None:
    """Give the system what Arrow keeps of memory that is free: NumPy and polars cannot use it."""
    pa.default_memory_pool().release_unused()
