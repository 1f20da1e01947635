"""Columns of lists, and values by their place in a sorted list of them."""

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray


def encode(values: pl.Series, known: pl.Series) -> NDArray[np.int64]:
    """The place of each value among the `known` distinct ones; -1 for what is not there."""
    places = pl.DataFrame({"value": known, "place": pl.int_range(len(known), eager=True)})
    joined = values.alias("value").to_frame().join(
        places, on="value", how="left", maintain_order="left"
    )  # fmt: skip
    return joined["place"].fill_null(-1).to_numpy()


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
    return (encode(values, counted["value"]) + 1).astype(np.int32), len(counted) + 1


def rows_of(offsets: NDArray[np.int64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """The rows of some lists, one list after the other: `offsets` say where each begins."""
    lengths = np.diff(offsets)[chosen]
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(
        offsets[chosen] - ends + lengths, lengths
    )


def lists(values: NDArray, offsets: NDArray[np.int64]) -> pa.ListArray:
    """Values cut into lists at `offsets`."""
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def as_arrow(series: pl.Series) -> pa.Array:
    """As a plain int64 or string array (polars exports large or view strings)."""
    return series.to_arrow().cast(pa.string() if series.dtype == pl.String else pa.int64())
