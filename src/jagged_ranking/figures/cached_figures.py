"""Figures of cached and shared keys: queries of a cache, its growth, a shared prefix, which events
to keep."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from jagged_ranking.figures import panels, style, sweeps
from jagged_ranking.figures.cached_goals import LIMIT_COUNTS_FROM_MS, LIMIT_GOAL
from jagged_ranking.figures.cached_points import by_compression, cached
from jagged_ranking.figures.memory import BEYOND
from jagged_ranking.figures.points import dtypes_of, modes_of
from jagged_ranking.figures.quality import NAMES
from jagged_ranking.measure.cached.cached_ops import APPEND, DECODE, PREFIX, SCORING

GOAL_LINE: dict[str, Any] = {
    "color": style.PAPER_COLOR,
    "linewidth": 1.4,
    "linestyle": "-",
}
GOAL = f"goal: {LIMIT_GOAL:g} x limit"
# Group -> the column that its axis has, and what that is called.
AXES = {
    "history": ("max_len", "longest history (events)"),
    "users": ("B", "users"),
    "prefix": ("prefix", "prefix (tokens)"),
    "scoring": ("max_len", "history (events)"),
}
TITLES = {
    "decode": "Latency of new queries over cached histories, ours and peers', over the length of "
    "histories and over users, with the limit of the device",
    "append": "Time to append new events to cached histories, ours and others, over the length of "
    "histories and over users",
    "prefix": "Time and memory of attention with a prefix that all users share, not copied and "
    f"copied in front of every user, over the length of the prefix, {sweeps.BOTH_MODES}",
    "scoring": "Time to find out which events of a history were attended to, ours and on all "
    "scores at once, over the length of histories",
    "compression": "What ranking loses when histories are compressed to the events that a policy "
    "keeps, over the compression",
}
_NOTE = "band: 95% interval over users and seeds, of the same requests with their whole history"


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw what the results allow; returns the files, SVG, PDF and PNG of each figure.

    `<id>_decode`: latency of `cached_attention` along both sweeps, with limit and goal;
    `<id>_append`: likewise of `HistoryCache.append`;
    `<id>_prefix`: time and memory over the length of the prefix;
    `<id>_scoring`: `key_statistics` over the length of histories;
    `<id>_compression`: what ranking loses over the compression, a line a policy.
    """
    figures: dict[str, Figure] = {}
    with style.look():
        for name, op in (("decode", DECODE), ("append", APPEND)):
            if len(table := cached(results, op, "latency")):
                figures[name] = _sweeps_figure(table, manifest, goal=op == DECODE)
        if len(table := cached(results, PREFIX, "latency")):
            figures["prefix"] = _prefix_figure(table, cached(results, PREFIX, BEYOND), manifest)
        if len(table := cached(results, SCORING, "latency")):
            figures["scoring"] = _scoring_figure(table, manifest)
        if len(scored := by_compression(results)):
            figures["compression"] = _compression_figure(scored, manifest)
        return style.save_all(figures, TITLES, manifest, out)


def _sweeps_figure(table: pd.DataFrame, manifest: Mapping[str, Any], *, goal: bool) -> Figure:
    """A panel over the length of histories, and one over users."""
    groups = [group for group in ("history", "users") if group in set(table["group"])]
    figure, axes = style.new_figure(1, len(groups), height=2.9, sharey=True)
    handles: dict[str, Any] = {}
    for panel, group in zip(axes[0], groups, strict=True):
        mine = table[table["group"] == group]
        handles |= _over(panel, mine, group, limit=True, goal=goal)
        panel.set_title(_fixed(mine, group))
    _shared_height(axes[0], table, limit=True)
    axes[0][0].set_ylabel("latency (ms)")
    style.legend(figure, handles)
    most = int(table["most_queries"].max())
    events = "1" if most == 1 else f"1 to {most}"
    note = f"each user has {events} new events"
    style.finish(figure, manifest, dtypes_of(table), note=f"{note}, {_shape(table)}")
    return figure


def _prefix_figure(
    times: pd.DataFrame, beyond: pd.DataFrame, manifest: Mapping[str, Any]
) -> Figure:
    """Time above, memory below; a column a mode."""
    modes = modes_of(times)
    size, unit = sweeps.bytes_unit(beyond) if len(beyond) else (1.0, "bytes")
    rows = [(times, 1.0, "latency (ms)"), (beyond, 1 / size, f"peak beyond inputs ({unit})")]
    rows = [row for row in rows if len(row[0])]
    figure, axes = style.new_figure(
        len(rows), len(modes), height=0.75 + 1.9 * len(rows), sharex=True, sharey="row"
    )
    handles: dict[str, Any] = {}
    for row, (table, scale, label) in zip(axes, rows, strict=True):
        for panel, mode in zip(row, modes, strict=True):
            mine = table[table["mode"] == mode]
            is_time = table is times
            handles |= _over(panel, mine, "prefix", limit=is_time, scale=scale)
            if is_time:
                panel.set_title(style.MODE_LOOKS[mode].label)
        _shared_height(row, table, limit=table is times, scale=scale)
        row[0].set_ylabel(label)
    for panel in axes[0] if len(rows) > 1 else ():
        panel.set_xlabel("")
    style.legend(figure, handles)
    first = times.iloc[0]
    note = f"{style.counted(int(first['B']), 'user')}, {int(first['tokens']):,} events, causal"
    style.finish(figure, manifest, dtypes_of(times), note=f"{note}, {_shape(times)}")
    return figure


