"""Figures of the interaction operations: against the limit, against every peer, memory."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jagged_ranking.figures import panels, style, sweeps
from jagged_ranking.figures.memory import BEYOND
from jagged_ranking.figures.operation_points import (
    KEYS,
    against_limit,
    largest,
    main_dtype,
    operations,
)
from jagged_ranking.figures.points import dtypes_of, modes_of, sweep
from jagged_ranking.measure.lineup import OURS

# What this project set itself: time over the limit of the device at a million tokens.
LIMIT_GOAL = 1.5
GOAL_LINE: dict[str, Any] = {
    "color": style.PAPER_COLOR,
    "linewidth": 0.9,
    "linestyle": (0, (4, 2)),
}
GOAL = f"goal: {LIMIT_GOAL:g} x limit"
COLUMNS = 5
GROUPS = ("tokens", "waste")
_RIGHT = 0.985  # where marks of who has no value stand, in parts of a panel
SHORT = {"forward": "forward", "forward+backward": "training"}
TITLES = {
    "limit": "Time of every interaction operation over the limit of the device on the largest "
    f"batch, {sweeps.BOTH_MODES}",
    "peers": "Time of every peer relative to ours, for each interaction operation on the largest "
    f"batch, {sweeps.BOTH_MODES}",
    "memory": "Peak memory beyond the inputs of every interaction operation and its peers, "
    f"{sweeps.BOTH_MODES}",
    **{
        f"{group}_{short}": "Time over the limit of the device of every interaction operation and "
        f"its peers by {sweeps.ALONG[group]}, {mode}"
        for group in GROUPS
        for mode, short in SHORT.items()
    },
}


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw what the results allow; returns the files, SVG, PDF and PNG of each figure.

    `<id>_limit`: ours over the limit on the batch with most tokens, in each dtype;
    `<id>_peers`: every peer over ours on it;
    `<id>_<tokens or waste>_<forward or training>`: everybody over the limit along a sweep;
    `<id>_memory`: the peak beyond the inputs.
    """
    table, beyond = operations(results, "latency"), operations(results, BEYOND)
    figures: dict[str, Figure] = {}
    with style.look():
        if len(most := largest(table)) and most["provider"].eq(OURS).any():
            figures["limit"] = _limit_figure(most, manifest)
            figures["peers"] = _peers_figure(main_dtype(most), manifest)
        for group in GROUPS:
            points = main_dtype(sweep(table, group))
            for mode in modes_of(points):
                name = f"{group}_{SHORT[mode]}"
                figures[name] = _sweep_figure(points, group, mode, manifest)
        if len(beyond):
            figures["memory"] = _memory_figure(main_dtype(beyond), manifest)
        return style.save_all(figures, TITLES, manifest, out)


