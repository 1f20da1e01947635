"""Ranks of a training as torchrun starts them, but forked: what takes seconds is imported once.

A script, in a process of its own: `losses DATA OUT` trains by one process, by 2 and by 4, in
float64, and writes what came of it as JSON; `commands DATA OTHER OUT` has two ranks run `jagged
train` in ways that are refused, and writes their statuses and what they said; `orphans DATA OUT`
has two train for long.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import datasets  # noqa: F401, which reading data imports
import sklearn.metrics  # noqa: F401, and evaluating
import torch
import torch.distributed as dist

from click_data import ClickDataset, open_dataset
from jagged_kernels import JaggedTensor
from jagged_ranking import cli, verbosity
from jagged_ranking.data import loader
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.models.encoders.mean_pool import MeanPool
from jagged_ranking.models.model_config import ModelConfig
from jagged_ranking.training import join_ranks
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.rank_group import RankGroup, RankLostError
from jagged_ranking.training.ranks import Ranks
from jagged_ranking.training.trainer import TrainResult, train


class PartlyUsed(MeanPool):
    """One of its layers is for batches with a short history in them, and one for none."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.of_short = torch.nn.Linear(config.dim, config.dim)
        self.never = torch.nn.Linear(config.dim, config.dim)

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> torch.Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        answer = super().forward(history, candidates, batch)
        short = torch.from_numpy(batch.events < 3)
        if not short.any():
            return answer
        return answer + short[batch.request, None] * self.of_short(candidates.values)


ENCODER = PartlyUsed  # a model of one's own, which is named by its module
sys.modules["own.partly_used"] = sys.modules[__name__]

# Nothing is random: each rank has a dropout of its own.
STILL: dict[str, Any] = {"dropout": 0.0, "embedding_dropout": 0.0, "id_dropout": 0.0}
SMALL: dict[str, Any] = {**STILL, "dim": 8, "hidden": (8,), "max_history": 10, "epochs": 2}
BY_ROW: dict[str, Any] = {"table_optimizer": "rowwise_adagrad", "table_learning_rate": 0.05}
NEXT: dict[str, Any] = {"loss": "next_item", "head": "dot", "select": "auc", "negatives": 5}
CONFIGS = {
    "fewer requests than ranks": TrainConfig(**SMALL, model="mean_pool", batch_size=3),
    "batches by tokens, by row": TrainConfig(
        **SMALL, **BY_ROW, model="transformer", batch_tokens=100, accumulate=3
    ),
    "parameters that a rank does not touch": TrainConfig(
        **SMALL, model="own.partly_used", batch_size=4
    ),
    "listwise": TrainConfig(**SMALL, loss="listwise", select="auc", batch_size=16),
    "next items": TrainConfig(
        **SMALL, **BY_ROW, **NEXT, model="sasrec", batch_size=2, accumulate=2
    ),
}
RESUMED = dataclasses.replace(CONFIGS["listwise"], checkpoint_steps=4)
STOP = 6  # steps, two behind a checkpoint
# Whose checkpoint so many ranks go on from.
RESUMED_FROM = {1: "from 2", 2: "from 1", 4: "from 2, by 4"}


# What of a result is told.
Told = Callable[[TrainResult], dict[str, Any]]


class Stopped(Exception):
    pass


