"""What longer histories are worth and what they cost, over one axis: the history cap.

A figure a model, a column a data set: above, the quality; below it, time and peak memory of a
training step by each kind of attention, with the budget, and where each kind meets it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from jagged_ranking.devices import CPU
from jagged_ranking.figures import style
from jagged_ranking.figures.affordability import (
    BY_CAP,
    COSTS,
    HOST_TIME,
    STEP,
    budgets,
    by_cap,
    longest_caps,
    step_costs,
    unit_of,
)
from jagged_ranking.figures.panels import lost_marks, marker_handle
from jagged_ranking.figures.quality import NAMES
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.results import select, with_config

TITLE = (
    "Quality of {} over the cap on the length of histories, and below it time and peak memory of a "
    "training step by each kind of attention, with the longest cap that each affords"
)
NOTE = (
    "band: 95% interval over users and seeds · dots: one seed · on the curve (between dots a "
    "guess): longest cap within device time (filled), memory (ring)"
)
ON_CPU = " · costs on a CPU"
# How many labels a panel of one column has room for, by the number of columns.
_ROOM = {1: 12, 2: 8, 3: 6}
_LEAST_ROOM = 5
_RING = 3.0  # points that a ring is wider than the mark inside of it
_CURVE = "#4d4d4d"  # that of quality, on which the kinds of attention have their colours
_HOST: dict[str, Any] = {"color": "#888888", "linewidth": 1.1, "linestyle": (0, (1, 1))}
HOST_LABEL = "host, to launch a step of ours"
_BUDGET: dict[str, Any] = {"color": style.PAPER_COLOR, "linewidth": 0.9, "linestyle": (0, (4, 2))}


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw `<id>_<model>` for every model with results; returns the files."""
    scored = with_config(select(results, op=BY_CAP), "cap")
    costs = with_config(select(results, op=STEP), "model")
    models = style.ordered(list(dict.fromkeys([*scored["provider"], *costs["model"]])))
    written: list[Path] = []
    with style.look():
        for model in models:
            figure = _figure(results, model, manifest)
            if figure is None:
                continue
            title = TITLE.format(style.look_of(model).label)
            written += style.save(figure, Path(out), f"{manifest['id']}_{model}", title)
    return written


def _figure(results: pd.DataFrame, model: str, manifest: Mapping[str, Any]) -> Figure | None:
    """None where the results say neither scores nor costs of the model."""
    quality = _of(by_cap(results), model)
    costs = {metric: _of(step_costs(results, metric), model) for metric in COSTS}
    bounds = {metric: _of(budgets(results, metric), model) for metric in COSTS}
    reached = _of(longest_caps(results), model)
    hosts = _of(step_costs(results, HOST_TIME), model)
    hosts = select(hosts, provider=OURS) if len(hosts) else hosts
    datasets = list(
        dict.fromkeys(
            name for one in (quality, *costs.values()) for name in one["workload"].tolist()
        )
    )
    if not datasets:
        return None
    figure, axes = style.new_figure(3, len(datasets), height=5.4, sharex="col")
    handles: dict[str, Any] = {}
    units = {metric: unit_of(metric, float(costs[metric]["value"].max())) for metric in COSTS}
    for column, dataset in enumerate(datasets):
        scored, marks = _on(quality, dataset), _on(reached, dataset)
        _quality_panel(axes[0][column], scored, marks)
        axes[0][column].set_title(style.broken(dataset, 24))
        for row, metric in enumerate(COSTS, 1):
            panel, mine = axes[row][column], _on(costs[metric], dataset)
            host = _on(hosts, dataset) if metric == "latency" else hosts.iloc[:0]
            handles |= _cost_panel(panel, mine, host, units[metric][1])
            handles |= _budget_line(
                panel,
                _on(bounds[metric], dataset),
                select(marks, metric=metric) if len(marks) else marks,
                units[metric][1],
            )
        _cap_axis(axes[2][column], [scored, *(_on(of, dataset) for of in costs.values())], axes)
    for row, metric in enumerate(COSTS, 1):
        axes[row][0].set_ylabel(f"{COSTS[metric]} of a step ({units[metric][0]})")
    style.legend(figure, handles)
    on_cpu = str(manifest.get("device", "")).startswith(CPU)
    style.finish(figure, manifest, note=NOTE + (ON_CPU if on_cpu else ""))
    return figure


def _of(table: pd.DataFrame, model: str) -> pd.DataFrame:
    return select(table, model=model) if len(table) else table


def _on(table: pd.DataFrame, dataset: str) -> pd.DataFrame:
    return select(table, workload=dataset) if len(table) else table


