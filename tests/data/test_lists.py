"""Lists in tables, as rows of elements that still say where they stand."""

from pathlib import Path

import polars as pl
import pytest

from click_data import DataError
from click_data.sources.lists import elements
from click_data.table import Table, concatenate, read_parquet


def table(folder: Path, **lists: list[list[list[int] | None]]) -> Table:
    """One Parquet file for each entry of the columns' values."""
    tables = []
    for number in range(len(next(iter(lists.values())))):
        file = folder / f"part-{number}.parquet"
        kinds = dict.fromkeys(lists, pl.List(pl.Int64))
        pl.DataFrame({n: values[number] for n, values in lists.items()}, kinds).write_parquet(file)
        tables.append(read_parquet(file, wanted=lists))
    return concatenate(tables)


def test_elements_keep_their_rows(tmp_path: Path) -> None:
    inner, row = elements(table(tmp_path, a=[[[1, 2], [], None], [[3]]]), ["a"])
    assert inner.frame["a"].to_list() == [1, 2, 3]
    assert row.to_list() == [0, 0, 3]


def test_a_problem_names_file_row_and_element(tmp_path: Path) -> None:
    inner, _ = elements(table(tmp_path, a=[[[1], []], [[2], [3, 4]]]), ["a"])
    inner.note("is four", column="a", rows=pl.Series([3]), raw=inner.frame["a"])
    with pytest.raises(DataError) as caught:
        inner.refuse()
    assert str(caught.value) == f"{tmp_path}/part-1.parquet: column a, row 1, element 1: 4 is four"


def test_no_elements_have_the_type_of_elements(tmp_path: Path) -> None:
    inner, row = elements(table(tmp_path, a=[[[], None]]), ["a"])
    assert (inner.frame["a"].dtype, len(inner.frame), len(row)) == (pl.Int64, 0, 0)


def test_lists_of_one_row_have_one_length(tmp_path: Path) -> None:
    uneven = table(tmp_path, a=[[[1, 2], [3]]], b=[[[1, 2], [3, 4]]])
    with pytest.raises(DataError, match="column b, row 1: the list has another length than that"):
        elements(uneven, ["a", "b"])


def test_arrays_of_one_length_are_lists(tmp_path: Path) -> None:
    file = tmp_path / "fixed.parquet"
    kind = pl.Array(pl.Int64, 2)
    pl.DataFrame({"a": [[1, 2], [3, 4]]}, {"a": kind}).write_parquet(file)
    inner, row = elements(read_parquet(file, wanted=("a",)), ["a"])
    assert (inner.frame["a"].to_list(), row.to_list()) == ([1, 2, 3, 4], [0, 0, 1, 1])
