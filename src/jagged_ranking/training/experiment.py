"""The quality experiment: models x seeds on one data set, as one tidy table."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from click_data import ClickDataset, open_dataset
from jagged_ranking import results
from jagged_ranking.data.data_shape import DataShape, is_next_items
from jagged_ranking.devices import default_device
from jagged_ranking.evaluation.all_items import ALL_ITEM_METRICS
from jagged_ranking.evaluation.evaluate import Evaluation, evaluate_model
from jagged_ranking.evaluation.floors import FLOORS, evaluate_floor
from jagged_ranking.evaluation.metrics import paired_bootstrap
from jagged_ranking.evaluation.popularity import NEXT_ITEM_FLOORS, evaluate_next_item_floor
from jagged_ranking.models.model_config import MODEL_NAMES, check_model
from jagged_ranking.processes import end_worker_with_parent
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.outcome import Outcome, Store
from jagged_ranking.training.trainer import train

REPORTED = ("valid", "test")
UNITS = {"log_loss": "nats"}


def compare_models(
    dataset_dir: str | Path,
    *,
    models: Sequence[str] = MODEL_NAMES,
    seeds: Sequence[int] = (0, 1, 2),
    config: TrainConfig | None = None,
    baseline: str = "mean_pool",
    replicates: int = 2000,
    device: str | None = None,
    workers: int | None = None,
    progress: bool = True,
    store: Store | None = None,
) -> pd.DataFrame:
    """Trains every model with every seed and returns their quality in the form of `results`.

    All models share `config` (its model and seed are replaced). The epoch is chosen on the
    validation split; the test split is scored once, at the end. On a CPU up to `workers` runs
    (one a core when None) go side by side, on a GPU one after another. What `store` has is not
    trained again, and each training is put there as soon as it is done. Rows, op "ranking":
    - provider a model, mode "valid" or "test", metric auc, gauc, ne or log_loss, and for lists of
      candidates list_auc, mrr, hr@10 or ndcg@10, one a seed;
    - provider "counts", "popularity" or "repeats", likewise, and of next items "popularity" and
      "popularity_leak": the floors, which have no seed;
    - of next items also metric all_hr@10 and all_ndcg@10, among all items;
    - provider a model, mode "train", metric "seconds", one a seed;
    - mode "test", metric "auc_difference", ...: the mean over seeds minus the baseline's, with
      the bounds of its 95% paired bootstrap interval over users and seeds as "low" and "high" in
      config; for every model but the baseline, and for the floors.

    Raises ValueError for an unknown model, no seed or no replicate, DataError for data that is not
    prepared: before anything is trained.
    """
    config = config or TrainConfig()
    for name in models:
        check_model(name)
    if not seeds or not models:
        raise ValueError("there must be at least one model and one seed")
    if replicates < 1:
        raise ValueError(f"replicates must be at least 1, got {replicates}")
    configs = [replace(config, model=m, seed=s) for m, s in itertools.product(models, seeds)]
    dataset = open_dataset(dataset_dir)
    device = device or default_device()
    floors = _floors(dataset)
    tested = {name: [found[-1]] for name, found in floors.items()}
    rows = [
        row
        for name, found in floors.items()
        for one in found
        for row in _metric_rows(dataset, name, one, {"digest": dataset.digest})
    ]
    found_before = {one: store.get(one) for one in configs} if store is not None else {}
    outcomes = {one: outcome for one, outcome in found_before.items() if outcome}
    missing = [one for one in dict.fromkeys(configs) if one not in outcomes]
    runs = _in_turn if device != "cpu" or workers == 1 else _side_by_side
    bar = tqdm(total=len(missing), desc="models", unit="run", disable=not progress)
    with bar:
        for one in runs(dataset, missing, device, bar, workers or _cores()):
            outcomes[one.config] = one
            if store is not None:
                store.put(one)
    for one in map(outcomes.__getitem__, configs):
        facts = {
            **one.config.to_dict(),
            "best_epoch": one.best_epoch,
            "device": device,
            "digest": dataset.digest,
        }
        model = one.config.model
        rows.append(_row(dataset, model, "train", "seconds", one.seconds, facts, unit="s"))
        for found in one.evaluations:
            rows += _metric_rows(dataset, model, found, facts)
        tested.setdefault(model, []).append(one.evaluations[-1])
    if baseline in tested:
        rows += _difference_rows(dataset, tested, baseline=baseline, replicates=replicates)
    return results.frame(rows)


def _floors(dataset: ClickDataset) -> dict[str, list[Evaluation]]:
    of = dict.fromkeys(FLOORS, evaluate_floor)
    if is_next_items(dataset):
        of = dict.fromkeys(NEXT_ITEM_FLOORS, evaluate_next_item_floor)
    return {name: scored(name, dataset, splits=REPORTED) for name, scored in of.items()}


def _train_one(
    dataset: ClickDataset, config: TrainConfig, device: str, *, progress: bool
) -> Outcome:
    started = time.perf_counter()
    trained = train(config, dataset, device=device, progress=progress)
    seconds = time.perf_counter() - started
    evaluations = [
        evaluate_model(trained.model, dataset, batch_size=config.batch_size, split=split)
        for split in REPORTED
    ]
    return Outcome(config, evaluations, trained.best_epoch, seconds)


def _in_turn(
    dataset: ClickDataset, configs: list[TrainConfig], device: str, bar: tqdm, workers: int
) -> Iterator[Outcome]:
    del workers
    for config in configs:
        yield _train_one(dataset, config, device, progress=not bar.disable)
        bar.update()


def _side_by_side(
    dataset: ClickDataset, configs: list[TrainConfig], device: str, bar: tqdm, workers: int
) -> Iterator[Outcome]:
    """One process a run and one thread a process: in models this small, threads mostly wait.

    Outcomes come as they are done. When a run fails, those that have begun are waited for.
    """
    if not configs:
        return
    pool = ProcessPoolExecutor(
        min(workers, len(configs)), mp_context=get_context("spawn"), initializer=_begin_worker
    )
    with pool:
        waiting = [pool.submit(_train_folder, dataset.folder, config, device) for config in configs]
        failed: Exception | None = None
        try:
            for future in as_completed(waiting):
                bar.update()
                if future.cancelled():
                    continue
                if (error := future.exception()) is None:
                    yield future.result()
                elif isinstance(error, Exception):
                    failed = failed or error
                    for other in waiting:
                        other.cancel()
                else:
                    raise error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        if failed:
            raise failed


def _begin_worker() -> None:
    end_worker_with_parent()
    torch.set_num_threads(1)


def _train_folder(folder: Path, config: TrainConfig, device: str) -> Outcome:
    """`_train_one` in another process, which opens the data for itself."""
    return _train_one(open_dataset(folder), config, device, progress=False)


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _metric_rows(
    dataset: ClickDataset, provider: str, found: Evaluation, facts: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for metric, value in found.metrics.items():
        yield _row(dataset, provider, found.split, metric, value, facts)


def _difference_rows(
    dataset: ClickDataset,
    tested: dict[str, list[Evaluation]],
    *,
    baseline: str,
    replicates: int,
) -> Iterator[dict[str, Any]]:
    reference = tested[baseline]
    train_ctr = DataShape.of(dataset).positive_rate
    for provider, metric in itertools.product(tested, reference[0].metrics):
        if provider == baseline or metric in ALL_ITEM_METRICS:
            continue
        found = paired_bootstrap(
            metric,
            reference[0].user,
            reference[0].request,
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
        message="" if known else "needs both labels, of one user or one request",
        config=facts,
    )
