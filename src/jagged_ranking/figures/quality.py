"""Quality figures: scores of the models with every seed shown, and differences to mean-pool."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from jagged_ranking.figures import style
from jagged_ranking.figures.published import PUBLISHED
from jagged_ranking.results import select, with_config

# What needs no model of a history: beside every model, and no model itself.
FLOORS = ("counts", "popularity", "repeats", "popularity_leak")
FLOOR = FLOORS[0]  # that a model should not lie below
# By what the requests of a data set are, the metrics that it is judged by in figures.
METRICS = ("auc", "gauc", "ne")
LIST_METRICS = ("list_auc", "mrr", "ndcg@10")
NEXT_ITEM_METRICS = ("hr@10", "ndcg@10", "all_hr@10")
NAMES = {
    "auc": "AUC",
    "gauc": "gAUC",
    "ne": "NE",
    "log_loss": "log loss",
    "list_auc": "list AUC",
    "mrr": "MRR",
    "hr@10": "HR@10",
    "ndcg@10": "nDCG@10",
    "all_hr@10": "HR@10 of all items",
    "all_ndcg@10": "nDCG@10 of all items",
}
LOWER_IS_BETTER = ("ne", "log_loss")

TITLES = {
    "scores": "{} of each model and seed on the test split of {}, with what counts, popularity and "
    "repeats give without a model",
    "difference": "Differences to mean-pool of {} on the test split of {}, with 95% "
    "intervals over users and seeds",
}


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw what the results allow; returns the files, SVG, PDF and PNG of each figure.

    For each dataset `<id>_scores` (test split) and `<id>_difference`, with the dataset's name
    behind it where there are several.
    """
    table = with_config(select(results, op="ranking", mode="test", status="ok"), "low", "high")
    datasets = list(dict.fromkeys(table["workload"]))
    written: list[Path] = []
    with style.look():
        for dataset in datasets:
            rows = table[table["workload"] == dataset]
            suffix = f"_{dataset}" if len(datasets) > 1 else ""
            metrics = shown_metrics(rows)
            for name, ending, figure_of in (
                ("scores", "", _scores_figure),
                ("difference", "_difference", _difference_figure),
            ):
                present = [m for m in metrics if f"{m}{ending}" in set(rows["metric"])]
                if present:
                    said = ", ".join(NAMES[metric] for metric in present)
                    figure = figure_of(rows, present, dataset, manifest)
                    stem = f"{manifest['id']}_{name}{suffix}"
                    title = TITLES[name].format(said, dataset)
                    written += style.save(figure, Path(out), stem, title)
    return written


def shown_metrics(rows: pd.DataFrame) -> list[str]:
    """The metrics that a data set is judged by in figures."""
    found = set(rows["metric"])
    if "all_hr@10" in found:
        return list(NEXT_ITEM_METRICS)
    return list(LIST_METRICS if "list_auc" in found else METRICS)


def summary(results: pd.DataFrame) -> pd.DataFrame:
    """One row a dataset and model: mean and sd over seeds of every test metric."""
    rows = select(results, op="ranking", mode="test", status="ok", metric=list(NAMES))
    keys = ["workload", "provider", "metric"]
    grouped = rows.groupby(keys, sort=False)["value"].agg(["mean", "std", "count"])
    return grouped.reset_index()


def differences(results: pd.DataFrame) -> pd.DataFrame:
    """Rows of the differences to mean-pooling on the test split, `metric` what differs: with the
    bounds of their intervals (low, high), and where these lie (side: 1 above 0, -1 below, 0 on
    both)."""
    rows = select(results, op="ranking", mode="test", status="ok")
    rows = rows[rows["metric"].str.endswith("_difference")]
    rows = rows.assign(metric=rows["metric"].str.removesuffix("_difference"))
    rows = with_config(rows, "low", "high", "device")
    low, high = (rows[bound].astype(float) for bound in ("low", "high"))
    side = np.where(low > 0, 1, np.where(high < 0, -1, 0))
    return rows.assign(low=low, high=high, side=side)


