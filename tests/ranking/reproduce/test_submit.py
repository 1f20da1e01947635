"""`jagged submit`: what is refused at once, and jobs of submitit's local executor."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from click_data import ClickDataset
from jagged_ranking.cli import build_parser, main
from jagged_ranking.reproduce.submit_command import Job, _parameters, _waited_for
from jagged_ranking.training.run_files import CHECKPOINT

TRAIN = ["train", "--data", "d", "--out", "o"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "submit runs train or reproduce, got none"),
        (["figures"], "submit runs train or reproduce, got 'figures'"),
        (["--nodes", "0", *TRAIN], "--nodes must be at least 1, got 0"),
        (["--gpus", "-1", *TRAIN], "--gpus must not be negative, and --ranks at least 1"),
        (["--nodes", "2", "reproduce"], "reproduce is one process: --nodes and --ranks are for"),
    ],
)
def test_what_does_not_fit_is_refused_before_it_waits_in_a_queue(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *words]) == 1
    assert line in capsys.readouterr().err


def test_a_wrong_option_of_the_command_is_refused_here(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["submit", "--local", *TRAIN, "--nonsense"])
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err


def test_without_the_extra_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main(["submit", "--local", *TRAIN]) == 1
    told = capsys.readouterr().err
    # An installed wheel has no folder to name.
    assert "submit needs the extra slurm (pip install 'jagged-flash-attention[slurm]')" in told


class _Lost(Exception):
    """As submitit's errors of jobs."""


_UTILS = SimpleNamespace(FailedJobError=_Lost, UncompletedJobError=_Lost)
_SUBMITIT: Any = SimpleNamespace(core=SimpleNamespace(utils=_UTILS))


class _Done:
    """A job that is done, of several tasks."""

    job_id = "5"

    def __init__(self, results: list[int] | Exception) -> None:
        self._results = results

    def results(self) -> list[int]:
        if isinstance(self._results, Exception):
            raise self._results
        return self._results

    def stdout(self) -> str:
        return "submitit INFO (begin)\nof the job\n"

    def stderr(self) -> str:
        return "wrong\n"


def test_the_worst_of_its_tasks_is_the_status_of_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert _waited_for(_Done([0, 3, 1]), _SUBMITIT) == 3
    assert _waited_for(_Done([0, 0]), _SUBMITIT) == 0
    assert capsys.readouterr() == ("of the job\n" * 2, "wrong\n" * 2)


def test_a_job_that_is_gone_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="job 5 is gone: killed"):
        _waited_for(_Done(_Lost("killed\nlater")), _SUBMITIT)
    assert capsys.readouterr() == ("of the job\n", "wrong\n")


@pytest.mark.parametrize(
    ("words", "tasks"),
    [
        (["--gpus", "4", *TRAIN], 4),
        (["--gpus", "0", *TRAIN], 1),
        (["--gpus", "0", "--ranks", "2", *TRAIN], 2),
        (["--gpus", "4", "reproduce"], 1),
    ],
)
def test_a_training_has_a_task_a_rank(words: list[str], tasks: int) -> None:
    parsed = build_parser(["submit"]).parse_args(["submit", *words])
    found = _parameters(parsed, parsed.words[0])
    assert found["tasks_per_node"] == tasks
    assert found["gpus_per_node"] == int(words[1])


@pytest.fixture
def submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Any:
    """Status, output and errors of a local job without GPUs."""
    pytest.importorskip("submitit", reason="needs the extra slurm")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))

    def run(*words: str) -> tuple[int, str, str]:
        logs = ["--logs", str(tmp_path / "jobs")]
        status = main(["submit", "--local", "--gpus", "0", *logs, *words])
        said = capfd.readouterr()
        return status, said.out, said.err

    return run


def test_ranks_of_a_training_are_tasks_of_the_job(
    toy: ClickDataset, tmp_path: Path, submit: Any
) -> None:
    words = ["--ranks", "2", "train", "--data", str(toy.folder), "--out", str(tmp_path / "run")]
    words += ["--device", "cpu", "--epochs", "1", "--dim", "8", "--model", "mean_pool"]
    status, said, _ = submit(*words)
    assert status == 0
    assert said.count("best epoch: 0") == 1  # rank 0 speaks
    assert (tmp_path / "run" / CHECKPOINT).is_file()
    assert len(list((tmp_path / "jobs").glob("*_1_log.out"))) == 1
    status, _, errors = submit(*words)
    assert status == 1
    assert "already holds a run: --resume goes on with it" in errors


def test_reproduce_is_one_task(tmp_path: Path, submit: Any) -> None:
    words = ["--dry-run", "--json", "--out", str(tmp_path / "out"), "--only", "12"]
    status, said, _ = submit("reproduce", *words)
    assert status == 0
    plan = json.loads(said[said.index("{") :])
    assert plan["notebooks"] == {"12_scaling": "run"}


def test_a_job_that_is_cut_off_goes_on_from_its_checkpoint() -> None:
    pytest.importorskip("submitit", reason="needs the extra slurm")
    again = Job(TRAIN, folder="here").checkpoint().function
    assert again.words == [*TRAIN, "--resume"]
    assert again.checkpoint().function.words == [*TRAIN, "--resume"]
    assert Job(["reproduce"], folder="here").checkpoint().function.words == ["reproduce"]
