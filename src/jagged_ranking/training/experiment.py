"""The quality experiment: models x seeds on one data set, as one tidy table."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from click_data import ClickDataset, open_dataset
from jagged_ranking import results
from jagged_ranking.data.data_shape import DataShape, is_next_items
from jagged_ranking.devices import default_device
from jagged_ranking.evaluation.all_items import ALL_ITEM_METRICS
from jagged_ranking.evaluation.evaluate import Evaluation
from jagged_ranking.evaluation.floors import FLOORS, evaluate_floor
from jagged_ranking.evaluation.popularity import NEXT_ITEM_FLOORS, evaluate_next_item_floor
from jagged_ranking.evaluation.rows import difference_row, metric_row
from jagged_ranking.models.model_config import MODEL_NAMES, check_model
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.outcome import Outcome, Store
from jagged_ranking.training.runs import train_all
from jagged_ranking.training.search import Search, best_of

REPORTED = ("valid", "test")


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
    search: Search | None = None,
) -> pd.DataFrame:
    """Trains every model with every seed and returns their quality in the form of `results`.

    All models share `config` (its model and seed are replaced), or, with `search`, the list of
    trials around it, of which each then has its best, by `config.select` on the validation split.
    The epoch is chosen on the validation split, too; the test split is scored once, at the end.
    `replicates` are those of the bootstrap; `workers`, `store`: see `train_all`. Rows, op
    "ranking":
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

    Raises ValueError for an unknown model, no model, seed or replicate, or a search space that
    does not fit `config`, and DataError for data that is not prepared: before anything is trained.
    """
    config = config or TrainConfig()
    for name in models:
        check_model(name)
    if not seeds or not models:
        raise ValueError("there must be at least one model and one seed")
    if replicates < 1:
        raise ValueError(f"replicates must be at least 1, got {replicates}")
    seeded = [replace(config, seed=seed) for seed in seeds]  # refuses what is none
    drawn = search.drawn(config) if search is not None else []
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
    run = partial(
        train_all, dataset, device=device, workers=workers, progress=progress, store=store
    )
    chosen = dict.fromkeys(models, config)
    if search is not None:
        trials = [replace(one, model=model) for model in models for one in drawn]
        scored = run(trials, splits=REPORTED[:1], what="trials")
        for one in scored:
            value = one.evaluations[0].metrics[config.select]
            where = _where(dataset, one.config.model, "trial", _facts(one, device, dataset.digest))
            rows.append(metric_row(config.select, value, **where))
        chosen = {model: _best(config.select, model, scored) for model in models}
    finals = [replace(chosen[m], model=m, seed=s.seed) for m in models for s in seeded]
    for one in run(finals, splits=REPORTED):
        facts, model = _facts(one, device, dataset.digest), one.config.model
        where = _where(dataset, model, "train", facts)
        rows.append(metric_row("seconds", one.seconds, unit="s", **where))
        for found in one.evaluations:
            rows += _metric_rows(dataset, model, found, facts)
        tested.setdefault(model, []).append(one.evaluations[-1])
    if baseline in tested:
        losses = {model: one.loss for model, one in chosen.items()}
        rows += _difference_rows(dataset, tested, losses, baseline=baseline, replicates=replicates)
    return results.frame(rows)


def _best(select: str, model: str, scored: Sequence[Outcome]) -> TrainConfig:
    sign = -1 if select == "log_loss" else 1
    mine = [one for one in scored if one.config.model == model]
    return best_of([(one.config, sign * one.evaluations[0].metrics[select]) for one in mine])


def _facts(one: Outcome, device: str, digest: str) -> dict[str, Any]:
    return {
        **one.config.to_dict(),
        "best_epoch": one.best_epoch,
        "device": device,
        "digest": digest,
    }


def _floors(dataset: ClickDataset) -> dict[str, list[Evaluation]]:
    of = dict.fromkeys(FLOORS, evaluate_floor)
    if is_next_items(dataset):
        of = dict.fromkeys(NEXT_ITEM_FLOORS, evaluate_next_item_floor)
    return {name: scored(name, dataset, splits=REPORTED) for name, scored in of.items()}


def _metric_rows(
    dataset: ClickDataset, provider: str, found: Evaluation, facts: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    losses = [facts["loss"]] if "loss" in facts else []
    for metric, value in found.metrics.items():
        where = _where(dataset, provider, found.split, facts)
        yield metric_row(metric, value, losses=losses, **where)


def _difference_rows(
    dataset: ClickDataset,
    tested: dict[str, list[Evaluation]],
    losses: dict[str, str],
    *,
    baseline: str,
    replicates: int,
) -> Iterator[dict[str, Any]]:
    reference = tested[baseline]
    train_ctr = DataShape.of(dataset).positive_rate
    for provider, metric in itertools.product(tested, reference[0].metrics):
        if provider == baseline or metric in ALL_ITEM_METRICS:
            continue
        facts = {"baseline": baseline, "digest": dataset.digest}
        yield difference_row(
            metric,
            f"{metric}_difference",
            tested[provider],
            reference,
            replicates=replicates,
            train_ctr=train_ctr,
            losses=[losses[one] for one in (provider, baseline) if one in losses],
            **_where(dataset, provider, "test", facts),
        )


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