def _scores_figure(
    rows: pd.DataFrame, metrics: list[str], dataset: str, manifest: Mapping[str, Any]
) -> Figure:
    rows = rows[rows["metric"].isin(metrics)]
    models = [name for name in style.ordered(list(rows["provider"].unique())) if name not in FLOORS]
    published = PUBLISHED.get(dataset)
    figure, axes = style.new_figure(1, len(metrics), height=1.35 + 0.2 * len(models), sharey=True)
    for panel, metric in zip(axes[0], metrics, strict=True):
        mine = rows[rows["metric"] == metric]
        for place, model in enumerate(models):
            _seeds(panel, place, style.look_of(model), mine[mine["provider"] == model]["value"])
            if published and (model, metric) in published.scores:
                panel.plot([published.scores[model, metric]], [place], **_PUBLISHED_LOOK)
        _model_axis(panel, models)
        panel.margins(x=0.1)
        floors = mine[mine["provider"].isin(FLOORS)].set_index("provider")["value"]
        _floor_lines(panel, floors)
        panel.set_title(_title(metric))
    handles: dict[str, Any] = {
        "one seed": Line2D([], [], color="#777777", marker="o", linestyle="none", markersize=3),
        "mean ± sd over seeds": Line2D(
            [], [], color="#333333", marker="|", linestyle="none", markersize=8
        ),
    }
    for name in FLOORS:
        if (rows["provider"] == name).any():
            handles[style.look_of(name).label] = Line2D([], [], **_floor_look(name))
    if published:
        handles[f"published: {published.source}"] = Line2D([], [], **_PUBLISHED_LOOK)
    axes[0][0].set_ylabel(f"test split of\n{style.broken(dataset, 14)}")
    style.legend(figure, handles)
    style.finish(figure, manifest)
    return figure


def _title(metric: str) -> str:
    return f"{NAMES[metric]} (lower is better)" if metric in LOWER_IS_BETTER else NAMES[metric]


def _floor_lines(panel: Axes, floors: pd.Series) -> None:
    """The floors, where they do not press the models into a corner of the panel: else their
    numbers, at the edge that they lie behind."""
    low, high = panel.get_xlim()
    reach = _FLOOR_REACH * (high - low)
    behind: dict[bool, list[str]] = {False: [], True: []}
    for name, floor in floors.items():
        if low - reach <= floor <= high + reach:
            panel.axvline(float(floor), **_floor_look(str(name)), zorder=2)
        else:
            behind[floor > high].append(f"{style.look_of(str(name)).label} {floor:.3f}")
    bottom, top = panel.get_ylim()  # models from the top down, as numbers on the axis grow
    said = max(map(len, behind.values()))
    panel.set_ylim(bottom + _FLOOR_TEXT * said, top)  # numbers stand where no model does
    for above, lines in behind.items():
        if lines:
            panel.text(
                0.99 if above else 0.01,
                0.03,
                "\n".join(f"{one} ▸" if above else f"◂ {one}" for one in lines),
                transform=panel.transAxes,
                ha="right" if above else "left",
                va="bottom",
                color=_FLOOR_COLOR,
                fontsize=6,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
                zorder=3,
            )


def _floor_look(name: str) -> dict[str, Any]:
    return {"color": _FLOOR_COLOR, "linewidth": 1.0, "linestyle": style.look_of(name).line}


def _seeds(panel: Axes, place: int, looks: style.Look, values: pd.Series) -> None:
    numbers = values.to_numpy(float)
    if not len(numbers):
        return
    # Below each other in a fixed order, so that seeds that agree do not hide each other.
    spread = np.linspace(-0.22, 0.22, len(numbers)) if len(numbers) > 1 else np.zeros(1)
    panel.plot(
        numbers,
        place + spread,
        marker=looks.marker,
        linestyle="none",
        color=looks.color,
        markersize=3,
        alpha=0.75,
        markeredgecolor="white",
        markeredgewidth=0.3,
        zorder=4,
    )
    sd = float(numbers.std(ddof=1)) if len(numbers) > 1 else 0.0
    mean = float(numbers.mean())
    panel.plot([mean, mean], [place - 0.34, place + 0.34], color=looks.color, linewidth=1.6)
    corner, width = (mean - sd, place - 0.34), 2 * sd
    panel.add_patch(
        Rectangle(corner, width, 0.68, color=looks.color, alpha=0.16, linewidth=0, zorder=2)
    )


