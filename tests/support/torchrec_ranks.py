"""Ranks that share the rows of their tables out by TorchRec, beside one process that has them all.

A script, in a process of its own: `losses DATA OUT` trains by one process, by 2 and by 4, lets runs
go on as others, and writes what came of it as JSON; `broken DATA OUT` has two ranks go on with
tables of which a shard is damaged, and without TorchRec, and writes what they said.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked_ranks import BY_ROW, NEXT, SMALL, Stopped, forked

from click_data import ClickDataset, open_dataset
from jagged_ranking import cli
from jagged_ranking.training import torchrec_tables
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.rank_group import RankGroup
from jagged_ranking.training.ranks import Ranks
from jagged_ranking.training.run_files import load_model
from jagged_ranking.training.trainer import TrainResult, train

# Rows that ranks share out are not clipped: nothing is, here.
SHARED: dict[str, Any] = {**SMALL, **BY_ROW, "clip_norm": 1e9, "tables": "torchrec"}
CONFIGS = {
    "fewer requests than ranks": TrainConfig(**SHARED, model="mean_pool", batch_size=3),
    "batches by tokens": TrainConfig(
        **SHARED, model="transformer", batch_tokens=100, schedule="cosine"
    ),
    "next items": TrainConfig(**SHARED, **NEXT, model="sasrec", batch_size=2),
}
RESUMED = TrainConfig(**SHARED, model="mean_pool", batch_size=16, checkpoint_steps=4)
STOP = 6  # steps, two behind a checkpoint
RESUMED_FROM = {1: "from 2", 2: "from 1", 4: "from 2, by 4"}


def losses(data: Path, out: Path) -> None:
    """Of one process without TorchRec, of ranks with it, and of runs that go on as others."""
    dataset = open_dataset(data)
    plain = {name: replace(config, tables="replicated") for name, config in CONFIGS.items()}
    found = {"1": [_results(dataset, Ranks(), plain | {"apart": RESUMED}, out / "by 1")]}
    found["1"][0]["whole"] = _told(_train(dataset, replace(RESUMED, tables="replicated")))
    _stop(dataset, out / "from 1", Ranks())
    for count in (2, 4):

        def work(count: int = count) -> None:
            dist.init_process_group("gloo")
            ranks = RankGroup(torch.device("cpu"), None)
            results = _results(dataset, ranks, CONFIGS, out / f"by {count}")
            if count == 2:
                _stop(dataset, out / "from 2", ranks)
                if ranks.leads:
                    shutil.copytree(out / "from 2", out / "from 2, by 4")
            results["resumed"] = _resumed(dataset, out / RESUMED_FROM[count], ranks)
            (out / f"{count}.{ranks.number}.json").write_text(json.dumps(results))
            dist.destroy_process_group()

        statuses = forked(count, work, said=out / f"said {count}.")
        assert statuses == [0] * count, [path.read_text() for path in out.glob("said*")]
        texts = [(out / f"{count}.{rank}.json").read_text() for rank in range(count)]
        found[str(count)] = [json.loads(text) for text in texts]
    found["1"][0]["resumed"] = _resumed(dataset, out / RESUMED_FROM[1], Ranks())
    found["1"][0]["loaded"] = {
        name: _sums(load_model(out / "by 2" / name, digest=dataset.digest)[0]) for name in CONFIGS
    }
    print(json.dumps(found))


def _train(dataset: ClickDataset, config: TrainConfig, **options: Any) -> TrainResult:
    return train(config, dataset, progress=False, device="cpu", **options)


def _results(
    dataset: ClickDataset, ranks: Ranks, configs: dict[str, TrainConfig], out: Path
) -> dict[str, Any]:
    return {
        name: _told(_train(dataset, config, ranks=ranks, out=out / name))
        for name, config in configs.items()
    }


def _stop(dataset: ClickDataset, out: Path, ranks: Ranks) -> None:
    def after_step(step: int) -> None:
        if step == STOP:
            raise Stopped

    try:
        _train(dataset, RESUMED, out=out, after_step=after_step, ranks=ranks)
    except Stopped:
        return
    raise AssertionError("there are too few steps")


def _resumed(dataset: ClickDataset, out: Path, ranks: Ranks) -> dict[str, Any]:
    steps: list[int] = []
    result = _train(dataset, RESUMED, out=out, resume=True, ranks=ranks, after_step=steps.append)
    return {**_told(result), "first step": steps[0]}


def _told(result: TrainResult) -> dict[str, Any]:
    return {
        "losses": result.losses,
        "metrics": [{k: v for k, v in row.items() if k != "seconds"} for row in result.history],
        "best_epoch": result.best_epoch,
        "rows": [len(table.weight) for table in result.model.embedding.id_tables.values()],
        "weights": _sums(result.model),
    }


def _sums(model: torch.nn.Module) -> dict[str, float]:
    return {name: p.double().sum().item() for name, p in model.named_parameters()}


def broken(data: Path, out: Path) -> None:
    """Statuses of two ranks, and what each said."""
    words = ["train", "--data", str(data), "--device", "cpu", "--out", str(out), "--dim", "8"]
    words += ["--tables", "torchrec", "--table-optimizer", "rowwise_adagrad", "--epochs"]
    found = {}

    def run(name: str, *more: str) -> None:
        statuses = forked(2, lambda: _command(name, [*words, *more]), said=out / f"{name} ")
        said = [(out / f"{name} {rank}").read_text() for rank in (0, 1)]
        found[name] = {"statuses": statuses, "said": said}

    out.mkdir()
    run("missing", "1")
    run("fine", "1")
    (shard,) = out.glob("tables-*/__1_0.distcp")
    shard.write_bytes(shard.read_bytes()[:20])
    run("damaged", "2", "--resume")
    shutil.rmtree(shard.parent)
    run("gone", "2", "--resume")
    print(json.dumps(found))


def _command(name: str, words: list[str]) -> int:
    if name == "missing" and os.environ["RANK"] == "1":
        torchrec_tables.import_module = _no_module
    return cli.main(words)


def _no_module(name: str) -> Any:
    raise ModuleNotFoundError(f"No module named {name!r}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"losses": losses, "broken": broken}[sys.argv[1]](*map(Path, sys.argv[2:]))
