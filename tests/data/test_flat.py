"""Flat files of a table's columns: what Parquet holds, in any parts, made once and whole."""

import itertools
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from click_data import DataError, flat, open_dataset, prepare
from click_data.flat import FlatTable, flat_table
from click_data.holding import abandoned, delete

LISTS = [[1, 2], [], [3], [], [4, 5, 6], [7]]


def write(path: Path, lists: list[list[int]] = LISTS) -> Path:
    rows = len(lists)
    table = pa.table(
        {
            "item": pa.array(lists, pa.list_(pa.int32())),
            "feature a/b": pa.array(lists, pa.list_(pa.float32())),
            "user": pa.array(range(rows), pa.int32()),
        }
    )
    pq.write_table(table, path)
    return path


def opened(path: Path, parts: list[int]) -> FlatTable:
    return flat_table(
        path, lists=["item", "feature a/b"], plain=["user"], parts=parts, cache=path.parent / "flat"
    )


# A machine with much else to do is no slow test.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1),
    st.lists(st.floats(0, 1), max_size=3),
    st.integers(1, 5),
)
def test_each_part_has_its_rows(
    tmp_path_factory: pytest.TempPathFactory,
    lists: list[list[int]],
    cuts: list[float],
    values: int,
) -> None:
    path = write(tmp_path_factory.mktemp("flat") / "table.parquet", lists)
    ends = [0, *sorted(int(cut * len(lists)) for cut in cuts), len(lists)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flat, "_VALUES", values)  # so that lists and parts are cut by pieces
        table = opened(path, np.diff(ends).tolist())
    for part, (begin, end) in enumerate(itertools.pairwise(ends)):
        assert table.plain("user", part).tolist() == [*range(begin, end)]
        offsets, found = table.offsets[part], table.lists("item", part)
        assert offsets[0] == 0
        assert [found[a:b].tolist() for a, b in itertools.pairwise(offsets)] == lists[begin:end]
        assert table.lists("feature a/b", part).tolist() == found.tolist()


def test_columns_are_mapped_and_cannot_be_written(tmp_path: Path) -> None:
    table = opened(write(tmp_path / "table.parquet"), [2, 4])
    for values in (table.lists("item", 1), table.plain("user", 0), table.offsets[1]):
        assert not values.flags.writeable
        assert not values.flags.owndata
    assert table.nbytes == 7 * 8 + 6 * 4 + (3 + 5) * 8


def test_files_are_made_once_and_what_was_not_finished_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "table.parquet")

    def killed(*_: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(flat, "_rows_at_once", killed)
        with pytest.raises(KeyboardInterrupt):
            opened(path, [6])
    assert list((tmp_path / "flat").iterdir()) == []
    first = opened(path, [6]).lists("item", 0)
    (folder,) = (tmp_path / "flat").iterdir()
    left = tmp_path / "flat" / f".{folder.name}.4000000.new"
    left.mkdir()
    monkeypatch.setattr(flat, "_write", lambda *_: pytest.fail("made again"))
    assert opened(path, [6]).lists("item", 0).tolist() == first.tolist()
    monkeypatch.undo()
    folder.rename(tmp_path / "elsewhere")
    opened(path, [6])
    assert list((tmp_path / "flat").iterdir()) == [folder]


def test_columns_of_something_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"item": [[{"a": 1}]], "feature a/b": [[1.0]], "user": [1]}), path)
    with pytest.raises(DataError, match="not a readable Parquet file"):
        opened(path, [1])


def test_scratch_is_in_no_folder_and_goes_with_its_array(tmp_path: Path) -> None:
    out = prepare("synthetic", out=tmp_path / "log", users=5, items=9, categories=3, events=60)
    dataset = open_dataset(out)
    before = sorted(tmp_path.rglob("*"))
    made = dataset.scratch(5, np.float32)
    made[:] = range(5)
    assert made.tolist() == [0, 1, 2, 3, 4]
    assert len(dataset.scratch(0, np.int64)) == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_nobody_takes_what_is_being_made_for_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may look in the moment before it is held."""
    path, hold = write(tmp_path / "table.parquet", [[1, 2], [3]]), flat.held

    def late(made: Path) -> AbstractContextManager[None]:
        (folder,) = {one.name.split(".")[1] for one in made.parent.iterdir()}
        for left in abandoned(made.parent, folder, "new"):
            delete(left)
        return hold(made)

    monkeypatch.setattr(flat, "held", late)
    assert opened(path, [2]).plain("user", 0).tolist() == [0, 1]
    assert [one.name[:5] for one in (tmp_path / "flat").iterdir()] == ["flat-"]
