"""Figures of training on several ranks: efficiency, what a step is made of, memory; and the same on
more GPUs than there are, simulated from what was measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from jagged_ranking.figures import style
from jagged_ranking.figures.labels import reference_line
from jagged_ranking.figures.panels import LOWER, is_shown, lost_marks
from jagged_ranking.figures.scaling_points import (
    BALANCES,
    BY_TOKENS,
    EFFICIENCY_GOAL,
    GOAL_RANKS,
    PARTS,
    SIMULATED_PARTS,
    assumptions,
    efficiency,
    measured,
    simulated,
    skew,
)

TITLES = {
    "efficiency": "Samples a second and scaling efficiency of training on several ranks, with "
    "batches balanced by tokens and by users",
    "step": "What a training step on several ranks is made of, with batches balanced by tokens and "
    "by users",
    "simulated": "Scaling efficiency simulated for up to a thousand GPUs, by the skew of lengths, "
    "with batches balanced by tokens and by users",
    "volume": "What a rank sends in a step and keeps of the tables, simulated for up to a thousand "
    "GPUs, and what the step is made of",
}
_PART_COLORS = dict(
    zip(
        ("batch", "forward", "backward", "waiting", "exchange", "update"),
        ("#8a8a8a", "#4878a8", "#7fb2dd", "#c0392b", "#d99a2b", "#4d4d4d"),
        strict=True,
    )
) | {"compute": "#4878a8", "dense": "#d99a2b", "rows": "#117733"}
_PART_LABELS = {
    "compute": "forward and backward",
    "waiting": "waiting for the slowest",
    "dense": "exchange of dense gradients",
    "rows": "exchange of rows of tables",
}


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw what the results allow; returns the files, SVG, PDF and PNG of each figure.

    `<id>_efficiency`: samples a second and efficiency by ranks, with the goal;
    `<id>_step`: the parts of a step;
    `<id>_simulated`: efficiency by the number of GPUs, a panel a skew of lengths;
    `<id>_volume`: bytes that a rank sends and keeps, and the parts of a simulated step.
    """
    figures: dict[str, Figure] = {}
    with style.look():
        points = efficiency(results)
        points = points[is_shown(points["status"])]
        if (points["status"] == "ok").any():
            figures["efficiency"] = _efficiency_figure(results, points, manifest)
            figures["step"] = _step_figure(measured(results, *PARTS), manifest)
        if len(table := simulated(results, "efficiency")):
            figures["simulated"] = _simulated_figure(table, manifest)
            if table["provider"].eq(BY_TOKENS).any():
                figures["volume"] = _volume_figure(results, manifest)
        return style.save_all(figures, TITLES, manifest, out)


def _efficiency_figure(
    results: pd.DataFrame, points: pd.DataFrame, manifest: Mapping[str, Any]
) -> Figure:
    figure, ((left, right),) = style.new_figure(1, 2, height=2.4)
    through = measured(results, "throughput")
    handles = {}
    for balance in BALANCES:
        handles |= _line(left, through, balance)
        handles |= _line(right, points, balance)
    left.set_ylim(bottom=0)
    left.set_ylabel("samples a second")
    right.set_ylim(0, 1.1 * max(1.0, float(points["value"].max())))
    right.set_ylabel("scaling efficiency")
    reference_line(
        right,
        EFFICIENCY_GOAL,
        f"goal at {GOAL_RANKS}: {EFFICIENCY_GOAL:.0%}",
        color=style.PAPER_COLOR,
    )
    for panel in (left, right):
        style.binary_axis(panel, [int(n) for n in points["ranks"]], "ranks")
    style.legend(figure, handles)
    facts = points.iloc[0]
    model = style.look_of(str(facts["model"])).label
    note = f"{model}, {facts['requests']:g} requests a rank and step"
    style.finish(figure, manifest, note=note)
    return figure


def _line(panel: Axes, table: pd.DataFrame, balance: str) -> dict[str, Any]:
    """From quartile to quartile, with a mark at the lower edge where there is no value; legend
    entries."""
    tried = table[table["provider"] == balance]
    if tried.empty:
        return {}
    mine = tried[tried["status"] == "ok"].sort_values(by="ranks")
    looks = style.look_of(balance)
    at = tried["ranks"].to_numpy(float)
    lost = lost_marks(panel, looks.color, at, tried["status"], edge=LOWER)
    value = mine["value"].to_numpy(float)
    spread = [
        np.nan_to_num(sign * (mine[name].to_numpy(float) - value)).clip(0)
        for sign, name in ((-1, "q25"), (1, "q75"))
    ]
    panel.errorbar(
        mine["ranks"], value, yerr=spread, color=looks.color, marker=looks.marker,
        linestyle=looks.line, markeredgecolor="white", markeredgewidth=0.4, elinewidth=0.8,
    )  # fmt: skip
    return {looks.label: _handle(balance), **lost}


