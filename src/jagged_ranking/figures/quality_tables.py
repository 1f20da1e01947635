"""Tables of model quality: the scores, and what each model was trained with."""

import json
import math

import pandas as pd

from jagged_ranking.figures import style
from jagged_ranking.figures.published import PUBLISHED
from jagged_ranking.figures.quality import (
    FLOOR,
    FLOORS,
    LIST_METRICS,
    LOWER_IS_BETTER,
    METRICS,
    NAMES,
    NEXT_ITEM_METRICS,
    shown_metrics,
    summary,
)
from jagged_ranking.results import select

KINDS = {
    METRICS: "Single candidates",
    LIST_METRICS: "Lists of candidates",
    NEXT_ITEM_METRICS: "Next items",
}


def quality(results: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(what it is, table) of the test metrics of each model, mean ± sd over seeds, and where they
    fall short of the floor; a table for each kind of request."""
    found = summary(results)
    kinds: dict[tuple[str, ...], list[pd.DataFrame]] = {}
    for _, mine in found.groupby("workload", sort=False):
        kinds.setdefault(tuple(shown_metrics(mine)), []).append(mine)
    return [
        (f"{KINDS[metrics]}: test split, mean ± sd over seeds", _of_kind(several, metrics))
        for metrics, several in kinds.items()
    ]


def _of_kind(datasets: list[pd.DataFrame], metrics: tuple[str, ...]) -> pd.DataFrame:
    rows = []
    for of_one in datasets:
        dataset = str(of_one["workload"].iloc[0])
        floors = of_one[of_one["provider"] == FLOOR].set_index("metric")["mean"]
        by_model = dict(list(of_one.groupby("provider", sort=False)))
        for model in style.ordered([str(name) for name in by_model]):
            mine = by_model[model]
            row = {"dataset": dataset, "model": style.look_of(model).label}
            for metric in metrics:
                cell = mine[mine["metric"] == metric]
                row[NAMES[metric]] = "" if cell.empty else _mean_sd(cell.iloc[0])
            row["seeds"] = "" if model in FLOORS else str(int(mine["count"].max()))
            row["below the floor"] = "" if model in FLOORS else _below(mine, floors, metrics)
            rows.append(row)
        rows += _published(dataset, list(by_model), metrics)
    table = pd.DataFrame(rows).fillna("")
    none = len(table) and not table["below the floor"].any()
    return table.drop(columns="below the floor") if none else table


def _published(dataset: str, models: list[str], metrics: tuple[str, ...]) -> list[dict[str, str]]:
    published = PUBLISHED.get(dataset)
    if published is None:
        return []
    rows = []
    for model in style.ordered(models):
        known = {m: published.scores[model, m] for m in metrics if (model, m) in published.scores}
        if known:
            label = f"{style.look_of(model).label}, published ({published.source})"
            numbers = {NAMES[metric]: f"{value:.4f}" for metric, value in known.items()}
            rows.append({"dataset": dataset, "model": label, **numbers})
    return rows


def _below(mine: pd.DataFrame, floors: pd.Series, metrics: tuple[str, ...]) -> str:
    """Of these metrics, those in which a model's mean is worse than counting."""
    worse = []
    for row in mine[mine["metric"].isin(metrics)].itertuples():
        floor = floors.get(row.metric)
        lower_is_better = row.metric in LOWER_IS_BETTER
        if floor is not None and (row.mean > floor if lower_is_better else row.mean < floor):
            worse.append(NAMES[str(row.metric)])
    return ", ".join(worse)


def budgets(results: pd.DataFrame) -> pd.DataFrame:
    """What each model was trained with: how many trials it had, the validation metric of the best
    of them, and of the options those in which the trials of its data set differ. No rows without
    a search."""
    trials = select(results, op="ranking", mode="trial")
    rows = []
    for (dataset, model), mine in trials.groupby(["workload", "provider"], sort=False):
        options = [json.loads(one) for one in mine["config"]]
        metric = str(mine["metric"].iloc[0])
        at = mine["value"].argmin() if metric in LOWER_IS_BETTER else mine["value"].argmax()
        tried = {
            name: one
            for name, one in options[int(at)].items()
            if name != "best_epoch" and len({str(other[name]) for other in options}) > 1
        }
        row = {
            "dataset": str(dataset),
            "model": style.look_of(str(model)).label,
            "trials": str(len(mine)),
            f"validation {NAMES[metric]}": f"{mine['value'].iloc[int(at)]:.4f}",
            "best options": ", ".join(f"{name} {value}" for name, value in tried.items()),
        }
        rows.append(row)
    return pd.DataFrame(rows).fillna("")


def _mean_sd(row: pd.Series) -> str:
    spread = "" if math.isnan(row["std"]) else f" ± {row['std']:.4f}"
    return f"{row['mean']:.4f}{spread}"
