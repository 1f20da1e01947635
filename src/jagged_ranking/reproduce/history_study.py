"""Quality over the history cap, beside what a training step costs there.

Every notebook imports this module, and one of them trains: what does, and so scikit-learn, is
imported by the functions that need it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from jagged_ranking import results
from jagged_ranking.figures.affordability import BUDGET, BY_CAP, COSTS, STEP
from jagged_ranking.reproduce.cache import cached
from jagged_ranking.reproduce.click_logs import find_prepared
from jagged_ranking.reproduce.quality_study import Trainings, distinct_folders, with_own

if TYPE_CHECKING:
    from click_data import ClickDataset
    from jagged_ranking.measure.timing import Effort
    from jagged_ranking.training.config import TrainConfig
    from jagged_ranking.training.outcome import Outcome

SPLITS = ("valid", "test")
# Metrics whose gain over the shortest cap gets an interval; that of AUC takes a sort a replicate.
GAINS = ("list_auc", "mrr", "gauc")


def history_folders(data: str | None, far: str | None, datasets: Sequence[str] = ()) -> list[Path]:
    """The prepared data sets of the study, each once: `data`, the synthetic log `far`, and those
    of `datasets` that are at hand, see `find_prepared`.

    Raises:
        ValueError: none at all.
    """
    given = [folder for folder in (data, far) if folder]
    folders = distinct_folders([*given, *find_prepared(datasets)])
    if not folders:
        raise ValueError("no data set: nothing in any of data, far, datasets")
    return folders


def quality_by_cap(
    folders: Sequence[Path],
    *,
    models: Sequence[str],
    caps: Sequence[int],
    seeds: Sequence[int],
    options: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]] | None = None,
    replicates: int,
    device: str,
    workers: int | None = None,
    run_id: str = "",
) -> pd.DataFrame:
    """Train every model at every cap with every seed, each training kept in `build/cache`.

    A cap is the most events that a request sees, in training and in scoring. Behind those given
    comes the longest history of the data set: all of it. All caps share their options.

    Args:
        folders: prepared data sets.
        models: names of rankers.
        caps: those below the longest history of a data set count.
        seeds: one training each.
        options: of `TrainConfig`, of all models.
        own: models, caps, seeds and options that a data set has of its own, see `with_own`.
        replicates: of the bootstrap over users and seeds.
        device: "cuda" or "cpu".
        workers: trainings side by side; see `train_all`.
        run_id: for the column `id`.

    Returns:
        Rows of op "ranking_by_cap", provider the model, workload the data set, config that of the
        training with the cap and the longest history:
        - mode "valid" or "test", metrics as `compare_models` has them, one a seed;
        - mode "train", metric "seconds", one a seed;
        - mode "test", metric "list_auc_gain", "mrr_gain" or "gauc_gain": the mean over seeds minus
          that at the shortest cap, with the bounds of its 95% paired bootstrap interval over users
          and seeds as "low" and "high" in config.

    Raises:
        ValueError: an unknown model or option, no model, seed or replicate, a cap below 1, or what
            `with_own` does not take: before anything is trained.
    """
    from jagged_ranking.training import experiment
    from jagged_ranking.training.runs import Run, train_all

    if replicates < 1:
        raise ValueError(f"replicates must be at least 1, got {replicates}")
    shared = {"models": models, "caps": caps, "seeds": seeds, "options": options}
    plans = _planned(folders, shared, own)
    runs = [
        Run(dataset, config, Trainings(dataset.folder, experiment.__name__, device))
        for dataset, _, configs in plans
        for config in configs
    ]
    trained = iter(train_all(runs, splits=SPLITS, device=device, workers=workers, what="caps"))
    rows: list[dict[str, Any]] = []
    for dataset, mine, configs in plans:
        outcomes = list(itertools.islice(trained, len(configs)))
        rows += _Scored(dataset, outcomes, device, mine["caps"][-1], run_id).rows(replicates)
    return results.frame(rows)


def _planned(
    folders: Sequence[Path],
    shared: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]] | None,
) -> list[tuple[ClickDataset, dict[str, Any], list[TrainConfig]]]:
    """Each data set with what holds for it, its caps those of `used_caps`, and its trainings."""
    from click_data import open_dataset
    from jagged_ranking.reproduce.step_cost import longest_history
    from jagged_ranking.training.config import TrainConfig

    plans = []
    for folder in folders:
        dataset = open_dataset(folder)
        mine = with_own(shared, own, dataset.name)
        if not mine["seeds"] or not mine["models"]:
            raise ValueError("there must be at least one model and one seed")
        mine["caps"] = used_caps(mine["caps"], longest_history(dataset))
        of_all = [
            {**mine["options"], "model": model, "seed": seed, "max_history": cap}
            # the longest take longest: side by side, they begin first
            for cap in reversed(mine["caps"])
            for model in mine["models"]
            for seed in mine["seeds"]
        ]
        plans.append((dataset, mine, [TrainConfig.from_dict(one) for one in of_all]))
    return plans


def used_caps(caps: Sequence[int], longest: int) -> list[int]:
    """The caps below the longest history, ascending, and behind them that, which is all of it.

    Raises:
        ValueError: a cap below 1.
    """
    for cap in caps:
        if cap < 1:
            raise ValueError(f"caps must be at least 1, got {cap}")
    return [*sorted({cap for cap in caps if cap < longest}), longest]


class _Scored:
    """The trainings on one data set, as rows of results."""

    def __init__(
        self,
        dataset: ClickDataset,
        outcomes: Sequence[Outcome],
        device: str,
        longest: int,
        run_id: str,
    ) -> None:
        self.dataset, self.device = dataset, device
        self.longest, self.run_id = longest, run_id
        self.of: dict[str, dict[int, list[Outcome]]] = {}
        for one in sorted(outcomes, key=lambda one: one.config.max_history):
            by_cap = self.of.setdefault(one.config.model, {})
            by_cap.setdefault(one.config.max_history, []).append(one)

    def rows(self, replicates: int) -> Iterator[dict[str, Any]]:
        from jagged_ranking.evaluation.rows import metric_row

        for by_cap in self.of.values():
            for one in itertools.chain.from_iterable(by_cap.values()):
                facts = {**one.config.to_dict(), "best_epoch": one.best_epoch}
                trained = self._where(one.config, "train", facts)
                yield metric_row("seconds", one.seconds, unit="s", **trained)
                for found in one.evaluations:
                    where = self._where(one.config, found.split, facts)
                    for metric, value in found.metrics.items():
                        yield metric_row(metric, value, losses=[one.config.loss], **where)
            yield from self._gains(by_cap, replicates)

    def _gains(
        self, by_cap: Mapping[int, Sequence[Outcome]], replicates: int
    ) -> Iterator[dict[str, Any]]:
        """Of every cap over the shortest."""
        from jagged_ranking.evaluation.rows import Differences

        tested = {cap: [one.evaluations[-1] for one in of] for cap, of in by_cap.items()}
        shortest, *longer = tested
        reference = tested[shortest]
        metrics = [name for name in GAINS if name in reference[0].metrics]
        gains = Differences(reference, metrics, replicates=replicates, name="gain")
        for cap in longer:
            where = self._where(by_cap[cap][0].config, "test", {"baseline_cap": shortest})
            yield from gains.rows(tested[cap], **where)

    def _where(self, config: TrainConfig, mode: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        of_run = {"device": self.device, "digest": self.dataset.digest, "longest": self.longest}
        return {
            "op": BY_CAP,
            "provider": config.model,
            "workload": self.dataset.name,
            "mode": mode,
            "config": {**facts, **of_run, "cap": config.max_history},
            "run_id": self.run_id,
        }


def costs_by_cap(
    folders: Sequence[Path],
    *,
    models: Sequence[str],
    attentions: Sequence[str],
    caps: Sequence[int],
    seeds: Sequence[int] = (0,),
    options: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]] | None = None,
    requests: int,
    device: str,
    effort: Effort,
    cpu_threads: int = 1,
    budget_of: str = "padded_flash",
    budget_cap: int = 100,
    budget_ms: float | None = None,
    budget_gb: float | None = None,
    run_id: str = "",
) -> pd.DataFrame:
    """`step_costs` of each data set, each kept in `build/cache`, and the `budget_rows` of all.

    Args:
        folders, models, caps, options, own: as for `quality_by_cap`.
        seeds: the first is that of the requests and of the weights.
        attentions, requests, device, effort, cpu_threads, run_id: see `step_costs`.
        budget_of, budget_cap, budget_ms, budget_gb: see `budget_rows`.

    Raises:
        ValueError: as `quality_by_cap`, before anything is measured.
    """
    from jagged_ranking.reproduce.step_cost import step_costs

    shared = {"models": models, "caps": caps, "seeds": seeds, "options": options}
    tables = []
    for number, (dataset, mine, _) in enumerate(_planned(folders, shared, own), 1):
        print(f"{number} of {len(folders)}, {dataset.name}", end=": ")
        table = cached(
            step_costs,
            dataset.folder,
            models=list(mine["models"]),
            attentions=list(attentions),
            caps=mine["caps"],
            options=mine["options"],
            requests=requests,
            device=device,
            effort=effort,
            seed=mine["seeds"][0],
            cpu_threads=cpu_threads,
            run_id=run_id,
        )
        tables.append(table)
    measured = joined(*tables)
    numbers = {"latency": budget_ms, "peak_memory": budget_gb and budget_gb * 1e9}
    rows = budget_rows(measured, of=budget_of, cap=budget_cap, given=numbers)
    return joined(measured, results.frame(rows))


def joined(*tables: pd.DataFrame) -> pd.DataFrame:
    """Several tables of results as one."""
    return pd.concat(tables, ignore_index=True)


def budget_rows(
    measured: pd.DataFrame, *, of: str, cap: int, given: Mapping[str, float | None]
) -> list[dict[str, Any]]:
    """What a training step may cost, for each data set and model: rows of op "budget".

    Args:
        measured: rows of `step_costs`.
        of: the kind of attention whose cost is the budget; one that could not be measured gives
            none.
        cap: at this cap, or where it was not measured at the longest below it, or at the shortest.
        given: budgets by the metric of the cost, in its unit, in the place of that; None for none.
    """
    rows = []
    for metric in COSTS:
        costs = results.select(measured, op=STEP, metric=metric, status="ok")
        costs = results.with_config(costs, "model", "cap", "device")
        for dataset, model in dict.fromkeys(zip(costs["workload"], costs["model"], strict=True)):
            mine = results.select(costs, workload=dataset, model=model)
            value, at = given.get(metric), None
            if value is None:
                theirs = results.select(mine, provider=of).sort_values(by="cap")
                if theirs.empty:
                    continue
                below = theirs[theirs["cap"] <= cap]
                place = below.iloc[-1] if len(below) else theirs.iloc[0]
                value, at = float(place["value"]), int(place["cap"])
            rows.append(
                results.row(
                    op=BUDGET,
                    provider=of,
                    workload=str(dataset),
                    mode="train",
                    metric=metric,
                    unit=str(mine["unit"].iloc[0]),
                    value=value,
                    config={"model": model, "cap": at, "device": str(mine["device"].iloc[0])},
                    run_id=str(mine["id"].iloc[0]),
                )
            )
    return rows
