"""Several processes train as one does; what differs among them is refused; none is left behind."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from forked_ranks import CONFIGS, STOP, long_training
from import_graph import PACKAGES
from marked_process import MarkedProcess
from rank_scripts import ENVIRONMENT, assert_a_line_of_rank_0, run_script

from click_data import prepare
from jagged_ranking.cli import main
from jagged_ranking.data.shares import share_out
from jagged_ranking.models.model_config import MODEL_NAMES, encoder_of
from jagged_ranking.processes import launched
from jagged_ranking.training import checkpoint, rank_group
from jagged_ranking.training.rank_group import RankGroup
from jagged_ranking.training.ranks import Ranks
from jagged_ranking.training.run_files import CHECKPOINT

SCRIPT = Path(__file__).parents[2] / "support" / "forked_ranks.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few requests, some of which have several candidates."""
    folder = tmp_path_factory.mktemp("ranks") / "data"
    return prepare("synthetic", out=folder, users=9, items=12, categories=3, events=150)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_script(SCRIPT, "losses", data, tmp_path_factory.mktemp("trained"))


def close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """In float64, up to rounding, step by step."""
    assert len(found["losses"]) == len(expected["losses"]) > 4
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-9)
    np.testing.assert_allclose(found["weights"], expected["weights"], rtol=1e-7, atol=1e-9)
    assert found["best_epoch"] == expected["best_epoch"]
    for mine, row in zip(found["metrics"], expected["metrics"], strict=True):
        assert mine == pytest.approx(row, rel=1e-9)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_have_the_losses_of_one_process(
    trained: dict[str, Any], name: str, count: int
) -> None:
    first, *others = (rank[name] for rank in trained[str(count)])
    close(first, trained["1"][0][name])
    assert others == [first] * (count - 1)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_run_goes_on_with_another_number_of_ranks(trained: dict[str, Any], count: int) -> None:
    for rank in trained[str(count)]:
        assert rank["resumed"].pop("first step") < STOP  # behind the last checkpoint
        close(rank["resumed"], trained["1"][0]["listwise"])


@pytest.fixture(scope="module")
def refused(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("refused")
    other = prepare(
        "synthetic", out=folder / "other", users=9, items=12, categories=3, events=140, seed=1
    )
    return run_script(SCRIPT, "commands", data, other, folder / "runs")


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("option", "ranks differ in --seed: nothing on rank 0, 7 on rank 1"),
        ("data", "ranks differ in the data's digest: "),
        ("missing", "rank 1: "),
        ("device", "--device cuda:0: under torchrun it is cpu, or cuda for a GPU a rank"),
        ("gloo", "torchrun needs a PyTorch with torch.distributed and gloo"),
        ("held", "already holds a run: --resume goes on with it"),
        ("file", "cannot be the run's folder"),
        ("model", "loss next_item needs a model that answers after every event"),
    ],
)
def test_what_does_not_fit_is_a_line_of_rank_0(
    refused: dict[str, Any], name: str, line: str
) -> None:
    assert_a_line_of_rank_0(refused[name], line)


def test_more_ranks_than_gpus_are_refused(refused: dict[str, Any]) -> None:
    found = refused["gpus"]
    assert all(found["statuses"])
    assert "2 ranks on this machine need as many GPUs, it has" in found["said"][0]
    assert found["said"][1] == ""


def test_a_rank_that_does_not_answer_is_not_waited_for(refused: dict[str, Any]) -> None:
    found = refused["silent"]
    assert all(found["statuses"])
    assert "jagged: rank 0: another process of this run has ended or does not" in found["said"][0]


def test_a_rank_that_is_told_to_end_while_it_speaks_ends_its_line(refused: dict[str, Any]) -> None:
    found = refused["told late"]
    assert found["statuses"] == [1, 143]
    assert found["said"][0].endswith("jagged: rank 0: others are gone\n")  # behind a bar
    assert "jagged: rank 1 was told to end, " in found["said"][1]


def test_a_rank_that_is_told_to_end_while_it_waits_says_so(refused: dict[str, Any]) -> None:
    found = refused["told deaf"]
    assert found["statuses"] == [143, -signal.SIGALRM]
    for rank, said in enumerate(found["said"]):
        assert said.count("jagged: ") == said.count(f"jagged: rank {rank} was told to end, ") == 1


def test_rank_0_alone_speaks(refused: dict[str, Any]) -> None:
    assert refused["fine"]["statuses"] == [0, 0]
    assert "best epoch: 0" in refused["fine"]["said"][0]
    assert refused["fine"]["said"][1] == ""


def rank_of(running: MarkedProcess, number: int) -> psutil.Process:
    ranks = {process.environ().get("RANK"): process for process in running.alive()}
    return ranks[str(number)]


def wait_for(path: Path, running: MarkedProcess) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert running.ends_within(0.1) is None, running.said()
        assert time.monotonic() < deadline, running.said()


@pytest.fixture
def marked(tmp_path: Path) -> Iterator[Any]:
    """Starts Python; whatever that has started ends with the test."""
    started = []

    def start(*arguments: str) -> MarkedProcess:
        said = tmp_path / "said.txt"
        mark = uuid.uuid4().hex
        started.append(MarkedProcess(arguments, mark=mark, said=said, environment=ENVIRONMENT))
        return started[-1]

    yield start
    for running in started:
        running.end()


