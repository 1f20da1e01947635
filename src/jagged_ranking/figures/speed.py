"""Speed figures: latency and useful arithmetic along the sweeps, ratios to dense attention, and
the named workloads against the limit of the device and against every peer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jagged_ranking.figures import panels, style, sweeps
from jagged_ranking.figures.panels import Claim
from jagged_ranking.figures.points import (
    SWEEP_AXIS,
    attention,
    dtypes_of,
    modes_of,
    of_group,
    ours_beside,
    ours_of,
    schedule_ms,
    sweep,
)
from jagged_ranking.measure.lineup import OURS

# arXiv 2409.15373, abstract.
CLAIMS = {
    "dense_eager": Claim(9.0, "paper: up to 9x"),
    "dense_flash": Claim(3.0, "paper: up to 3x"),
}
LATENCY = sweeps.Quantity(
    swept="latency",
    name="latency",
    label="latency",
    unit=lambda points: (1.0, "ms"),
    limits=True,
    ratio="speedup",
    ratio_label="times faster",
    claims=CLAIMS,
)
PEERS = "peers"
TITLES = {
    **sweeps.titles("latency", "Latency"),
    "speedup": "How many times faster jagged attention is than dense attention and dense flash "
    "attention, by padding waste and by the longest history, with the paper's claims",
    "throughput": "Useful TFLOP/s of jagged attention and its peers by padding waste, by the "
    f"longest history and by head_dim, {sweeps.BOTH_MODES}",
    "workloads": "Latency of jagged attention and its peers on each workload as a multiple of the "
    f"device's limit, {sweeps.BOTH_MODES}",
    PEERS: f"Time of every peer relative to ours on each workload, {sweeps.BOTH_MODES}",
}


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw what the results allow; returns the files, SVG, PDF and PNG of each figure.

    `<id>_latency_by_<sweep>`, `<id>_speedup`, `<id>_throughput` (of useful operations, all
    sweeps), `<id>_workloads` (times the limit), `<id>_peers` (times ours).
    """
    with style.look():
        figures = sweeps.figures_of(LATENCY, results, manifest)
        rates = attention(results, "useful_flops")
        if any(len(sweep(rates, group)) for group in SWEEP_AXIS):
            figures["throughput"] = _throughput_figure(rates, manifest)
        if len(named := of_group(attention(results, "latency"), "workloads")):
            figures["workloads"] = sweeps.workloads_figure(
                named,
                manifest,
                unit=named["limit_ms"].astype(float),
                ylabel="latency / limit of the device",
                baseline=1.0,
            )
            if named["provider"].eq(OURS).any():
                figures[PEERS] = _peers_figure(named, schedule_ms(results), manifest)
        return style.save_all(figures, TITLES, manifest, out)


def _throughput_figure(rates: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    """A row a mode, a column a sweep."""
    swept = rates[rates["group"].isin(list(SWEEP_AXIS))]
    groups = [group for group in SWEEP_AXIS if len(sweep(swept, group))]
    modes = modes_of(swept)
    size, unit = (1e12, "TFLOP/s") if swept["value"].max() >= 1e12 else (1e9, "GFLOP/s")
    figure, axes = style.new_figure(
        len(modes), len(groups), height=0.7 + 1.8 * len(modes), sharey="row"
    )
    handles: dict[str, Any] = {}
    for row, mode in zip(axes, modes, strict=True):
        mine = swept[swept["mode"] == mode]
        for panel, group in zip(row, groups, strict=True):
            handles |= panels.sweep_panel(panel, mine, group=group, scale=1 / size)
            panel.set_title(style.MODE_LOOKS[mode].label)
        panels.padded_limits(row[0], list(mine["value"] / size))
        row[0].set_ylabel(f"useful {unit}")
    style.legend(figure, handles)
    style.finish(figure, manifest, dtypes_of(swept))
    return figure


def _peers_figure(
    named: pd.DataFrame, built: Mapping[str, float], manifest: Mapping[str, Any]
) -> Figure:
    """Every peer's time as a multiple of ours: who is below the line is ahead of us.

    An open circle is ours with the construction of its schedule, which is made once a batch and
    shared by all layers and both directions, counted in one single call.
    """
    ours, own = ours_of(named), ours_beside(named)
    # Where ours ran out of memory or failed, its mark alone says so.
    tried = own.notna() | ((named["provider"] == OURS) & panels.is_lost(named["status"]))
    shown, unit = named[tried], own[tried]
    labels = panels.workload_labels(shown)

    def decorate(panel: Axes, mode: str) -> dict[str, Any]:
        panel.axhspan(1e-6, 1.0, color=style.PAPER_COLOR, alpha=0.08, linewidth=0, zorder=0)
        own = [ours.get((name, mode), np.nan) for name in labels]
        # In the column of ours, which comes first of all providers in it.
        places = np.arange(len(labels)) - 0.4 + 0.4 / max(shown["provider"].nunique(), 1)
        whole = [1 + built.get(n, np.nan) / ms for n, ms in zip(labels, own, strict=True)]
        circle: dict[str, Any] = {
            "color": style.look_of(OURS).color,
            "marker": "o",
            "linestyle": "none",
            "markersize": 5,
            "fillstyle": "none",
        }
        handles: dict[str, Any] = {"faster than ours": _patch()}
        if np.isfinite(whole).any():
            panel.plot(places, whole, **circle, zorder=3)
            handles["ours + its schedule"] = Line2D([], [], **circle)
        return handles

    return sweeps.workloads_figure(
        shown,
        manifest,
        unit=unit,
        ylabel="time / time of ours",
        baseline=1.0,
        labels=labels,
        decorate=decorate,
    )


def _patch() -> Line2D:
    looks: dict[str, Any] = {"color": style.PAPER_COLOR, "alpha": 0.2}
    return Line2D([], [], marker="s", linestyle="none", markersize=6, **looks)
