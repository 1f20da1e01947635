"""From a log that nobody here prepared to figures of quality, by the README's commands."""

import shlex
import subprocess
from pathlib import Path

import pytest
from foreign_logs import json_lines, parquet_with_nulls, tabs_and_local_times

from jagged_ranking import paths
from jagged_ranking.cli import main

QUICK = (
    *("-p", "models=[mean_pool]", "-p", "seeds=[0]", "-p", "replicates=20"),
    *("-p", "options={epochs: 1, batch_size: 256}"),
)
# The same without a kernel and its figures, which know nothing of the log's form.
TRAIN = ("--model", "mean_pool", "--epochs", "1", "--batch-size", "256", "--dim", "8")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user stands, with a folder of its own for what is kept."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(paths.BUILD_VARIABLE, str(tmp_path / "build"))
    return tmp_path


def prepare(log: Path, *options: str) -> int:
    return main(["prepare", "log", "--from", str(log), "--out", "data/mine", *options])


def test_parquet_with_nulls_to_figures(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = parquet_with_nulls(place, 1500)
    assert prepare(log.path, "--name", "mine", *log.options) == 0
    ran = main(["run", "04_quality", "--data", "data/mine", "--out", "runs", "--quiet", *QUICK])
    assert ran == 0, capfd.readouterr().err
    drawn = place / "runs" / "04_quality" / "04_quality_scores.svg"
    assert "on the test split of mine" in drawn.read_text()


def test_tabs_and_local_times_to_a_model(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = tabs_and_local_times(place, 1500)
    assert prepare(log.path, *log.options) == 0
    trained(capfd)


def test_json_lines_to_a_model(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log = json_lines(place, 1500)
    assert prepare(log.path) == 1
    told = capfd.readouterr().err.partition("as with: ")[2]
    subprocess.run(shlex.split(told), check=True)
    assert prepare(log.path.with_name(f"{log.path.name}.parquet")) == 0
    trained(capfd)


def trained(capfd: pytest.CaptureFixture[str]) -> None:
    """Train and judge a model on what was prepared."""
    out = ["--data", "data/mine", "--out", "model", *TRAIN]
    assert main(["train", *out]) == 0, capfd.readouterr().err
    assert main(["evaluate", "--data", "data/mine", "--run", "model"]) == 0, capfd.readouterr().err
    assert "gauc" in capfd.readouterr().out.lower()
