"""Figures of target attention: time against peers and limit, ratios, skew of lengths, memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jagged_ranking.figures import panels, style, sweeps
from jagged_ranking.figures.memory import BEYOND
from jagged_ranking.figures.points import (
    attention,
    dtypes_of,
    limits_of,
    modes_of,
    of_group,
    ours_of,
)
from jagged_ranking.measure.lineup import OURS

TITLES = {
    "latency": "Latency of target attention, ours and peers', on each workload, with the limit of "
    f"the device, {sweeps.BOTH_MODES}",
    "ratios": "Target attention: our time over the limit of the device, and the peers' time over "
    f"ours, on each workload, {sweeps.BOTH_MODES}",
    "skew": "Latency of target attention as the same number of events is spread over users ever "
    f"more unequally, {sweeps.BOTH_MODES}",
    "memory": "Peak memory of target attention beyond the inputs, ours and peers', on each "
    f"workload, {sweeps.BOTH_MODES}",
}


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw what the results allow; returns the files, SVG, PDF and PNG of each figure.

    `<id>_latency`: ms on the named workloads, with the limit of the device;
    `<id>_ratios`: ours over the limit, and every peer (FA2 first of all) over ours;
    `<id>_skew`: ms against how unequally the same number of events is spread;
    `<id>_memory`: the peak beyond the inputs on the named workloads.
    """
    table, beyond = attention(results, "latency"), attention(results, BEYOND)
    figures: dict[str, Figure] = {}
    with style.look():
        if len(named := of_group(table, "target")):
            labels = workload_labels(named)
            figures["latency"] = sweeps.workloads_figure(
                named, manifest, unit=1.0, ylabel="latency (ms)", limits=True, labels=labels
            )
            figures["ratios"] = _ratios_figure(named, labels, manifest)
        if len(skewed := of_group(table, "skew")):
            figures["skew"] = _skew_figure(skewed, manifest)
        if len(named := of_group(beyond, "target")):
            labels = workload_labels(named)
            figures["memory"] = sweeps.memory_figure(named, manifest, labels=labels)
        return style.save_all(figures, TITLES, manifest, out)


def workload_labels(table: pd.DataFrame) -> dict[str, str]:
    """workload -> what stands below its column: name, users x candidates, events."""
    labels = {}
    for row in table.drop_duplicates("workload").itertuples():
        name = style.broken(str(row.workload).removesuffix("-small"))
        queries = int(float(str(row.queries)))
        users, events = style.counted(int(str(row.B)), "user"), f"{row.tokens:,} events"
        labels[str(row.workload)] = f"{name}\n{users} x {queries}\n{events}"
    return labels


def _ratios_figure(
    named: pd.DataFrame, labels: Mapping[str, str], manifest: Mapping[str, Any]
) -> Figure:
    """Ours over the limit on the left, every peer over ours on the right; a row a mode."""
    modes, own = modes_of(named), ours_of(named)
    names = style.ordered(list(named["provider"].unique()))
    peers = [name for name in names if not name.startswith(OURS)]
    limits = limits_of(named)
    figure, axes = style.new_figure(len(modes), 2, height=0.75 + 1.75 * len(modes), sharex=True)
    handles: dict[str, Any] = {}
    for row, mode in zip(axes, modes, strict=True):
        ours = np.array([own.get((name, mode), np.nan) for name in labels], dtype=float)
        least = np.array([limits.get((name, mode), np.nan) for name in labels], dtype=float)
        of_mode = named[named["mode"] == mode].set_index("workload")
        for panel, name in ((row[0], OURS), *((row[1], peer) for peer in peers)):
            mine = of_mode[of_mode["provider"] == name].reindex(list(labels))
            times = mine["value"].where(mine["status"] == "ok").to_numpy(float)
            unit = least if name == OURS else ours
            handles |= _dots(panel, name, times / unit, mine["status"])
        row[0].set_ylabel("time of ours / limit")
        row[1].set_ylabel("time / time of ours")
        for panel in row:
            panel.axhline(1.0, color="#888888", linewidth=0.8, zorder=1)
            shown = [line for line in panel.lines if line.get_transform() == panel.transData]
            panels.padded_limits(panel, [1.0, *(float(y) for s in shown for y in s.get_ydata())])
            names = [style.broken(name.removesuffix("-small")) for name in labels]
            panel.set_xticks(range(len(labels)), names)
            panel.set_xlim(-0.5, len(labels) - 0.5)
            panel.tick_params(axis="x", length=0)
            panel.set_title(style.MODE_LOOKS[mode].label)
    style.legend(figure, handles)
    style.finish(figure, manifest, dtypes_of(named))
    return figure


def _dots(panel: Axes, name: str, values: np.ndarray, status: pd.Series) -> dict[str, Any]:
    """A dot a workload, or a mark where there is no value; legend entries."""
    looks = style.look_of(name)
    lost = panels.lost_marks(panel, looks.color, np.arange(len(values)), status)
    if not (np.isfinite(values).any() or lost):
        return {}
    panel.plot(
        range(len(values)),
        values,
        color=looks.color,
        marker=looks.marker,
        linestyle="none",
        markersize=5,
        markeredgecolor="white",
        markeredgewidth=0.4,
    )
    return {looks.label: panels.marker_handle(name), **lost}


def _skew_figure(table: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    """A row a mode, a column a number of users; events are the same in all of a column."""
    modes, counts = modes_of(table), sorted({int(n) for n in table["B"]})
    skews = list(dict.fromkeys(table["distribution"]))
    events = int(table["tokens"].iloc[0])
    figure, axes = style.new_figure(
        len(modes), len(counts), height=0.75 + 1.75 * len(modes), sharex=True, sharey="row"
    )
    handles: dict[str, Any] = {}
    for row, mode in zip(axes, modes, strict=True):
        of_mode = table[table["mode"] == mode]
        for panel, users in zip(row, counts, strict=True):
            mine = of_mode[of_mode["B"] == users]
            handles |= panels.lines_panel(panel, mine, column="distribution", order=skews)
            limit = mine.drop_duplicates("distribution").set_index("distribution")["limit_ms"]
            panel.plot(
                range(len(skews)), [float(limit.get(s, np.nan)) for s in skews], **sweeps.LIMIT_LINE
            )
            handles[sweeps.LIMIT] = Line2D([], [], **sweeps.LIMIT_LINE)
            panel.set_title(f"{style.MODE_LOOKS[mode].label}, {users} users")
            panel.set_xlim(-0.3, len(skews) - 0.7)
        shown = [*of_mode["value"], *of_mode["q25"], *of_mode["q75"], *of_mode["limit_ms"]]
        panels.padded_limits(row[0], shown)
        row[0].set_ylabel("latency (ms)")
    for panel in axes[-1]:
        panel.set_xlabel(f"how {events:,} events are spread")
    style.legend(figure, handles)
    style.finish(figure, manifest, dtypes_of(table))
    return figure
