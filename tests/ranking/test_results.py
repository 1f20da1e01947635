"""The results table: rows, statuses, whole and deterministic files."""

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jagged_ranking import results

ROW: dict[str, Any] = {
    "op": "attention",
    "provider": "jagged",
    "workload": "A",
    "mode": "forward",
    "metric": "latency",
    "unit": "ms",
}


def test_samples_decide_value_and_quantiles() -> None:
    row = results.row(**ROW, samples=[5.0, 1.0, 2.0, 3.0, 4.0])
    assert row["value"] == 3.0
    assert (row["q10"], row["q25"], row["q75"], row["q90"]) == (1.4, 2.0, 4.0, 4.6)
    assert row["samples"] == [5.0, 1.0, 2.0, 3.0, 4.0]


def test_an_ok_row_needs_a_number_and_a_failed_one_does_not() -> None:
    with pytest.raises(ValueError, match="no value"):
        results.row(**ROW)
    failed = results.row(**ROW, status="out_of_memory", message="two\n lines")
    assert math.isnan(failed["value"])
    assert failed["message"] == "two lines"
    with pytest.raises(ValueError, match="status"):
        results.row(**ROW, status="fine", value=1.0)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    table = results.frame(
        [
            results.row(**ROW, samples=[1.0, 2.0], config={"B": 3, "A": "x"}, run_id="01"),
            results.row(**{**ROW, "provider": "flex"}, status="missing", message="no"),
        ]
    )
    path = results.write(table, tmp_path / "new" / "results.parquet")
    pd.testing.assert_frame_equal(results.read(path), table, check_dtype=False)
    assert results.with_config(results.read(path), "B", "C")[["B", "C"]].iloc[0].tolist()[0] == 3


def test_the_same_table_gives_the_same_bytes(tmp_path: Path) -> None:
    table = results.frame([results.row(**ROW, samples=[1.0, 2.0])])
    first = results.write(table, tmp_path / "a.parquet").read_bytes()
    again = results.write(results.read(tmp_path / "a.parquet"), tmp_path / "b.parquet")
    assert again.read_bytes() == first


def test_an_empty_table_has_all_columns(tmp_path: Path) -> None:
    path = results.write(results.frame([]), tmp_path / "empty.parquet")
    assert list(results.read(path).columns) == list(results.COLUMNS)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "results.parquet"
    path.write_text("old")
    table = results.frame([results.row(**ROW, value=1.0)])
    table["samples"] = ["not a list"]
    with pytest.raises(Exception, match="convert"):
        results.write(table, path)
    with pytest.raises(ValueError, match="columns"):
        results.write(table.drop(columns="mode"), path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"PAR1 but not really"])
def test_a_broken_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.parquet"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.parquet") as caught:
        results.read(path)
    assert "\n" not in str(caught.value)


def test_select_takes_one_value_or_several() -> None:
    table = results.frame([results.row(**{**ROW, "provider": p}, value=1.0) for p in "abc"])
    assert list(results.select(table, provider=["a", "c"], metric="latency")["provider"]) == [
        "a",
        "c",
    ]
    assert results.select(table, provider="d").empty
