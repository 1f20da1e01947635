"""The quality experiment: models x seeds on data sets, as one tidy table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from click_data import ClickDataset, open_dataset
from jagged_ranking import results
from jagged_ranking.data.data_shape import DataShape, is_next_items
from jagged_ranking.devices import default_device, usable_cores
from jagged_ranking.evaluation.all_items import ALL_ITEM_METRICS
from jagged_ranking.evaluation.evaluate import Evaluation
from jagged_ranking.evaluation.floors import FLOORS, evaluate_floor
from jagged_ranking.evaluation.popularity import NEXT_ITEM_FLOORS, evaluate_next_item_floor
from jagged_ranking.evaluation.rows import Differences, metric_row
from jagged_ranking.models.model_config import MODEL_NAMES, check_model
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.outcome import Outcome, Store
from jagged_ranking.training.runs import Run, train_all
from jagged_ranking.training.search import Search, best_of
from jagged_ranking.training.selection import settled

REPORTED = ("valid", "test")


@dataclass(frozen=True)
class Plan:
    """What is compared on one data set.

    dataset_dir: a prepared data set. models, seeds: each with each. config: what all models share,
    its model and seed replaced; with `search`, what the trials are drawn around, of which each
    model then has its best, by `config.select` on the validation split. store: see `Run`.

    Raises ValueError for an unknown model, no model or seed, a seed that is none, or a search space
    that does not fit `config`.
    """

    dataset_dir: str | Path
    models: Sequence[str] = MODEL_NAMES
    seeds: Sequence[int] = (0, 1, 2)
    config: TrainConfig = field(default_factory=TrainConfig)
    search: Search | None = None
    store: Store | None = None

    def __post_init__(self) -> None:
        for name in self.models:
            check_model(name)
        if not self.seeds or not self.models:
            raise ValueError("there must be at least one model and one seed")
        for seed in self.seeds:
            replace(self.config, seed=seed)
        self.trials()

    def trials(self) -> list[TrainConfig]:
        """Every model with every trial of the search; none without one."""
        drawn = self.search.drawn(self.config) if self.search is not None else []
        return [replace(one, model=model) for model in self.models for one in drawn]

    def finals(self, scored: Sequence[Outcome]) -> list[TrainConfig]:
        """Every model with every seed, with the options that the outcomes of its trials choose."""
        select = self.config.select
        chosen = {m: _best(select, m, scored) if scored else self.config for m in self.models}
        return [replace(chosen[m], model=m, seed=seed) for m in self.models for seed in self.seeds]


def compare_models(
    plans: Sequence[Plan],
    *,
    baseline: str = "mean_pool",
    replicates: int = 2000,
    device: str | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Trains the models of each plan with every seed; their quality in the form of `results`.

    The epoch is chosen on the validation split, as trials are; the test split is scored once, at
    the end. The trials of all plans are side by side, then all that is compared: `workers`, see
    `train_all`. `replicates` are those of the bootstrap. Rows, op "ranking", workload a data set:
    - provider a model, mode "trial", metric `config.select`, one a trial: what it came to;
    - provider a model, mode "valid" or "test", metric auc, gauc, ne or log_loss, and for lists of
      candidates list_auc, mrr, hr@10 or ndcg@10, one a seed;
    - provider "counts", "popularity" or "repeats", likewise, and of next items "popularity" and
      "popularity_leak": the floors, which have no seed;
    - of next items also metric all_hr@10 and all_ndcg@10, among all items;
    - provider a model, mode "train", metric "seconds", one a seed;
    - mode "test", metric "auc_difference", ...: the mean over seeds minus the baseline's, with
      the bounds of its 95% paired bootstrap interval over users and seeds as "low" and "high" in
      config; for every model but the baseline, and for the floors, where the baseline is one of
      `models`.
    NE and log loss of a model that was trained on lists or next items, and differences to or from
    them, are "unsupported": see `evaluation/rows.py`.

    Raises ValueError for less than one replicate, and DataError for data that is not prepared:
    before anything is trained.
    """
    if replicates < 1:
        raise ValueError(f"replicates must be at least 1, got {replicates}")
    device = device or default_device()
    datasets = [open_dataset(plan.dataset_dir) for plan in plans]
    plans = [
        replace(plan, config=settled(plan.config, dataset))
        for plan, dataset in zip(plans, datasets, strict=True)
    ]

    def trained(
        configs: Sequence[Sequence[TrainConfig]], splits: Sequence[str], what: str
    ) -> list[list[Outcome]]:
        """The outcomes of each plan's trainings, all of them side by side."""
        runs = [
            Run(dataset, config, plan.store)
            for dataset, plan, mine in zip(datasets, plans, configs, strict=True)
            for config in mine
        ]
        found = iter(
            train_all(
                runs, splits=splits, device=device, workers=workers, progress=progress, what=what
            )
        )
        return [list(itertools.islice(found, len(mine))) for mine in configs]

    scored = trained([plan.trials() for plan in plans], REPORTED[:1], "trials")
    finals = [plan.finals(mine) for plan, mine in zip(plans, scored, strict=True)]
    outcomes = trained(finals, REPORTED, "models")
    # Side by side in threads, of which each is one for torch, too: nearly all of it is outside the
    # interpreter's lock.
    with ThreadPoolExecutor(
        usable_cores(), initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        floors = [_floors(dataset, pool) for dataset in datasets]
        rows = [
            _rows(
                dataset,
                of,
                trials,
                models,
                pool,
                baseline=baseline,
                replicates=replicates,
                device=device,
            )
            for dataset, of, trials, models in zip(datasets, floors, scored, outcomes, strict=True)
        ]
    return results.frame(itertools.chain.from_iterable(rows))


def _best(select: str, model: str, scored: Sequence[Outcome]) -> TrainConfig:
    sign = -1 if select == "log_loss" else 1
    mine = [one for one in scored if one.config.model == model]
    return best_of([(one.config, sign * one.evaluations[0].metrics[select]) for one in mine])


def _floors(dataset: ClickDataset, pool: Executor) -> dict[str, Future[list[Evaluation]]]:
    """Each floor of a data set, in the making."""
    of = dict.fromkeys(FLOORS, evaluate_floor)
    if is_next_items(dataset):
        of = dict.fromkeys(NEXT_ITEM_FLOORS, evaluate_next_item_floor)
    return {
        name: pool.submit(scored, name, dataset, splits=REPORTED) for name, scored in of.items()
    }


def _rows(
    dataset: ClickDataset,
    floors: Mapping[str, Future[list[Evaluation]]],
    scored: Sequence[Outcome],
    outcomes: Sequence[Outcome],
    pool: Executor,
    *,
    baseline: str,
    replicates: int,
    device: str,
) -> list[dict[str, Any]]:
    """All rows of one data set."""
    rows: list[dict[str, Any]] = []
    tested: dict[str, list[Evaluation]] = {}
    for name, future in floors.items():
        found = future.result()
        tested[name] = found[-1:]
        for one in found:
            rows += _metric_rows(dataset, name, one, {"digest": dataset.digest})
    for one in scored:
        select = one.config.select
        where = _where(dataset, one.config.model, "trial", _facts(one, device, dataset.digest))
        rows.append(metric_row(select, one.evaluations[0].metrics[select], **where))
    losses: dict[str, str] = {}
    for one in outcomes:
        facts, model = _facts(one, device, dataset.digest), one.config.model
        where = _where(dataset, model, "train", facts)
        rows.append(metric_row("seconds", one.seconds, unit="s", **where))
        for found in one.evaluations:
            rows += _metric_rows(dataset, model, found, facts)
        tested.setdefault(model, []).append(one.evaluations[-1])
        losses[model] = one.config.loss
    if baseline in tested:
        rows += _difference_rows(
            dataset, tested, losses, pool, baseline=baseline, replicates=replicates
        )
    return rows


def _facts(one: Outcome, device: str, digest: str) -> dict[str, Any]:
    return {
        **one.config.to_dict(),
        "best_epoch": one.best_epoch,
        "device": device,
        "digest": digest,
    }


def _metric_rows(
    dataset: ClickDataset, provider: str, found: Evaluation, facts: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    losses = [facts["loss"]] if "loss" in facts else []
    for metric, value in found.metrics.items():
        where = _where(dataset, provider, found.split, facts)
        yield metric_row(metric, value, losses=losses, **where)


def _difference_rows(
    dataset: ClickDataset,
    tested: Mapping[str, Sequence[Evaluation]],
    losses: Mapping[str, str],
    pool: Executor,
    *,
    baseline: str,
    replicates: int,
) -> Iterator[dict[str, Any]]:
    reference = tested[baseline]
    differences = Differences(
        reference,
        [name for name in reference[0].metrics if name not in ALL_ITEM_METRICS],
        replicates=replicates,
        train_ctr=DataShape.of(dataset).positive_rate,
    )

    def rows(provider: str) -> list[dict[str, Any]]:
        facts = {"baseline": baseline, "digest": dataset.digest}
        trained_with = [losses[one] for one in (provider, baseline) if one in losses]
        where = _where(dataset, provider, "test", facts)
        return list(differences.rows(tested[provider], losses=trained_with, **where))

    others = [name for name in tested if name != baseline]
    return itertools.chain.from_iterable(pool.map(rows, others))


def _where(
    dataset: ClickDataset, provider: str, mode: str, facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "op": "ranking",
        "provider": provider,
        "workload": dataset.name,
        "mode": mode,
        "config": facts,
    }
