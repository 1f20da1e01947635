"""Trainings of many configurations: one after another, or side by side in processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from itertools import cycle, islice
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from click_data import ClickDataset, open_dataset
from jagged_ranking.devices import usable_cores
from jagged_ranking.evaluation.evaluate import Evaluation, evaluate_model
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.processes import end_worker_with_parent
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.outcome import Outcome, Store
from jagged_ranking.training.selection import settled
from jagged_ranking.training.trainer import train

Score = Callable[[Ranker, ClickDataset, TrainConfig, tuple[str, ...]], list[Evaluation]]


def score_splits(
    model: Ranker, dataset: ClickDataset, config: TrainConfig, splits: tuple[str, ...]
) -> list[Evaluation]:
    """Of a trained model on each split."""
    return [
        evaluate_model(model, dataset, batch_size=config.batch_size, split=split)
        for split in splits
    ]


class Run(NamedTuple):
    """One training: on what, with which options, and where its outcome is kept."""

    dataset: ClickDataset
    config: TrainConfig
    store: Store | None = None

    @property
    def key(self) -> Hashable:
        return self.dataset.folder, self.config


def train_all(
    runs: Sequence[Run],
    *,
    splits: Sequence[str],
    device: str,
    workers: int | None = None,
    progress: bool = True,
    what: str = "models",
    score: Score = score_splits,
) -> list[Outcome]:
    """Trains each and scores these splits; their outcomes, in their order.

    Up to `workers` side by side, whatever their data sets; None is one a core on a CPU, and one a
    GPU. On "cuda" they take turns on the GPUs that there are. What a store has is not trained
    again, and each training is put there as soon as it is done, with options as `settled` has them.
    `score` may make other evaluations of a model than `evaluate_model`; `splits` are then the names
    of those that it returns. Side by side it is pickled.
    """
    splits = tuple(splits)
    runs = [run._replace(config=settled(run.config, run.dataset)) for run in runs]
    wanted = {run.key: run for run in runs}
    found_before = {
        key: run.store.get(run.config, splits)
        for key, run in wanted.items()
        if run.store is not None
    }
    outcomes = {key: outcome for key, outcome in found_before.items() if outcome}
    missing = [run for key, run in wanted.items() if key not in outcomes]
    workers = workers or (usable_cores() if device == "cpu" else max(1, len(visible_gpus(device))))
    alone = workers == 1 or len(missing) == 1
    train_them = _in_turn if alone else partial(_side_by_side, workers=workers)
    train_them = partial(train_them, score=score)
    bar = tqdm(total=len(missing), desc=what, unit="run", disable=not progress)
    with bar:
        for run, outcome in train_them(missing, splits, device, bar):
            outcomes[run.key] = outcome
            if run.store is not None:
                run.store.put(outcome)
    return [outcomes[run.key] for run in runs]


def _train_one(
    dataset: ClickDataset,
    config: TrainConfig,
    splits: tuple[str, ...],
    device: str,
    *,
    progress: bool,
    score: Score = score_splits,
) -> Outcome:
    started = time.perf_counter()
    trained = train(config, dataset, device=device, progress=progress)
    seconds = time.perf_counter() - started
    evaluations = score(trained.model, dataset, config, splits)
    return Outcome(config, evaluations, trained.best_epoch, seconds)


def _in_turn(
    runs: list[Run], splits: tuple[str, ...], device: str, bar: tqdm, *, score: Score
) -> Iterator[tuple[Run, Outcome]]:
    """In this process; one thread on a CPU, as side by side: of another number come other bits."""
    threads = torch.get_num_threads()
    for run in runs:
        torch.set_num_threads(1 if device == "cpu" else threads)
        try:
            options: dict[str, Any] = {"progress": not bar.disable, "score": score}
            outcome = _train_one(run.dataset, run.config, splits, device, **options)
        finally:
            torch.set_num_threads(threads)
        bar.update()
        yield run, outcome


def _side_by_side(
    runs: list[Run], splits: tuple[str, ...], device: str, bar: tqdm, *, workers: int, score: Score
) -> Iterator[tuple[Run, Outcome]]:
    """One process a run and one thread a process: in models this small, threads mostly wait.

    Outcomes come as they are done. When a run fails, those that have begun are waited for.
    """
    if not runs:
        return
    with _pool(min(workers, len(runs)), device) as pool:
        waiting = {
            pool.submit(_train_folder, run.dataset.folder, run.config, splits, device, score): run
            for run in sorted(runs, key=_work, reverse=True)
        }
        failed: Exception | None = None
        try:
            for future in as_completed(waiting):
                bar.update()
                if future.cancelled():
                    continue
                if (error := future.exception()) is None:
                    yield waiting[future], future.result()
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


def _work(run: Run) -> int:
    """Requests that it sees, at most: what is long begins first, so that nothing ends alone."""
    return run.config.epochs * run.dataset.info["counts"]["requests"]["train"]


def _pool(workers: int, device: str) -> ProcessPoolExecutor:
    context = get_context("spawn")
    gpus = context.SimpleQueue()
    for gpu in islice(cycle(visible_gpus(device) or [""]), workers):
        gpus.put(gpu)
    return ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin_worker, initargs=(gpus,)
    )


def visible_gpus(device: str) -> list[str]:
    """The GPUs that "cuda" may mean, as CUDA_VISIBLE_DEVICES names them; none of another device."""
    if device != "cuda":
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def _begin_worker(gpus: SimpleQueue) -> None:
    """Takes one of `gpus`, where there is a choice, before CUDA starts in this process: then it is
    that of all threads of its trainings."""
    end_worker_with_parent()
    torch.set_num_threads(1)
    if gpu := gpus.get():
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


@cache
def _opened(folder: Path) -> ClickDataset:
    """Opened once a process, which has several of its trainings."""
    return open_dataset(folder)


def _train_folder(
    folder: Path, config: TrainConfig, splits: tuple[str, ...], device: str, score: Score
) -> Outcome:
    """`_train_one` in another process, which opens the data for itself."""
    return _train_one(_opened(folder), config, splits, device, progress=False, score=score)
