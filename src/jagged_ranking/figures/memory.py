"""Memory figures: peak memory along the sweeps, ratios to dense attention, named workloads."""

# pandas says of table[mask], of cells and of iterated rows that they may be anything it knows.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from jagged_ranking.figures import panels, style
from jagged_ranking.figures.data import attention, dtypes_of, modes_of, ratios, sweep
from jagged_ranking.figures.panels import Claim
from jagged_ranking.figures.speed import BASELINES, ratio_figure, workloads_figure

TOTAL = "peak_memory"
BEYOND = "peak_memory_minus_inputs"

# arXiv 2409.15373, abstract. "53% more memory-efficient" may mean that dense flash attention
# needs 1.53x of ours, or that ours saves 53% of it (2.13x): a band from one to the other.
CLAIMS = {
    "dense_eager": Claim(22.0, "paper: up to 22x"),
    "dense_flash": Claim(1.53, "paper: 53% (1.53x or 2.13x)", upper=1 / (1 - 0.53)),
}


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw what the results allow; returns the files, SVG, PDF and PNG of each figure.

    `<id>_memory_by_waste`, `<id>_memory_by_length`: the peak, inputs included;
    `<id>_memory_ratio`: of the peak, inputs included;
    `<id>_memory_workloads`: the peak beyond the inputs.
    """
    total, beyond = attention(results, TOTAL), attention(results, BEYOND)
    figures: dict[str, Figure] = {}
    with style.look():
        for group in ("waste", "length"):
            if len(sweep(total, group)):
                figures[f"memory_by_{group}"] = _sweep_figure(total, group, manifest)
        compared = {name: ratios(results, TOTAL, name) for name in BASELINES}
        if any(len(sweep(r, g)) for r in compared.values() for g in ("waste", "length")):
            figures["memory_ratio"] = ratio_figure(
                compared,
                manifest,
                claims=CLAIMS,
                ylabel="times the memory of ours",
                dtypes=dtypes_of(total),
            )
        if (beyond["group"] == "workloads").any():
            figures["memory_workloads"] = _workloads_figure(beyond, manifest)
        written: list[Path] = []
        for name, figure in figures.items():
            written += style.save(figure, Path(out), f"{manifest['id']}_{name}")
    return written


def _sweep_figure(table: pd.DataFrame, group: str, manifest: Mapping[str, Any]) -> Figure:
    points = sweep(table, group)
    modes = modes_of(points)
    size, unit = _unit(points)
    figure, axes = style.new_figure(1, len(modes), height=2.9)
    handles: dict[str, Any] = {}
    for panel, mode in zip(axes[0], modes, strict=True):
        mine = points[points["mode"] == mode]
        handles |= panels.sweep_panel(panel, mine, group=group, scale=1 / size)
        panels.padded_limits(panel, list(mine["value"] / size))
        panel.set_title(style.MODE_LOOKS[mode].label)
        panel.set_ylabel(f"peak memory, inputs included ({unit})")
    style.legend(figure, handles)
    style.finish(figure, manifest, dtypes_of(points))
    return figure


def _workloads_figure(table: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    named = table[table["group"] == "workloads"]
    size, unit = _unit(named)
    return workloads_figure(
        named, manifest, unit=float(size), ylabel=f"peak beyond inputs ({unit})"
    )


def _unit(table: pd.DataFrame) -> tuple[float, str]:
    """Decimal units, by the largest value."""
    return (1e9, "GB") if table["value"].max() >= 1e9 else (1e6, "MB")