def _limit_figure(most: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    own = against_limit(most[most["provider"] == OURS])

    def dots(panel: Axes, rows: pd.DataFrame, places: Mapping[str, int]) -> dict[str, Any]:
        handles: dict[str, Any] = {}
        dtypes = list(dict.fromkeys(own["dtype"]))
        looks = [style.MODE_LOOKS["forward"], style.MODE_LOOKS["forward+backward"]]
        for dtype, look in zip(dtypes, looks, strict=False):
            mine = rows[(rows["dtype"] == dtype) & (rows["status"] == "ok")]
            spot: dict[str, Any] = {"color": look.color, "marker": look.marker}
            _dots(panel, mine["value"], mine["op"].map(places), lowest=dtype == dtypes[0], **spot)
            handles |= _lost(panel, rows[rows["dtype"] == dtype], places, look.color)
            handles[f"ours, {dtype}"] = Line2D([], [], linestyle="none", markersize=5, **spot)
        panel.axvline(LIMIT_GOAL, **GOAL_LINE, zorder=1)
        panel.axvline(1.0, **sweeps.LIMIT_LINE, zorder=1)
        limits = {sweeps.LIMIT: Line2D([], [], **sweeps.LIMIT_LINE)}
        return {**handles, GOAL: Line2D([], [], **GOAL_LINE), **limits}

    return _by_operation(own, manifest, dots, f"time of ours / limit, {_tokens(own)}", 1.0)


def _peers_figure(most: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    own = most[(most["provider"] == OURS) & (most["status"] == "ok")].set_index(KEYS)["value"]
    unit = [own.get(tuple(key), np.nan) for key in most[KEYS].itertuples(index=False)]
    relative = most.assign(value=most["value"] / unit)
    relative = relative[relative["provider"] != OURS]

    def dots(panel: Axes, rows: pd.DataFrame, places: Mapping[str, int]) -> dict[str, Any]:
        handles = _provider_dots(panel, rows, places)
        panel.axvspan(1e-6, 1.0, color=style.PAPER_COLOR, alpha=0.08, linewidth=0, zorder=0)
        panel.axvline(1.0, **sweeps.LIMIT_LINE, zorder=1)
        return handles

    return _by_operation(relative, manifest, dots, f"time / time of ours, {_tokens(most)}", 1.0)


def _memory_figure(beyond: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    size, unit = sweeps.bytes_unit(beyond)
    scaled = beyond.assign(value=beyond["value"] / size)
    title = f"peak beyond inputs ({unit}), {_tokens(beyond)}"
    return _by_operation(scaled, manifest, _provider_dots, title)


def _by_operation(
    table: pd.DataFrame,
    manifest: Mapping[str, Any],
    dots: Any,
    xlabel: str,
    always: float | None = None,
) -> Figure:
    """A row an operation, a column a mode. `dots` draws one panel and returns legend entries;
    `always` is a value that the axis shows."""
    names, modes = list(dict.fromkeys(table["op"])), modes_of(table)
    places = {name: place for place, name in enumerate(reversed(names))}
    height = 1.0 + 0.17 * len(names)
    figure, axes = style.new_figure(1, len(modes), height=height, sharey=True)
    handles: dict[str, Any] = {}
    for panel, mode in zip(axes[0], modes, strict=True):
        rows = table[table["mode"] == mode]
        handles |= dots(panel, rows, places)
        shown = [v for v in rows["value"] if np.isfinite(v) and v > 0]
        shown += [always] if always is not None else []
        panel.set_yticks(list(places.values()), list(places))
        panel.set_ylim(-0.6, len(names) - 0.4)
        panel.tick_params(axis="y", length=0)
        if shown:
            style.log_x_axis(panel, min(shown) / 1.4, max(shown) * 1.4)
        panel.grid(visible=True, axis="both")
        panel.set_title(style.MODE_LOOKS[mode].label)
        panel.set_xlabel(xlabel)
    style.legend(figure, handles)
    style.finish(figure, manifest, dtypes_of(table))
    return figure


def _provider_dots(panel: Axes, rows: pd.DataFrame, places: Mapping[str, int]) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    for name in style.ordered(list(rows["provider"].unique())):
        mine = rows[(rows["provider"] == name) & (rows["status"] == "ok")]
        looks = style.look_of(name)
        spot: dict[str, Any] = {"color": looks.color, "marker": looks.marker}
        if len(mine):
            _dots(panel, mine["value"], mine["op"].map(places), lowest=name == OURS, **spot)
        lost = _lost(panel, rows[rows["provider"] == name], places, looks.color)
        if len(mine) or lost:
            handles[looks.label] = Line2D([], [], linestyle="none", markersize=5, **spot)
        handles |= lost
    return handles


def _lost(panel: Axes, rows: pd.DataFrame, places: Mapping[str, int], color: str) -> dict[str, Any]:
    """Who ran out of memory or failed is at the right edge, where the worst are."""
    at = rows["op"].map(places).to_numpy(float)
    return panels.lost_marks(panel, color, at, rows["status"], edge=_RIGHT, sideways=True)


def _dots(
    panel: Axes, x: Sequence[float], y: Sequence[float], *, lowest: bool, **looks: Any
) -> None:
    """The lowest are larger, so that what lies on them does not hide them."""
    edge: dict[str, Any] = {"markeredgecolor": "white", "markeredgewidth": 0.4}
    panel.plot(x, y, linestyle="none", markersize=7 if lowest else 4.5, **edge, **looks)


def _sweep_figure(
    points: pd.DataFrame, group: str, mode: str, manifest: Mapping[str, Any]
) -> Figure:
    """A panel an operation: everybody over the limit. Distances between lines are ratios."""
    mine = against_limit(points[points["mode"] == mode])
    names = list(dict.fromkeys(mine["op"]))
    columns = min(COLUMNS, len(names))
    rows = math.ceil(len(names) / columns)
    figure, axes = style.new_figure(rows, columns, height=0.9 + 1.15 * rows)
    handles: dict[str, Any] = {}
    for panel in axes.flat[len(names) :]:
        panel.set_visible(False)
    for place, name in enumerate(names):
        panel = axes.flat[place]
        here = mine[mine["op"] == name]
        handles |= panels.sweep_panel(panel, here, group=group)
        panel.axhline(LIMIT_GOAL, **GOAL_LINE, zorder=1)
        panel.axhline(1.0, **sweeps.LIMIT_LINE, zorder=1)
        panels.padded_limits(panel, [*here["value"], 1.0])
        panel.set_title(name, fontsize=6.5, fontweight="normal")
        panel.tick_params(labelsize=5.5)
        if group == "waste":
            panel.set_xticks([0, 50, 100], ["0%", "50%", "100%"])
            panel.set_xlabel("padding waste")
        if place + columns < len(names):
            panel.set_xlabel("")
        if place % columns == 0:
            panel.set_ylabel("time / limit")
    handles[GOAL] = Line2D([], [], **GOAL_LINE)
    handles[sweeps.LIMIT] = Line2D([], [], **sweeps.LIMIT_LINE)
    style.legend(figure, handles, columns=5)
    style.finish(figure, manifest, [*dtypes_of(mine), style.MODE_LOOKS[mode].label])
    return figure


def _tokens(table: pd.DataFrame) -> str:
    return f"{int(table['tokens'].max()):,} tokens"
