"""Speed figures: latency along the sweeps, ratios to dense attention, and the named workloads."""

# pandas says of table[mask], of cells and of iterated rows that they may be anything it knows.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jagged_ranking.figures import panels, style
from jagged_ranking.figures.data import attention, dtypes_of, modes_of, ratios, sweep
from jagged_ranking.figures.panels import Claim

# arXiv 2409.15373, abstract.
CLAIMS = {
    "dense_eager": Claim(9.0, "paper: up to 9x"),
    "dense_flash": Claim(3.0, "paper: up to 3x"),
}
BASELINES = {"dense_eager": "dense attention", "dense_flash": "dense flash attention"}


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw what the results allow; returns the files, SVG, PDF and PNG of each figure.

    `<id>_latency_by_waste`, `<id>_latency_by_length`, `<id>_speedup`, `<id>_workloads`.
    """
    table = attention(results, "latency")
    figures: dict[str, Figure] = {}
    with style.look():
        for group in ("waste", "length"):
            if len(sweep(table, group)):
                figures[f"latency_by_{group}"] = _sweep_figure(table, group, manifest)
        compared = {name: ratios(results, "latency", name) for name in BASELINES}
        if any(len(sweep(r, g)) for r in compared.values() for g in ("waste", "length")):
            figures["speedup"] = ratio_figure(
                compared,
                manifest,
                claims=CLAIMS,
                ylabel="times faster",
                dtypes=dtypes_of(table),
            )
        if (table["group"] == "workloads").any():
            figures["workloads"] = _workloads_figure(table, manifest)
        written: list[Path] = []
        for name, figure in figures.items():
            written += style.save(figure, Path(out), f"{manifest['id']}_{name}")
    return written


def _sweep_figure(table: pd.DataFrame, group: str, manifest: Mapping[str, Any]) -> Figure:
    points = sweep(table, group)
    modes = modes_of(points)
    figure, axes = style.new_figure(1, len(modes), height=2.9)
    handles: dict[str, Any] = {}
    for panel, mode in zip(axes[0], modes, strict=True):
        mine = points[points["mode"] == mode]
        handles |= panels.sweep_panel(panel, mine, group=group)
        limit = mine.drop_duplicates("workload")
        along = limit[panels.SWEEP_AXIS[group]].to_numpy(float)
        panel.plot(
            along * 100 if group == "waste" else along,
            limit["limit_ms"].to_numpy(float),
            color="#999999",
            linewidth=0.9,
            linestyle=":",
            zorder=2,
        )
        handles["limit of the device"] = Line2D([], [], color="#999999", linestyle=":")
        panels.padded_limits(panel, [*mine["q25"], *mine["q75"], *limit["limit_ms"]])
        panel.set_title(style.MODE_LOOKS[mode].label)
        panel.set_ylabel("latency (ms)")
    style.legend(figure, handles)
    style.finish(figure, manifest, dtypes_of(points))
    return figure


def ratio_figure(
    compared: Mapping[str, pd.DataFrame],
    manifest: Mapping[str, Any],
    *,
    claims: Mapping[str, Claim],
    ylabel: str,
    dtypes: list[str],
) -> Figure:
    """A row a baseline, a column a sweep."""
    shown = {name: table for name, table in compared.items() if len(table)}
    groups = [g for g in ("waste", "length") if any(len(sweep(t, g)) for t in shown.values())]
    figure, axes = style.new_figure(len(shown), len(groups), height=0.6 + 1.9 * len(shown))
    handles: dict[str, Any] = {}
    titles = {"waste": "by padding waste", "length": "by longest history"}
    for row, (name, table) in zip(axes, shown.items(), strict=True):
        for panel, group in zip(row, groups, strict=True):
            handles |= panels.ratio_panel(
                panel,
                table,
                group=group,
                claim=claims[name],
                title=f"against {BASELINES[name]}, {titles[group]}",
            )
            panel.set_ylabel(ylabel)
    style.legend(figure, handles)
    style.finish(figure, manifest, dtypes)
    return figure


def _workloads_figure(table: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    named = table[table["group"] == "workloads"]
    return workloads_figure(
        named,
        manifest,
        unit=named["limit_ms"].astype(float),
        ylabel="latency / limit of the device",
        baseline=1.0,
    )


def workloads_figure(
    named: pd.DataFrame,
    manifest: Mapping[str, Any],
    *,
    unit: pd.Series | float,
    ylabel: str,
    baseline: float | None = None,
    title: Callable[[str], str] = lambda mode: style.MODE_LOOKS[mode].label,
) -> Figure:
    """A row a mode, a column a workload, a dot a provider."""
    modes = modes_of(named)
    labels = panels.workload_labels(named)
    figure, axes = style.new_figure(len(modes), 1, height=0.75 + 1.85 * len(modes), sharex=True)
    handles: dict[str, Any] = {}
    divided = named.assign(_unit=unit)
    for panel, mode in zip(axes[:, 0], modes, strict=True):
        mine = divided[divided["mode"] == mode]
        handles |= panels.dot_panel(
            panel, mine, workloads=list(labels), labels=labels, unit=mine["_unit"]
        )
        shown = np.concatenate([(mine[c] / mine["_unit"]).to_numpy() for c in ("q25", "q75")])
        shown = np.concatenate([shown, (mine["value"] / mine["_unit"]).to_numpy()])
        if baseline is not None:
            panel.axhline(baseline, color="#999999", linewidth=0.9, linestyle=":", zorder=1)
            shown = np.append(shown, baseline)
        panels.padded_limits(panel, list(shown))
        panel.set_title(title(mode))
        panel.set_ylabel(ylabel)
    style.legend(figure, handles, columns=5)
    style.finish(figure, manifest, dtypes_of(named))
    return figure
