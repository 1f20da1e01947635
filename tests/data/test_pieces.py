"""Long logs are worked on in pieces: what is prepared does not depend on where they end."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from impression_logs import timed_log, write
from polars.testing import assert_frame_equal

from click_data import DataError, pieces, prepare
from click_data.arrays import encode, gather, stable_order
from click_data.schema import read_info
from click_data.sources.log import read_log


def long_log(path: Path, *, labelled: bool) -> Path:
    """Clicks in the order of time, with some twice, text ids, and categories that differ."""
    rng = np.random.default_rng(0)
    time = np.sort(rng.integers(0, 2000, 1500))
    columns: dict[str, Any] = {
        "user_id": [f"u{user}" for user in rng.integers(0, 40, 1500)],
        "item_id": rng.integers(0, 60, 1500),
        "timestamp": time,
        "category": [[None, "a", "b"][n] for n in rng.integers(0, 3, 1500)],
    }
    columns |= {"label": rng.integers(0, 2, 1500)} if labelled else {}
    frame = pl.DataFrame(columns)
    pl.concat([frame, frame[100:200]]).write_parquet(path)
    return path


def digest(source: str, path: Path, out: Path, **options: Any) -> str:
    return read_info(prepare(source, from_path=path, out=out, **options))["digest"]


@pytest.mark.parametrize("size", [31, 700])
@pytest.mark.parametrize("negatives", [0, 1, 3])
def test_a_log_in_pieces(
    size: int, negatives: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = long_log(tmp_path / "log.parquet", labelled=negatives == 0)
    options = {"negatives": negatives, "pool": 30, "sort": True, "drop_duplicates": True}
    whole = digest("log", path, tmp_path / "whole", **options)
    in_pieces(monkeypatch, size)
    assert digest("log", path, tmp_path / "parts", **options) == whole


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_text_that_comes_again_is_held_once(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"log.{kind}"
    some = [None, "", *(f"{number:064x}" for number in range(9))]  # as sha256 writes them
    ids = pl.Series("user_id", some * 100)
    log = pl.DataFrame([ids, pl.Series("item_id", ["short"] * len(ids))])
    log.write_parquet(path, row_group_size=500) if kind == "parquet" else log.write_csv(path)
    in_pieces(monkeypatch, 300)
    read = read_log(path, wanted={"user_id", "item_id"}).frame
    assert_frame_equal(read, log)
    held = read["user_id"].to_arrow(compat_level=pl.CompatLevel.newest()).get_total_buffer_size()
    views = 16 * len(ids)
    assert views < held < views + 9 * 64 * 10  # of 900 ids


def test_lists_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(timed_log(), tmp_path / "log")
    options = {"contexts": ("device",), "features": ("price",), "signals": ("action",)}
    whole = digest("impressions", path, tmp_path / "whole", **options)
    in_pieces(monkeypatch, 4)
    assert digest("impressions", path, tmp_path / "parts", **options) == whole


def test_bad_rows_are_told_in_the_order_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = long_log(tmp_path / "log.parquet", labelled=True)
    told = []
    for size in (pieces.PIECE, 50):
        in_pieces(monkeypatch, size)
        with pytest.raises(DataError) as caught:
            prepare("log", from_path=path, out=tmp_path / "out")
        told.append(str(caught.value))
    assert told[0] == told[1]
    assert "row 1500: the same user, item and time as in an earlier row" in told[0]
    assert "(and 99 more rows)" in told[0]


def in_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(pieces, "PIECE", size)


@settings(deadline=None)
@given(
    st.lists(st.tuples(*[st.integers(-3, 3) | st.integers(-(2**62), 2**62)] * 2), min_size=1),
    st.integers(1, 9),
)
def test_order_is_that_of_lexsort(rows: list[tuple[int, int]], size: int) -> None:
    keys = tuple(np.array(column, np.int64) for column in zip(*rows, strict=True))
    order = stable_order(*keys)
    assert order.tolist() == np.lexsort(keys).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", size)
        assert gather(keys[0], order).tolist() == keys[0][order].tolist()
        known = pl.Series(sorted({first for first, _ in rows if first % 2}), dtype=pl.Int64)
        places = {value: place for place, value in enumerate(known)}
        found = encode(pl.Series(keys[0]), known).tolist()
        assert found == [places.get(first, -1) for first, _ in rows]


@given(st.lists(st.integers(0, 5)), st.integers(1, 9))
def test_pieces_of_lists_are_all_of_them_once(lengths: list[int], size: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE", size)
        parts = list(pieces.pieces_of(offsets))
    assert [n for part in parts for n in range(part.start, part.stop)] == [*range(len(lengths))]
    for part in parts:
        held = int(offsets[part.stop] - offsets[part.start])
        assert held < size + 5 + 1 or part.stop - part.start == 1
