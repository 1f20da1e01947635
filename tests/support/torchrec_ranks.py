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
from forked_ranks import (
    BY_ROW,
    NEXT,
    RESUMED_FROM,
    SMALL,
    by_ranks,
    forked,
    resumed,
    told,
    trained,
)

from click_data import ClickDataset, open_dataset
from jagged_ranking import cli
from jagged_ranking.training import torchrec_tables
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.rank_group import RankGroup
from jagged_ranking.training.ranks import Ranks
from jagged_ranking.training.run_files import load_model
from jagged_ranking.training.trainer import TrainResult

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


def losses(data: Path, out: Path) -> None:
    """Of one process without TorchRec, of ranks with it, and of runs that go on as others."""
    dataset = open_dataset(data)
    plain = {name: replace(config, tables="replicated") for name, config in CONFIGS.items()}
    one = _results(dataset, Ranks(), plain | {"apart": RESUMED}, out / "by 1")
    one["whole"] = _told(trained(dataset, replace(RESUMED, tables="replicated")))

    def work(ranks: RankGroup, folder: Path) -> dict[str, Any]:
        return _results(dataset, ranks, CONFIGS, folder)

    found = by_ranks(dataset, RESUMED, work, _told, out)
    one["resumed"] = resumed(dataset, RESUMED, out / RESUMED_FROM[1], Ranks(), _told)
    one["loaded"] = {
        name: _sums(load_model(out / "by 2" / name, digest=dataset.digest)[0]) for name in CONFIGS
    }
    print(json.dumps({"1": [one], **found}))


def _results(
    dataset: ClickDataset, ranks: Ranks, configs: dict[str, TrainConfig], out: Path
) -> dict[str, Any]:
    return {
        name: _told(trained(dataset, config, ranks=ranks, out=out / name))
        for name, config in configs.items()
    }


def _told(result: TrainResult) -> dict[str, Any]:
    rows = [len(table.weight) for table in result.model.embedding.id_tables.values()]
    return {**told(result), "rows": rows, "weights": _sums(result.model)}


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
