"""What a trained ranker loses when its attention is served in FP8.

    python tests/support/fp8_quality.py DATA [DATA ...] [--model sasrec] [--seeds 0 1 2] [-n 4]
        [--options '{"epochs": 3}'] [--out FOLDER]

A ranker is trained once a seed on each prepared data set, in heads of 64 as FP8's kernel takes
them. Then the test split is scored twice by the same weights: with attention as it was trained, in
bfloat16 on a GPU and in float32 on a CPU, and by `fp8_attention`. What is lost has, for each
training, the interval of the paired bootstrap over users. On another GPU than Hopper, and on a CPU,
FP8's numbers are attended to in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from left_results import leave

from click_data import ClickDataset, open_dataset
from jagged_kernels import JaggedTensor, fp8_attention, fp8_keys, jagged_attention
from jagged_ranking import provenance, results
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.evaluation.evaluate import Evaluation, evaluate_model
from jagged_ranking.evaluation.rows import Differences, metric_row
from jagged_ranking.figures.fp8_goals import FP8_QUALITY, SERVED, TRAINED
from jagged_ranking.layers import attention
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.runs import Run, train_all

SPLIT = "test"
HEAD_DIM, HEADS = 64, 2


def _in_fp8(q: JaggedTensor, k: JaggedTensor, v: JaggedTensor, **options: Any) -> Any:
    return fp8_attention(q, fp8_keys(k, v), **options)


ATTEND: dict[str, Callable[..., Any]] = {TRAINED: jagged_attention, SERVED: _in_fp8}


@contextmanager
def attending(numbers: str) -> Iterator[None]:
    """Inside, the rankers' attention is computed so."""
    before = attention.jagged_attention
    attention.jagged_attention = ATTEND[numbers]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        attention.jagged_attention = before


class NumbersScore(NamedTuple):
    """A `Score` of `train_all`: the test split once for each of `ATTEND`."""

    def names(self) -> tuple[str, ...]:
        return tuple(f"{SPLIT}, {name}" for name in ATTEND)

    @torch.no_grad()
    def __call__(
        self, model: Ranker, dataset: ClickDataset, config: TrainConfig, splits: tuple[str, ...]
    ) -> list[Evaluation]:
        found = []
        for numbers, name in zip(ATTEND, splits, strict=True):
            with attending(numbers):
                scored = evaluate_model(model, dataset, batch_size=config.batch_size, split=SPLIT)
            found.append(replace(scored, split=name))
        return found


def quality(
    folders: Sequence[Path], *, model: str, seeds: Sequence[int], options: dict[str, Any],
    replicates: int, device: str, workers: int | None = None,
) -> pd.DataFrame:  # fmt: skip
    """Rows with the numbers as the provider and the data set as the workload, of each seed:
    metrics, and "<metric>_difference" to those as trained with its bounds, see `Differences`."""
    score = NumbersScore()
    sizes = {"dim": HEADS * HEAD_DIM, "heads": HEADS}
    options = {**sizes, **options, "model": model}
    configs = [TrainConfig.from_dict({**options, "seed": seed}) for seed in seeds]
    rows: list[dict[str, Any]] = []
    for folder in folders:
        dataset = open_dataset(folder)
        outcomes = train_all(
            [Run(dataset, one) for one in configs], splits=score.names(), device=device,
            workers=workers, what=dataset.name, score=score,
        )  # fmt: skip
        for one, outcome in zip(configs, outcomes, strict=True):
            facts = {**one.to_dict(), "device": device, "digest": dataset.digest}
            whole, losses = outcome.evaluations[0], [one.loss]
            lost = Differences(
                [whole], whole.metrics, replicates=replicates,
                train_ctr=DataShape.of(dataset).positive_rate,
            )  # fmt: skip
            for numbers, found in zip(ATTEND, outcome.evaluations, strict=True):
                where: dict[str, Any] = {"op": FP8_QUALITY, "provider": numbers, "mode": SPLIT}
                where |= {"workload": dataset.name, "run_id": FP8_QUALITY, "config": facts}
                for metric, value in found.metrics.items():
                    rows.append(metric_row(metric, value, losses=losses, **where))
                if numbers != TRAINED:
                    rows += lost.rows([found], losses=losses, **where)
    return results.frame(rows)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("data", nargs="+", type=Path, metavar="DATA", help="prepared data sets")
    parser.add_argument("--model", default="sasrec", help="one with softmax attention")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON", help="of training"
    )
    parser.add_argument("--replicates", type=int, default=2000, help="of the bootstrap")
    parser.add_argument("-n", type=int, help="trainings side by side")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the results, too")
    given = parser.parse_args(words)
    if missing := [folder for folder in given.data if not folder.is_dir()]:
        parser.error(f"there is no folder {missing[0]}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begun = provenance.begin(FP8_QUALITY, device)
    table = quality(
        given.data, model=given.model, seeds=given.seeds, options=given.options,
        replicates=given.replicates, device=device, workers=given.n,
    )  # fmt: skip
    lost = table["metric"].str.endswith("_difference")
    shown = results.with_config(table.loc[lost, :], "seed", "low", "high")
    columns = ["workload", "seed", "provider", "metric", "value", "low", "high"]
    print(shown.loc[:, columns].to_string(index=False, float_format="{:+.6f}".format))
    if given.out:
        parameters = {"model": given.model, "seeds": given.seeds, "options": given.options}
        leave(given.out, table, parameters=parameters, begun=begun)
    return 0


if __name__ == "__main__":
    sys.exit(main())
