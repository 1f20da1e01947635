"""doit's own command line on the tasks of `jagged reproduce`."""

import os
import subprocess
import sys

import pytest
from import_graph import ROOT

from jagged_ranking.processes import alone_in


@pytest.fixture
def doit(checkout):
    """Run `doit` on the project's dodo.py and the checkout of the test."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        given = [*arguments, "preset=smoke", f"data={checkout / 'data'}"]
        return subprocess.run(
            [sys.executable, "-m", "doit", "-f", str(ROOT / "dodo.py"), *given],
            env={**os.environ, "JAGGED_HOME": str(checkout)},
            cwd=checkout,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_one_at_a_time_in_a_folder(checkout, doit):
    out = checkout / "figures" / "runs" / "smoke"
    out.mkdir(parents=True)
    with alone_in(out):
        for command in (["run", "notebook:01_good"], ["run", "-r", "json", "report"]):
            done = doit(*command)
            assert done.returncode != 0
            assert f"{out}: another run writes there" in done.stdout + done.stderr
        assert not list(out.iterdir())
        assert "notebook:01_good" in doit("list", "--all").stdout  # to look is free
    done = doit("run", "-n", "2", "notebook:01_good", "report")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (out / "01_good" / "results.parquet").is_file()
    assert (checkout / "figures" / "report.html").is_file()