def forked(count: int, do: Callable[[], int | None], *, said: Path) -> list[int]:
    """Statuses of `count` ranks that call `do`; each prints to `said` and its number.

    Where one fails, the others get SIGTERM, as torchrun does, perhaps before they have begun.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children: dict[int, int] = {}
    for rank in range(count):
        file = os.open(f"{said}{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if (child := os.fork()) == 0:
            _child(rank, count, port, do, file)
        os.close(file)
        children[child] = rank
    statuses = [0] * count
    left = dict(children)
    while left:
        child, status = os.wait()
        statuses[left.pop(child)] = os.waitstatus_to_exitcode(status)
        if status:
            for other in left:
                os.kill(other, signal.SIGTERM)
    return statuses


def _child(rank: int, count: int, port: int, do: Callable[[], int | None], file: int) -> None:
    local = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    os.environ.update({name: str(value) for name, value in local.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.dup2(file, 1)
    os.dup2(file, 2)
    status = 70
    try:
        status = do() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def in_float64() -> None:
    """Whatever a model computes."""
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    make = loader.make_batch

    def make_double(*args: Any, **options: Any) -> JaggedBatch:
        return _double(make(*args, **options))

    loader.make_batch = make_double


def _double(batch: JaggedBatch) -> JaggedBatch:
    changed: dict[str, Any] = {}
    for spec in dataclasses.fields(batch):
        value = getattr(batch, spec.name)
        if isinstance(value, JaggedTensor) and value.values.is_floating_point():
            changed[spec.name] = value.with_values(value.values.double())
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            changed[spec.name] = value.double()
    return dataclasses.replace(batch, **changed)


def losses(data: Path, out: Path) -> None:
    """Of every configuration, of one process and of ranks; and of runs that go on as others."""
    in_float64()
    dataset = open_dataset(data)
    found = {"1": [_results(dataset, Ranks())]}
    found |= by_ranks(dataset, RESUMED, lambda ranks, _: _results(dataset, ranks), told, out)
    found["1"][0]["resumed"] = resumed(dataset, RESUMED, out / RESUMED_FROM[1], Ranks(), told)
    print(json.dumps(found))


def by_ranks(
    dataset: ClickDataset,
    config: TrainConfig,
    work: Callable[[RankGroup, Path], dict[str, Any]],
    told: Told,
    out: Path,
) -> dict[str, list[dict[str, Any]]]:
    """What each of 2 and of 4 ranks has of `work`, which may write to the folder it is given; and,
    as "resumed", of a run of `config` that others began. That of 2 is left, for one to go on."""
    _stop(dataset, config, out / "from 1", Ranks())
    found = {}
    for count in (2, 4):

        def do(count: int = count) -> None:
            dist.init_process_group("gloo")
            ranks = RankGroup(torch.device("cpu"), None)
            results = work(ranks, out / f"by {count}")
            if count == 2:
                _stop(dataset, config, out / "from 2", ranks)
                if ranks.leads:
                    shutil.copytree(out / "from 2", out / "from 2, by 4")
            results["resumed"] = resumed(dataset, config, out / RESUMED_FROM[count], ranks, told)
            (out / f"{count}.{ranks.number}.json").write_text(json.dumps(results))
            dist.destroy_process_group()

        statuses = forked(count, do, said=out / f"said {count}.")
        assert statuses == [0] * count, [path.read_text() for path in out.glob("said*")]
        texts = [(out / f"{count}.{rank}.json").read_text() for rank in range(count)]
        found[str(count)] = [json.loads(text) for text in texts]
    return found


def trained(dataset: ClickDataset, config: TrainConfig, **options: Any) -> TrainResult:
    """On the CPU, without a bar."""
    return train(config, dataset, progress=False, device="cpu", **options)


def _results(dataset: ClickDataset, ranks: Ranks) -> dict[str, Any]:
    return {name: told(trained(dataset, one, ranks=ranks)) for name, one in CONFIGS.items()}


def _stop(dataset: ClickDataset, config: TrainConfig, out: Path, ranks: Ranks) -> None:
    def after_step(step: int) -> None:
        if step == STOP:
            raise Stopped

    try:
        trained(dataset, config, out=out, after_step=after_step, ranks=ranks)
    except Stopped:
        return
    raise AssertionError("there are too few steps")


def resumed(
    dataset: ClickDataset, config: TrainConfig, out: Path, ranks: Ranks, told: Told
) -> dict[str, Any]:
    """What came of a run that goes on, and the first step of it here."""
    steps: list[int] = []
    options: dict[str, Any] = {"resume": True, "after_step": steps.append}
    result = trained(dataset, config, out=out, ranks=ranks, **options)
    return {**told(result), "first step": steps[0]}


def told(result: TrainResult) -> dict[str, Any]:
    """What tests look at."""
    return {
        "losses": result.losses,
        "metrics": [{k: v for k, v in row.items() if k != "seconds"} for row in result.history],
        "best_epoch": result.best_epoch,
        "weights": [value.double().sum().item() for value in result.model.state_dict().values()],
    }


def commands(data: Path, other: Path, out: Path) -> None:
    """Statuses of two ranks, and what each said, of commands that are refused."""
    (out / "held").mkdir(parents=True)
    (out / "held" / "checkpoint.pt").touch()
    (out / "file").touch()
    plain = ["train", "--data", str(data), "--device", "cpu", "--epochs", "1", "--out"]
    new = [*plain, str(out / "new")]
    changed = {
        "option": [*new, "--seed", "7"],
        "data": [str(other) if word == str(data) else word for word in new],
        "missing": [str(out / "none") if word == str(data) else word for word in new],
    }
    alike = {
        "device": [*new, "--device", "cuda:0"],
        "gpus": [*new, "--device", "cuda"],
        "held": [*plain, str(out / "held")],
        "file": [*plain, str(out / "file")],
        "model": [*new, "--loss", "next_item", "--head", "dot", "--model", "din"],
        "gloo": new,
        "silent": [*plain, str(out / "silent"), "--model", "mean_pool"],
        "told late": [*plain, str(out / "late"), "--model", "mean_pool"],
        "told deaf": [*plain, str(out / "deaf"), "--model", "mean_pool"],
        "fine": [*new, "--model", "mean_pool"],
    }
    pairs = {name: (new, words) for name, words in changed.items()}
    pairs |= {name: (words, words) for name, words in alike.items()}
    found = {}
    for name, pair in pairs.items():

        def do(name: str = name, pair: tuple[list[str], ...] = pair) -> int:
            if os.environ["RANK"] == "1":
                RankGroup._gather = _gathered_late
            if name == "gloo":
                dist.is_gloo_available = lambda: False
            if name == "silent":
                join_ranks.TIMEOUT = timedelta(seconds=4)
                if os.environ["RANK"] == "1":
                    RankGroup.whole = lambda *_: signal.pause()
            if name == "told late":
                leads = os.environ["RANK"] == "0"
                RankGroup.whole = lambda *_: _lost() if leads else signal.pause()
                verbosity.print_traceback = lambda _: os.kill(os.getpid(), signal.SIGTERM)
            if name == "told deaf":
                join_ranks.GRACE_SECONDS = 1
                leads = os.environ["RANK"] == "0"
                RankGroup.whole = lambda *_: signal.pause() if leads else _deaf()
            return cli.main(pair[int(os.environ["RANK"])])

        statuses = forked(2, do, said=out / f"{name} ")
        said = [(out / f"{name} {rank}").read_text() for rank in (0, 1)]
        found[name] = {"statuses": statuses, "said": said}
    print(json.dumps(found))


_gather = RankGroup._gather


def _gathered_late(ranks: RankGroup, value: Any) -> list[Any]:
    """On a busy machine a rank may hear of an error when the one that says it has ended."""
    parts = _gather(ranks, value)
    time.sleep(0.2)
    return parts


def _lost() -> NoReturn:
    raise RankLostError("rank 0: others are gone")


def _deaf() -> None:
    """Told to end while it waits for another rank, outside Python."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    dist.recv(torch.empty(1), src=0)


def long_training(data: Path, out: Path) -> list[str]:
    """Arguments of `jagged` for a run of minutes, which saves each step."""
    small = ["--dim", "8", "--hidden", "8", "--batch-size", "32", "--model", "mean_pool"]
    long = ["--epochs", "9999", "--patience", "9999", "--checkpoint-steps", "1"]
    return ["train", "--data", str(data), "--out", str(out), "--device", "cpu", *small, *long]


def orphans(data: Path, out: Path) -> None:
    """Two ranks that train until they are told to end, or this process is gone."""
    forked(2, lambda: cli.main(long_training(data, out)), said=out.with_name("said "))


if __name__ == "__main__":
    torch.set_num_threads(1)
    known = {"losses": losses, "commands": commands, "orphans": orphans}
    known[sys.argv[1]](*map(Path, sys.argv[2:]))
