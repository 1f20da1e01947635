"""doit's own command line on the tasks of `jagged reproduce`."""

import os
import subprocess
import sys

import pytest
from doit.doit_cmd import DoitMain
from import_graph import ROOT

from jagged_ranking import processes


@pytest.fixture
def given(checkout):
    """What `doit` is told of the project's dodo.py and the checkout of the test."""
    return ["-f", str(ROOT / "dodo.py"), "preset=smoke", f"data={checkout / 'data'}"]


@pytest.fixture
def doit(given, checkout, monkeypatch):
    """Run `doit` in this process; the exit status."""
    monkeypatch.chdir(checkout)  # where it leaves this process is undone, and what it imports from
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(processes, "BUSY_SECONDS", 0.0)
    return lambda *words: DoitMain(config_filenames=()).run([words[0], *given, *words[1:]])


def test_one_at_a_time_in_a_folder(checkout, tmp_path, doit, capsys):
    out = checkout / "figures" / "runs" / "smoke"
    out.mkdir(parents=True)
    with processes.alone_in(out):
        for command in (["notebook:01_good"], ["-r", "json", "report"]):
            said = tmp_path / "said.txt"
            assert doit("run", "-o", str(said), *command) != 0
            assert f"{out}: another run writes there" in said.read_text()
        assert not list(out.iterdir())
        assert doit("list", "--all") == 0  # to look is free
        assert "notebook:01_good" in capsys.readouterr().out


def test_notebooks_and_the_report_by_doit_itself(checkout, given):
    out = checkout / "figures" / "runs" / "smoke"
    done = subprocess.run(
        [sys.executable, "-m", "doit", "run", "-n", "2", *given, "notebook:01_good", "report"],
        env={**os.environ, "JAGGED_HOME": str(checkout)},
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "01_good" / "results.parquet").is_file()
    assert (checkout / "figures" / "report.html").is_file()
