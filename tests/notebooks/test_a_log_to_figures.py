"""From a log that nobody here prepared to figures of quality, by the README's commands."""

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from foreign_logs import ForeignLog, json_lines, parquet_with_nulls, tabs_and_local_times

from jagged_ranking import paths
from jagged_ranking.cli import main

QUICK = (
    *("-p", "models=[mean_pool]", "-p", "seeds=[0]", "-p", "replicates=20"),
    *("-p", "options={epochs: 1, batch_size: 256}"),
)


@pytest.mark.parametrize("write", [tabs_and_local_times, parquet_with_nulls, json_lines])
def test_a_log_to_figures(
    write: Callable[..., ForeignLog],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(paths.BUILD_VARIABLE, str(tmp_path / "build"))
    log = write(tmp_path, 1500)
    source = log.path
    if write is json_lines:
        assert main(["prepare", "log", "--from", str(source), "--out", "data/mine"]) == 1
        told = capfd.readouterr().err.partition("as with: ")[2]
        subprocess.run(shlex.split(told), check=True)
        source = source.with_name(f"{source.name}.parquet")
    prepared = ["--from", str(source), "--out", "data/mine", "--name", "mine", *log.options]
    assert main(["prepare", "log", *prepared]) == 0
    ran = main(["run", "04_quality", "--data", "data/mine", "--out", "runs", "--quiet", *QUICK])
    assert ran == 0, capfd.readouterr().err
    drawn = tmp_path / "runs" / "04_quality" / "04_quality_scores.svg"
    assert "on the test split of mine" in drawn.read_text()
