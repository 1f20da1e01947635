"""The quality experiment: models x seeds on one data set, as one tidy table."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

from click_data import ClickDataset, open_dataset
from jagged_ranking import results
from jagged_ranking.config import TrainConfig
from jagged_ranking.counts import evaluate_counts
from jagged_ranking.evaluate import Evaluation, evaluate_model
from jagged_ranking.metrics import METRICS, paired_bootstrap
from jagged_ranking.models import MODELS
from jagged_ranking.trainer import train

COUNTS = "counts"
REPORTED = ("valid", "test")
UNITS = {"log_loss": "nats"}


def compare_models(
    dataset_dir: str | Path,
    *,
    models: Sequence[str] = tuple(MODELS),
    seeds: Sequence[int] = (0, 1, 2),
    config: TrainConfig | None = None,
    baseline: str = "mean_pool",
    replicates: int = 2000,
    device: str | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Trains every model with every seed and returns their quality in the form of `results`.

    All models share `config` (its model and seed are replaced). The epoch is chosen on the
    validation split; the test split is scored once, at the end. Rows, op "ranking":
    - provider a model, mode "valid" or "test", metric auc, gauc, ne or log_loss, one a seed;
    - provider "counts", likewise: the floor, which has no seed;
    - provider a model, mode "train", metric "seconds", one a seed;
    - mode "test", metric "auc_difference", ...: the mean over seeds minus the baseline's, with
      the bounds of its 95% user-clustered paired bootstrap interval as "low" and "high" in
      config; for every model but the baseline, and for the counts.

    Raises ValueError for an unknown model or no seed, DataError for data that is not prepared.
    """
    config = config or TrainConfig()
    if unknown := [name for name in models if name not in MODELS]:
        raise ValueError(f"no model {unknown[0]!r}; there are {', '.join(MODELS)}")
    if not seeds or not models:
        raise ValueError("there must be at least one model and one seed")
    dataset = open_dataset(dataset_dir)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tested: dict[str, list[Evaluation]] = {}
    rows: list[dict[str, Any]] = []
    for split in REPORTED:
        found = evaluate_counts(dataset, split=split)
        rows += _metric_rows(dataset, COUNTS, found, {"digest": dataset.digest})
        if split == "test":
            tested[COUNTS] = [found]
    runs = tqdm(
        list(itertools.product(models, seeds)),
        desc=f"models on {dataset.name}",
        unit="run",
        disable=not progress,
    )
    for model, seed in runs:
        chosen = replace(config, model=model, seed=seed)
        started = time.perf_counter()
        trained = train(chosen, dataset, device=device, progress=progress)
        seconds = time.perf_counter() - started
        facts = {
            **chosen.to_dict(),
            "best_epoch": trained.best_epoch,
            "device": device,
            "digest": dataset.digest,
        }
        rows.append(_row(dataset, model, "train", "seconds", seconds, facts, unit="s"))
        for split in REPORTED:
            found = evaluate_model(trained.model, dataset, config=chosen, split=split)
            rows += _metric_rows(dataset, model, found, facts)
            if split == "test":
                tested.setdefault(model, []).append(found)
    if baseline in tested:
        rows += _difference_rows(dataset, tested, baseline=baseline, replicates=replicates)
    return results.frame(rows)


def _metric_rows(
    dataset: ClickDataset, provider: str, found: Evaluation, facts: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for metric in METRICS:
        yield _row(dataset, provider, found.split, metric, found.metrics[metric], facts)


def _difference_rows(
    dataset: ClickDataset,
    tested: dict[str, list[Evaluation]],
    *,
    baseline: str,
    replicates: int,
) -> Iterator[dict[str, Any]]:
    reference = tested[baseline]
    train_ctr = float(np.mean(dataset.samples("train").label))
    for provider, metric in itertools.product(tested, METRICS):
        if provider == baseline:
            continue
        found = paired_bootstrap(
            metric,
            reference[0].user,
            reference[0].label,
            np.stack([one.probability for one in tested[provider]]),
            np.stack([one.probability for one in reference]),
            train_ctr=train_ctr,
            replicates=replicates,
        )
        facts = {
            "baseline": baseline,
            "digest": dataset.digest,
            "level": 0.95,
            "low": None if math.isnan(found.low) else found.low,
            "high": None if math.isnan(found.high) else found.high,
            "replicates": replicates,
            "seeds": len(tested[provider]),
        }
        yield _row(dataset, provider, "test", f"{metric}_difference", found.value, facts)


def _row(
    dataset: ClickDataset,
    provider: str,
    mode: str,
    metric: str,
    value: float,
    facts: dict[str, Any],
    *,
    unit: str | None = None,
) -> dict[str, Any]:
    known = not math.isnan(value)
    return results.row(
        op="ranking",
        provider=provider,
        workload=dataset.name,
        mode=mode,
        metric=metric,
        unit=unit or UNITS.get(metric.removesuffix("_difference"), "1"),
        value=value,
        status="ok" if known else "unsupported",
        message="" if known else "needs both labels, in one user for gAUC",
        config=facts,
    )