def _quality_panel(panel: Axes, scored: pd.DataFrame, marks: pd.DataFrame) -> None:
    """The gain over the shortest cap, whose score the label says."""
    panel.yaxis.set_major_locator(MaxNLocator(5))
    if scored.empty:
        panel.text(
            0.5, 0.5, "not trained", transform=panel.transAxes, ha="center", va="center",
            color="#777777", fontsize=6.5,
        )  # fmt: skip
        return
    scored = scored.sort_values(by="cap")
    cap, base = scored["cap"].to_numpy(float), float(scored["mean"].iloc[0])
    gain = scored["mean"].to_numpy(float) - base
    low, high = (np.nan_to_num(scored[name].to_numpy(float)) for name in ("low", "high"))
    panel.axhline(0.0, color="#888888", linewidth=0.8, zorder=1)
    panel.fill_between(cap, low, high, color=_CURVE, alpha=0.18, linewidth=0, zorder=2)
    panel.plot(cap, gain, color=_CURVE, linewidth=1.4, zorder=3)
    for at, seeds in zip(cap, scored["seeds"], strict=True):
        panel.plot(
            np.full(len(seeds), at), np.asarray(seeds) - base, marker=".", linestyle="none",
            color=_CURVE, markersize=2.5, alpha=0.6, zorder=3,
        )  # fmt: skip
    metric = NAMES[str(scored["metric"].iloc[0])]
    panel.set_ylabel(f"{metric}, gain over cap {cap[0]:.0f}\n(there {base:.3f})")
    for place, mark in enumerate(marks.to_dict("records")):
        if math.isnan(mark["quality_cap"]):
            continue
        _mark(panel, mark, float(np.interp(math.log(mark["cap"]), np.log(cap), gain)), place)


def _mark(panel: Axes, mark: Mapping[str, Any], height: float, place: int) -> None:
    """Filled for time; for memory a ring around where that would be, as both may be at one cap."""
    looks, is_time = style.look_of(mark["attention"]), mark["metric"] == "latency"
    size = 7.0 if mark["attention"] == OURS else 5.5
    panel.plot(
        [mark["cap"]],
        [height],
        marker=looks.marker,
        linestyle="none",
        color=looks.color,
        markerfacecolor=looks.color if is_time else "none",
        markeredgecolor="white" if is_time else looks.color,
        markeredgewidth=0.5 if is_time else 1.0,
        markersize=size if is_time else size + _RING,
        zorder=5 + 0.01 * place,
        clip_on=False,
    )


def _cost_panel(
    panel: Axes, costs: pd.DataFrame, host: pd.DataFrame, size: float
) -> dict[str, Any]:
    """A line a kind of attention, from quartile to quartile, and what the host takes; legend
    entries."""
    handles: dict[str, Any] = {}
    good = costs[costs["status"] == "ok"]
    for kind in style.ordered(list(costs["provider"].unique())):
        looks, mine = style.look_of(kind), costs[costs["provider"] == kind].sort_values(by="cap")
        fine = mine[mine["status"] == "ok"]
        if len(fine):
            value = fine["value"].to_numpy(float)
            spread = [
                np.nan_to_num(sign * (fine[name].to_numpy(float) - value)) / size
                for sign, name in ((-1, "q25"), (1, "q75"))
            ]
            panel.errorbar(
                fine["cap"], value / size, yerr=spread, color=looks.color, marker=looks.marker,
                linestyle=looks.line, linewidth=2.2 if kind == OURS else 1.1,
                markersize=5 if kind == OURS else 3.5, markeredgecolor="white",
                markeredgewidth=0.4, elinewidth=0.8, zorder=2.5 if kind == OURS else 3,
            )  # fmt: skip
        lost = lost_marks(panel, looks.color, mine["cap"].to_numpy(float), mine["status"])
        if len(fine) or lost:
            handles[looks.label] = marker_handle(kind)
        handles |= lost
    if len(host):
        host = host.sort_values(by="cap")
        panel.plot(host["cap"], host["value"] / size, **_HOST, zorder=1.6)
        handles[HOST_LABEL] = Line2D([], [], **_HOST)
    if len(good):
        every = pd.concat([good["value"], host["value"]])
        low, high = float(every.min()) / size, float(every.max()) / size
        style.log_y_axis(panel, low / 1.4, high * 1.6)
    return handles


def _budget_line(
    panel: Axes, bounds: pd.DataFrame, marks: pd.DataFrame, size: float
) -> dict[str, Any]:
    if bounds.empty:
        return {}
    budget = float(bounds["value"].iloc[0]) / size
    panel.axhline(budget, **_BUDGET, zorder=1.5)
    for mark in marks.to_dict("records"):
        if mark["cap"] > 0 and not mark["whole"]:
            panel.plot(
                [mark["cap"]] * 2, [panel.get_ylim()[0], budget], linewidth=0.9, zorder=1.4,
                color=style.look_of(mark["attention"]).color, linestyle=(0, (1, 1.5)),
            )  # fmt: skip
    whose, cap = str(bounds["provider"].iloc[0]), bounds["cap"].iloc[0]
    said = "budget"
    if cap is not None and not pd.isna(cap):
        said = f"budget: {style.look_of(whose).label} at cap {int(cap)}"
    return {said: Line2D([], [], **_BUDGET)}


def _cap_axis(bottom: Axes, tables: list[pd.DataFrame], axes: Any) -> None:
    """Caps on a logarithmic axis; the last is all of the history."""
    caps = sorted({int(cap) for table in tables if len(table) for cap in table["cap"]})
    longest = next(int(table["longest"].iloc[0]) for table in tables if len(table))
    bottom.set_xscale("log")
    bottom.xaxis.set_minor_locator(NullLocator())
    room = _ROOM.get(axes.shape[1], _LEAST_ROOM)
    every = math.ceil(len(caps) / room)
    shown = {cap for place, cap in enumerate(reversed(caps)) if place % every == 0}
    names = {cap: "all" if cap == longest else f"{cap:g}" for cap in caps}
    bottom.set_xticks(caps, [names[cap] if cap in shown else "" for cap in caps])
    bottom.set_xlabel(f"cap, events\n(all: {longest:,})")