@pytest.mark.parametrize("tables", ["replicated", "torchrec"])
def test_a_rank_that_is_killed_ends_all_and_the_run_goes_on(
    data: Path, tmp_path: Path, marked: Any, tables: str, capsys: pytest.CaptureFixture[str]
) -> None:
    of_tables = ["--tables", tables, "--table-optimizer", "rowwise_adagrad"]
    if tables == "torchrec":
        pytest.importorskip("torchrec", reason="needs the extra torchrec")
    out = tmp_path / "run"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    running = marked(*torchrun, "-m", "jagged_ranking", *long_training(data, out), *of_tables)
    wait_for(out / CHECKPOINT, running)
    rank_of(running, 0).kill()  # which writes
    status = running.ends_within(20)
    assert status, running.said()
    assert running.left()[1] == []
    lines = re.findall("jagged: .*", running.said())  # perhaps behind a bar that was cut off
    assert sorted(line[: len("jagged: rank 1")] for line in lines) == [
        f"jagged: rank {rank}" for rank in (1, 2, 3)
    ]
    assert all("--resume goes on from the last checkpoint" in line for line in lines)

    before = checkpoint.load(out / CHECKPOINT).content["progress"]
    options = ["--epochs", str(before["epoch"] + 1), "--device", "cpu"]
    assert main(["train", "--data", str(data), "--out", str(out), "--resume", *options]) == 0
    now = checkpoint.load(out / CHECKPOINT).content["progress"]
    assert now["epoch"] == before["epoch"] + 1
    assert now["losses"][: len(before["losses"])] == before["losses"]
    assert "best epoch" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("by_row", [False, True])
def test_two_gpus_have_the_losses_of_one(
    data: Path, tmp_path: Path, marked: Any, by_row: bool
) -> None:
    words = ["train", "--data", str(data), "--device", "cuda", "--epochs", "2", "--dropout", "0"]
    words += ["--model", "transformer", "--embedding-dropout", "0", "--id-dropout", "0"]
    words += ["--precision", "float32", "--checkpoint-steps", "3"]
    # of batches of 1 a rank has nothing
    words += ["--batch-size", "1" if by_row else "9"]
    words += ["--table-optimizer", "rowwise_adagrad" if by_row else "adamw"]
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    running = marked(*torchrun, "-m", "jagged_ranking", *words, "--out", str(tmp_path / "two"))
    assert running.ends_within(300) == 0, running.said()
    one, two = (
        checkpoint.load(tmp_path / name / CHECKPOINT).content["progress"] for name in ("one", "two")
    )
    assert len(one["losses"]) > 20
    np.testing.assert_allclose(two["losses"], one["losses"], rtol=1e-3)
    assert two["best_epoch"] == one["best_epoch"]


def test_ranks_end_with_what_started_them(data: Path, tmp_path: Path, marked: Any) -> None:
    out = tmp_path / "run"
    running = marked(str(SCRIPT), "orphans", str(data), str(out))
    wait_for(out / CHECKPOINT, running)
    assert len(running.alive()) == 3
    assert running.kill()
    assert running.left()[1] == []


def test_shares_are_even_and_alike() -> None:
    cost = np.random.default_rng(0).integers(0, 100, 200)
    owner = share_out(cost, ranks=4)
    loads = np.bincount(owner, cost, minlength=4)
    assert loads.max() - loads.min() <= 100
    assert (np.bincount(share_out(np.zeros(8, int), ranks=4)) == 2).all()
    assert share_out(np.array([1, 9]), ranks=4).tolist() == [1, 0]
    assert len(share_out(np.zeros(0, int), ranks=2)) == 0


def among_two(number: int, monkeypatch: pytest.MonkeyPatch) -> RankGroup:
    monkeypatch.setattr(rank_group.dist, "get_rank", lambda: number)
    monkeypatch.setattr(rank_group.dist, "get_world_size", lambda: 2)
    return RankGroup(torch.device("cpu"), None)


def test_rank_0_has_the_dropout_of_one_process_and_others_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = Ranks().begin_step(5, 3)
    assert among_two(0, monkeypatch).begin_step(5, 3) == alone
    assert among_two(1, monkeypatch).begin_step(5, 3) != alone


def test_shares_are_by_tokens_or_by_their_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = among_two(0, monkeypatch)
    tokens = np.array([10, 8, 4, 4])
    assert ranks.share(squared=False)(tokens).tolist() == [0, 3]
    assert ranks.share(squared=True)(tokens).tolist() == [0]
    squared = {name for name in MODEL_NAMES if hasattr(encoder_of(name), "self_attention")}
    assert squared == {"transformer", "sasrec", "hstu", "bst", "transact"}


def test_one_process_does_without_a_group(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch imports torch.distributed itself; of ours one module does, for torchrun alone."""
    importing = set()
    for path in PACKAGES["jagged_ranking"].rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom) and "torch.distributed" in ast.unparse(
                node
            ):
                importing.add(path.stem)
    # table_files writes without a group, too
    assert importing == {"rank_group", "join_ranks", "table_files"}
    code = (
        "import sys; from jagged_ranking.cli import main; status = main(sys.argv[1:]);"
        "print('jagged_ranking.training.rank_group' in sys.modules, status)"
    )
    words = ["train", "--data", str(data), "--out", str(tmp_path / "run"), "--epochs", "1"]
    ran = subprocess.run(
        [sys.executable, "-c", code, *words, "--device", "cpu"],
        env={**os.environ, **ENVIRONMENT, "WORLD_SIZE": "8", "RANK": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.splitlines()[-1] == "False 0", ran.stderr
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="WORLD_SIZE must be a number of processes, got 'two'"):
        launched()
