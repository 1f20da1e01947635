"""Tables that are told part by part."""

from pathlib import Path

import pandas as pd
import pytest
from told_tables import ToldTable


def test_each_part_is_printed_and_all_of_them_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.csv"
    told = ToldTable(out)
    for number in (1.5, 2.25):
        told.add({"what": what, "ms": number} for what in "ab")
        assert capsys.readouterr().out.split() == ["what", "ms", "a", str(number), "b", str(number)]
        pd.testing.assert_frame_equal(pd.read_csv(out), told.whole())
    assert told.whole()["ms"].tolist() == [1.5, 1.5, 2.25, 2.25]
    assert list(tmp_path.iterdir()) == [out]


def test_nothing_is_written_where_no_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    told = ToldTable(None)
    told.add([{"what": "a"}])
    assert told.whole()["what"].tolist() == ["a"]
    assert capsys.readouterr().out
