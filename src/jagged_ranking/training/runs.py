"""Trainings of many configurations: one after another, or side by side in processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path

import torch
from tqdm import tqdm

from click_data import ClickDataset, open_dataset
from jagged_ranking.evaluation.evaluate import evaluate_model
from jagged_ranking.processes import end_worker_with_parent
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.outcome import Outcome, Store
from jagged_ranking.training.trainer import train


def train_all(
    dataset: ClickDataset,
    configs: Sequence[TrainConfig],
    *,
    splits: Sequence[str],
    device: str,
    workers: int | None = None,
    progress: bool = True,
    store: Store | None = None,
    what: str = "models",
) -> list[Outcome]:
    """Trains each of `configs` and scores these splits, in their order.

    Up to `workers` side by side; None is one a core on a CPU, and one after another on a GPU. What
    `store` has is not trained again, and each training is put there as soon as it is done.
    """
    splits = tuple(splits)
    found_before = {one: store.get(one, splits) for one in configs} if store is not None else {}
    outcomes = {one: outcome for one, outcome in found_before.items() if outcome}
    missing = [one for one in dict.fromkeys(configs) if one not in outcomes]
    workers = workers or (_cores() if device == "cpu" else 1)
    alone = workers == 1 or len(missing) == 1
    runs = _in_turn if alone else partial(_side_by_side, workers=workers)
    bar = tqdm(total=len(missing), desc=what, unit="run", disable=not progress)
    with bar:
        for one in runs(dataset, missing, splits, device, bar):
            outcomes[one.config] = one
            if store is not None:
                store.put(one)
    return [outcomes[one] for one in configs]


def _train_one(
    dataset: ClickDataset,
    config: TrainConfig,
    splits: tuple[str, ...],
    device: str,
    *,
    progress: bool,
) -> Outcome:
    started = time.perf_counter()
    trained = train(config, dataset, device=device, progress=progress)
    seconds = time.perf_counter() - started
    evaluations = [
        evaluate_model(trained.model, dataset, batch_size=config.batch_size, split=split)
        for split in splits
    ]
    return Outcome(config, evaluations, trained.best_epoch, seconds)


def _in_turn(
    dataset: ClickDataset,
    configs: list[TrainConfig],
    splits: tuple[str, ...],
    device: str,
    bar: tqdm,
) -> Iterator[Outcome]:
    """In this process; one thread on a CPU, as side by side: of another number come other bits."""
    threads = torch.get_num_threads()
    for config in configs:
        torch.set_num_threads(1 if device == "cpu" else threads)
        try:
            outcome = _train_one(dataset, config, splits, device, progress=not bar.disable)
        finally:
            torch.set_num_threads(threads)
        bar.update()
        yield outcome


def _side_by_side(
    dataset: ClickDataset,
    configs: list[TrainConfig],
    splits: tuple[str, ...],
    device: str,
    bar: tqdm,
    *,
    workers: int,
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
        waiting = [
            pool.submit(_train_folder, dataset.folder, config, splits, device) for config in configs
        ]
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


@lru_cache(maxsize=1)
def _opened(folder: Path) -> ClickDataset:
    """Opened once a process, which has several of its trainings."""
    return open_dataset(folder)


def _train_folder(
    folder: Path, config: TrainConfig, splits: tuple[str, ...], device: str
) -> Outcome:
    """`_train_one` in another process, which opens the data for itself."""
    return _train_one(_opened(folder), config, splits, device, progress=False)


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