def _scoring_figure(table: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    figure, axes = style.new_figure(1, 1, height=2.6)
    handles = _over(axes[0][0], table, "scoring", limit=True)
    _shared_height(axes[0], table, limit=True)
    axes[0][0].set_ylabel("latency (ms)")
    style.legend(figure, handles)
    users, recent = (int(table[name].iloc[0]) for name in ("B", "recent"))
    note = f"{style.counted(users, 'user')}, the last {recent:,} queries of each"
    style.finish(figure, manifest, dtypes_of(table), note=note)
    return figure


def _over(
    panel: Axes,
    table: pd.DataFrame,
    group: str,
    *,
    limit: bool,
    goal: bool = False,
    scale: float = 1.0,
) -> dict[str, Any]:
    """A line a provider over the axis of a group, each point as far from the next."""
    column, label = AXES[group]
    order = sorted({int(value) for value in table[column]})
    handles = panels.lines_panel(panel, table, column=column, order=order, scale=scale)
    panel.set_xlim(-0.25, len(order) - 0.75)
    panel.set_xlabel(label)
    if limit:
        least = table.drop_duplicates(column).set_index(column)["limit_ms"]
        heights = np.array([float(least.get(at, np.nan)) for at in order])
        panel.plot(range(len(order)), heights, **sweeps.LIMIT_LINE, zorder=2)
        handles[sweeps.LIMIT] = Line2D([], [], **sweeps.LIMIT_LINE)
        for place in np.flatnonzero(heights > LIMIT_COUNTS_FROM_MS) if goal else ():
            bound = LIMIT_GOAL * heights[place]
            panel.plot([place - 0.15, place + 0.15], [bound, bound], **GOAL_LINE, zorder=4)
            handles[GOAL] = Line2D([], [], **GOAL_LINE)
    return handles


def _shared_height(row: Any, table: pd.DataFrame, *, limit: bool, scale: float = 1.0) -> None:
    """One readable logarithmic axis for panels beside each other."""
    shown = [float(v) * scale for c in ("value", "q25", "q75") for v in table[c]]
    shown += [float(v) for v in table["limit_ms"]] if limit else []
    panels.padded_limits(row[0], shown)


def _fixed(table: pd.DataFrame, group: str) -> str:
    """What a sweep holds."""
    if group == "history":
        return style.counted(int(table["B"].iloc[0]), "user")
    return f"histories of up to {int(table['max_len'].iloc[0]):,}"


def _shape(table: pd.DataFrame) -> str:
    first = table.iloc[0]
    return f"{style.counted(int(first['H']), 'head')}, head_dim {int(first['D'])}"


def _compression_figure(scored: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    """A panel a data set: what is lost, a line and a band a policy."""
    datasets = list(dict.fromkeys(scored["workload"]))
    figure, axes = style.new_figure(1, len(datasets), height=2.9)
    handles: dict[str, Any] = {}
    for panel, dataset in zip(axes[0], datasets, strict=True):
        mine = scored[scored["workload"] == dataset]
        for policy in style.ordered(list(mine["policy"].unique())):
            handles |= _policy_line(panel, mine[mine["policy"] == policy], policy)
        levels = sorted(set(mine["compression"]))
        panel.set_xscale("log")
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xticks(levels, _labels(levels))
        panel.yaxis.set_major_locator(MaxNLocator(6))
        panel.axhline(0.0, color="#888888", linewidth=0.8, zorder=1)
        whole = float(mine.loc[mine["compression"] == min(levels), "mean"].iloc[0])
        metric = NAMES[str(mine["metric"].iloc[0])]
        panel.set_title(style.broken(dataset, 24))
        panel.set_xlabel("compression of histories")
        panel.set_ylabel(f"{metric}, against the whole history\n(there {whole:.3f})")
    style.legend(figure, handles)
    style.finish(figure, manifest, note=_NOTE)
    return figure


def _labels(levels: Sequence[float]) -> list[str]:
    """Of levels side by side on a logarithmic axis, those whose labels have room."""
    labels: list[str] = []
    last = 0.0
    for level in levels:
        fits = level >= 1.4 * last
        labels.append(f"{level:g}x" if fits else "")
        last = level if fits else last
    return labels


def _policy_line(panel: Axes, mine: pd.DataFrame, policy: str) -> dict[str, Any]:
    looks, mine = style.look_of(policy), mine.sort_values("compression")
    at = mine["compression"].to_numpy(float)
    loss, low, high = (np.nan_to_num(mine[c].to_numpy(float)) for c in ("loss", "low", "high"))
    panel.fill_between(at, low, high, color=looks.color, alpha=0.13, linewidth=0, zorder=2)
    panel.plot(
        at, loss, color=looks.color, marker=looks.marker, linestyle=looks.line,
        markeredgecolor="white", markeredgewidth=0.4, markersize=5, zorder=3,
    )  # fmt: skip
    return {looks.label: panels.marker_handle(policy)}
