"""What a run was writing when it was killed is gone after the next one, and stops no other."""

import json
import os

import pytest

from jagged_ranking import paths, results
from jagged_ranking.cli import main
from jagged_ranking.processes import alone_in, among_others
from jagged_ranking.reproduce.cache import cached

LEFT = "-abcd_123"  # as `results.atomic` ends a stem


def table():
    """A table of results that is made, not kept."""
    row = results.row(
        op="o", provider="p", workload="w", mode="m", metric="x", unit="s", value=1.0, run_id="r"
    )
    return results.frame([row])


@pytest.fixture
def reproduce(checkout, in_this_process):
    def run(*arguments: str) -> int:
        data = str(checkout / "data")
        return main(["reproduce", "--data", data, "--only", "01", *arguments])

    return run


def test_files_of_a_killed_run_are_swept(checkout, reproduce):
    out = checkout / "figures" / "runs" / "smoke" / "01_good"
    out.mkdir(parents=True)
    left = [out / f".{stem}{LEFT}{kind}" for stem, kind in (("run", ".json"), ("a_b", ".svg"))]
    left.append(checkout / "figures" / f".report{LEFT}.html")
    mine = [out / ".hidden.json", checkout / "figures" / f".other{LEFT}.html"]
    for path in (*left, *mine):
        path.touch()
    assert reproduce() == 0
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in mine)


def test_the_report_in_the_folder_of_results_is_swept(tmp_path, reproduce):
    out = tmp_path / "out"
    out.mkdir()
    left = out / f".report{LEFT}.html"
    left.touch()
    assert reproduce("--out", str(out)) == 0
    assert not left.exists()


def test_kept_results_are_swept_by_who_keeps_one_alone(checkout):
    paths.CACHE.mkdir(parents=True)
    left = paths.CACHE / f".table{LEFT}.parquet"
    left.touch()
    with among_others(paths.CACHE):  # first, and so it sweeps
        assert not left.exists()
        left.touch()
        cached(table)  # the file is somebody's who is alive
        assert left.exists()
    other = table
    other.__qualname__ = "another"
    cached(other)
    assert not left.exists()


def test_who_writes_among_others_waits_for_nobody_long(tmp_path, monkeypatch):
    monkeypatch.setattr("jagged_ranking.processes.BUSY_SECONDS", 0.1)
    left = tmp_path / f".table{LEFT}.parquet"
    left.touch()
    with alone_in(tmp_path), among_others(tmp_path):
        assert left.exists()


def test_an_executed_notebook_is_replaced_whole(checkout, reproduce):
    assert reproduce() == 0
    path = checkout / "figures" / "runs" / "smoke" / "01_good" / "01_good.ipynb"
    before = path.read_bytes()
    os.link(path, path.with_name("before.ipynb"))  # sees what is written over the file
    assert reproduce("--force") == 0
    assert path.read_bytes() != before
    assert path.with_name("before.ipynb").read_bytes() == before
    assert not list(path.parent.glob(".*"))


def test_a_database_that_was_cut_off_stops_nothing(checkout, reproduce, capfd):
    database = checkout / "build" / "doit.json"
    assert reproduce() == 0
    database.write_text(database.read_text()[:-10])
    assert reproduce() == 0, capfd.readouterr().err
    assert json.loads(database.read_text())