def _difference_figure(
    rows: pd.DataFrame, metrics: list[str], dataset: str, manifest: Mapping[str, Any]
) -> Figure:
    rows = rows[rows["metric"].isin([f"{metric}_difference" for metric in metrics])]
    models = style.ordered(list(rows["provider"].unique()))
    figure, axes = style.new_figure(1, len(metrics), height=0.95 + 0.2 * len(models), sharey=True)
    for panel, metric in zip(axes[0], metrics, strict=True):
        mine = rows[rows["metric"] == f"{metric}_difference"].set_index("provider")
        rankers = [model for model in models if model in mine.index and model not in FLOORS]
        low, high = min([0.0, *mine.loc[rankers, "low"]]), max([0.0, *mine.loc[rankers, "high"]])
        reach = _FLOOR_REACH * (high - low)
        beyond: list[tuple[int, str, float]] = []
        for place, model in enumerate(models):
            if model not in mine.index:
                continue
            row, looks = mine.loc[model], style.look_of(model)
            value = float(row["value"])
            if rankers and not low - reach <= value <= high + reach:
                beyond.append((place, looks.color, value))
                continue
            panel.plot([row["low"], row["high"]], [place, place], color=looks.color, linewidth=1.8)
            panel.plot(
                [value],
                [place],
                marker=looks.marker,
                color=looks.color,
                markersize=5,
                markeredgecolor=looks.color if model in FLOORS else "white",
                markeredgewidth=1.2 if model in FLOORS else 0.4,
            )
        panel.axvline(0.0, color="#888888", linewidth=0.8, zorder=1)
        edges = panel.get_xlim()
        for place, color, value in beyond:
            _beyond(panel, place, value, edges[0] if value < low else edges[1], color)
        panel.set_xlim(edges)
        _model_axis(panel, models)
        better = " (negative is better)" if metric in LOWER_IS_BETTER else ""
        panel.set_title(NAMES[metric] + better)
        panel.set_xlabel("difference to mean-pool")
    figure.suptitle(
        f"{dataset}, test split: means over seeds, 95% intervals over users and seeds",
        fontsize=7,
    )
    style.finish(figure, manifest)
    return figure


def _beyond(panel: Axes, place: int, value: float, edge: float, color: str) -> None:
    """The number of what would press the others into a corner, at the edge that it lies behind."""
    left = value < edge
    text = f"◂ {value:+.3f}" if left else f"{value:+.3f} ▸"
    panel.text(
        edge, place, text, color=color, fontsize=6, ha="left" if left else "right", va="center",
        # The line at 0 may be as near as the minus; the axis itself stays above.
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5}, zorder=2,
    )  # fmt: skip


def _model_axis(panel: Axes, models: list[str]) -> None:
    """A line for each model, the first at the top, and numbers along x."""
    panel.grid(axis="x")
    panel.grid(visible=False, axis="y")
    panel.xaxis.set_major_locator(MaxNLocator(4))
    panel.set_yticks(range(len(models)), [style.look_of(model).label for model in models])
    panel.set_ylim(len(models) - 0.5, -0.5)
    panel.tick_params(axis="y", length=0)


_FLOOR_COLOR = "#4d4d4d"
_FLOOR_TEXT = 0.75  # the height of a line of text, in lines of models
# How far from the models the floor may lie, in parts of what they span.
_FLOOR_REACH = 4.0
_PUBLISHED_LOOK: dict[str, Any] = {
    "marker": "D",
    "color": style.PAPER_COLOR,
    "markerfacecolor": "none",
    "markersize": 5,
    "linestyle": "none",
    "zorder": 5,
}