def _handle(balance: str) -> Line2D:
    looks = style.look_of(balance)
    return Line2D([], [], color=looks.color, marker=looks.marker, linestyle=looks.line)


def _step_figure(parts: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    figure, (panels,) = style.new_figure(1, 2, height=2.4, sharey=True)
    for panel, balance in zip(panels, BALANCES, strict=True):
        mine = parts[(parts["provider"] == balance) & (parts["status"] == "ok")]
        _bars(panel, mine, PARTS)
        panel.set_title(style.look_of(balance).label)
        panel.set_xlabel("ranks")
    panels[0].set_ylabel("ms a step, mean of the ranks")
    style.legend(figure, {_label(part): Patch(color=_PART_COLORS[part]) for part in PARTS})
    style.finish(figure, manifest, note="medians of steps, one part above the other")
    return figure


def _bars(panel: Axes, table: pd.DataFrame, parts: Sequence[str]) -> None:
    """A bar for each number of ranks, its parts one above the other."""
    ranks = sorted({int(n) for n in table["ranks"]})
    below = np.zeros(len(ranks))
    for part in parts:
        of = table[table["metric"] == part].set_index("ranks")["value"]
        heights = np.array([float(of.get(n, 0.0)) for n in ranks])
        panel.bar(range(len(ranks)), heights, 0.7, bottom=below, color=_PART_COLORS[part])
        below += heights
    panel.set_xticks(range(len(ranks)), [f"{n:,}" for n in ranks])


def _label(part: str) -> str:
    return _PART_LABELS.get(part, part)


def _simulated_figure(table: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    skews = list(dict.fromkeys(skew(sigma) for sigma in table["sigma"]))
    figure, (panels,) = style.new_figure(1, len(skews), height=2.4, sharey=True)
    handles = {}
    for panel, name in zip(panels, skews, strict=True):
        mine = table[[skew(sigma) == name for sigma in table["sigma"]]]
        for balance in BALANCES:
            handles |= _line(panel, mine, balance)
        # Above 1 where the few draws for one GPU had longer histories than the others.
        panel.set_ylim(0, 1.05 * max(1.0, float(table["value"].max())))
        panel.set_title(name)
        style.binary_axis(panel, [int(n) for n in mine["ranks"]], "GPUs, simulated")
    panels[0].set_ylabel("scaling efficiency, simulated")
    style.legend(figure, handles)
    style.finish(figure, manifest, note=assumptions(table))
    return figure


def _volume_figure(results: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    """Of lengths as the first simulation has them, balanced by tokens."""
    sizes = ("dense_bytes", "rows_bytes", "table_bytes")
    table = simulated(results, *sizes, *SIMULATED_PARTS)
    first = skew(table["sigma"].iloc[0])
    table = table[[skew(sigma) == first for sigma in table["sigma"]]]
    table = table[table["provider"] == BY_TOKENS]
    figure, ((left, middle, right),) = style.new_figure(1, 3, height=2.4)
    handles: dict[str, Any] = {}
    for metric, part in (("dense_bytes", "dense"), ("rows_bytes", "rows")):
        mine = table[(table["metric"] == metric) & (table["ranks"] > 1)].sort_values(by="ranks")
        left.plot(mine["ranks"], mine["value"] / 1e6, marker="o", color=_PART_COLORS[part])
    left.set_ylabel("MB a rank sends a step")
    kept = table[table["metric"] == "table_bytes"].sort_values(by="ranks")
    middle.plot(kept["ranks"], kept["value"] / 1e9, marker="o", color=_PART_COLORS["rows"])
    low, high = float(kept["value"].min()) / 1e9, float(kept["value"].max()) / 1e9
    style.log_y_axis(middle, low / 1.5, 1.5 * high)
    middle.set_ylabel("GB of tables a rank")
    _bars(right, table, SIMULATED_PARTS)
    right.set_ylabel("ms a step, simulated")
    right.set_xlabel("GPUs, simulated")
    right.tick_params(axis="x", labelrotation=60)
    left.set_ylim(bottom=0)
    for panel in (left, middle):
        style.binary_axis(panel, [int(n) for n in kept["ranks"]], "GPUs, simulated")
    handles |= {_label(part): Patch(color=_PART_COLORS[part]) for part in SIMULATED_PARTS}
    # Of all three: it stands in the middle of the figure.
    whose = f"{style.look_of(BY_TOKENS).label}, {first}"
    middle.set_title(whose, fontsize=7, fontweight="normal", pad=8)
    style.legend(figure, handles)
    style.finish(figure, manifest, note=assumptions(table))
    return figure
