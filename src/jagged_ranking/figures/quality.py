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
from jagged_ranking.results import select, with_config

FLOOR = "counts"
METRICS = {
    "auc": "AUC (higher is better)",
    "gauc": "gAUC (higher is better)",
    "ne": "NE (lower is better)",
}
DIFFERENCES = {
    "auc_difference": "AUC",
    "gauc_difference": "gAUC",
    "ne_difference": "NE (negative is better)",
}

TITLES = {
    "scores": "AUC, gAUC and normalised entropy of each model and seed on the test split of {}, "
    "with the floor of a logistic regression on counts",
    "difference": "Differences of AUC, gAUC and normalised entropy to mean-pool on the test split "
    "of {}, with bootstrap intervals over users",
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
            for name, metrics, figure_of in (
                ("scores", METRICS, _scores_figure),
                ("difference", DIFFERENCES, _difference_figure),
            ):
                if present := [m for m in metrics if m in set(rows["metric"])]:
                    figure = figure_of(rows, present, dataset, manifest)
                    stem, title = f"{manifest['id']}_{name}{suffix}", TITLES[name].format(dataset)
                    written += style.save(figure, Path(out), stem, title)
    return written


def summary(results: pd.DataFrame) -> pd.DataFrame:
    """One row a dataset and model: mean and sd over seeds of every test metric."""
    rows = select(results, op="ranking", mode="test", status="ok", metric=[*METRICS, "log_loss"])
    keys = ["workload", "provider", "metric"]
    grouped = rows.groupby(keys, sort=False)["value"].agg(["mean", "std", "count"])
    return grouped.reset_index()


def _scores_figure(
    rows: pd.DataFrame, metrics: list[str], dataset: str, manifest: Mapping[str, Any]
) -> Figure:
    rows = rows[rows["metric"].isin(metrics)]
    models = [name for name in style.ordered(list(rows["provider"].unique())) if name != FLOOR]
    figure, axes = style.new_figure(1, len(metrics), height=2.55)
    for panel, metric in zip(axes[0], metrics, strict=True):
        mine = rows[rows["metric"] == metric]
        for place, model in enumerate(models):
            _seeds(panel, place, style.look_of(model), mine[mine["provider"] == model]["value"])
        _model_axis(panel, models)
        panel.margins(y=0.18)
        floor = mine[mine["provider"] == FLOOR]["value"]
        if len(floor):
            _floor_line(panel, float(floor.iloc[0]))
        panel.yaxis.set_major_locator(MaxNLocator(5))
        panel.set_title(METRICS[metric])
    handles: dict[str, Any] = {
        "one seed": Line2D([], [], color="#777777", marker="o", linestyle="none", markersize=3),
        "mean ± sd over seeds": Line2D(
            [], [], color="#333333", marker="_", linestyle="none", markersize=10
        ),
    }
    if (rows["provider"] == FLOOR).any():
        handles["floor: logistic regression on running counts"] = Line2D([], [], **_FLOOR_LINE)
    axes[0][0].set_ylabel(f"test split of {dataset}")
    style.legend(figure, handles)
    style.finish(figure, manifest)
    return figure


def _floor_line(panel: Axes, floor: float) -> None:
    """The floor, where it does not press the models into a corner of the panel: else its number,
    at the edge that it lies behind."""
    low, high = panel.get_ylim()
    reach = _FLOOR_REACH * (high - low)
    if low - reach <= floor <= high + reach:
        panel.axhline(floor, **_FLOOR_LINE, zorder=2)
        return
    above = floor > high
    panel.text(
        0.5,
        0.99 if above else 0.01,
        f"floor: {floor:.3f} {'↑' if above else '↓'}",
        transform=panel.transAxes,
        ha="center",
        va="top" if above else "bottom",
        color=_FLOOR_LINE["color"],
        fontsize=6,
    )


def _seeds(panel: Axes, place: int, looks: style.Look, values: pd.Series) -> None:
    numbers = values.to_numpy(float)
    if not len(numbers):
        return
    # Side by side in a fixed order, so that seeds that agree do not hide each other.
    spread = np.linspace(-0.16, 0.16, len(numbers)) if len(numbers) > 1 else np.zeros(1)
    panel.plot(
        place + spread,
        numbers,
        marker=looks.marker,
        linestyle="none",
        color=looks.color,
        markersize=3.5,
        alpha=0.75,
        markeredgecolor="white",
        markeredgewidth=0.3,
        zorder=4,
    )
    sd = float(numbers.std(ddof=1)) if len(numbers) > 1 else 0.0
    mean = float(numbers.mean())
    panel.plot([place - 0.28, place + 0.28], [mean, mean], color=looks.color, linewidth=1.6)
    panel.add_patch(_box(place, mean, sd, looks.color))


def _box(place: int, mean: float, sd: float, color: str) -> Rectangle:
    return Rectangle(
        (place - 0.28, mean - sd), 0.56, 2 * sd, color=color, alpha=0.16, linewidth=0, zorder=2
    )


def _difference_figure(
    rows: pd.DataFrame, metrics: list[str], dataset: str, manifest: Mapping[str, Any]
) -> Figure:
    rows = rows[rows["metric"].isin(metrics)]
    models = style.ordered(list(rows["provider"].unique()))
    figure, axes = style.new_figure(1, len(metrics), height=0.95 + 0.32 * len(models), sharey=True)
    for panel, metric in zip(axes[0], metrics, strict=True):
        mine = rows[rows["metric"] == metric].set_index("provider")
        rankers = [model for model in models if model in mine.index and model != FLOOR]
        low, high = min([0.0, *mine.loc[rankers, "low"]]), max([0.0, *mine.loc[rankers, "high"]])
        reach = _FLOOR_REACH * (high - low)
        for place, model in enumerate(models):
            if model not in mine.index:
                continue
            row, looks = mine.loc[model], style.look_of(model)
            value = float(row["value"])
            if rankers and not low - reach <= value <= high + reach:
                _beyond(panel, place, value, low if value < low else high, looks.color)
                continue
            panel.plot([row["low"], row["high"]], [place, place], color=looks.color, linewidth=1.8)
            panel.plot(
                [value],
                [place],
                marker=looks.marker,
                color=looks.color,
                markersize=5,
                markeredgecolor="white" if looks.marker != "x" else looks.color,
                markeredgewidth=0.4 if looks.marker != "x" else 1.2,
            )
        panel.axvline(0.0, color="#888888", linewidth=0.8, zorder=1)
        panel.grid(axis="x")
        panel.grid(visible=False, axis="y")
        panel.xaxis.set_major_locator(MaxNLocator(3))
        panel.set_yticks(range(len(models)), [style.look_of(m).label for m in models])
        panel.set_ylim(len(models) - 0.5, -0.5)
        panel.tick_params(axis="y", length=0)
        panel.set_title(DIFFERENCES[metric])
        panel.set_xlabel("difference to mean-pool")
    figure.suptitle(
        f"{dataset}, test split: means over seeds, 95% user-clustered bootstrap intervals",
        fontsize=7,
    )
    style.finish(figure, manifest)
    return figure


def _beyond(panel: Axes, place: int, value: float, edge: float, color: str) -> None:
    """The number of what would press the others into a corner, at the edge that it lies behind."""
    left = value < edge
    text = f"◂ {value:+.3f}" if left else f"{value:+.3f} ▸"
    panel.text(
        edge, place, text, color=color, fontsize=6, ha="left" if left else "right", va="center"
    )


def _model_axis(panel: Axes, models: list[str]) -> None:
    labels = [style.look_of(model).label.replace(" ", "\n") for model in models]
    panel.set_xticks(range(len(models)), labels)
    panel.set_xlim(-0.6, len(models) - 0.4)
    panel.tick_params(axis="x", length=0)


_FLOOR_LINE: dict[str, Any] = {"color": "#4d4d4d", "linewidth": 1.0, "linestyle": (0, (4, 2))}
# How far from the models the floor may lie, in parts of what they span.
_FLOOR_REACH = 4.0
