"""Figures of HSTU's attention: time on named workloads and along padding waste, beside softmax
attention, padded PyTorch and the kernels of HSTU's authors; memory."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from jagged_ranking.figures import panels, style, sweeps
from jagged_ranking.figures.hstu_points import (
    FASTER_FROM,
    FASTER_GOAL,
    WITH,
    WITHOUT_BIASES,
    hstu,
)
from jagged_ranking.figures.memory import BEYOND
from jagged_ranking.figures.points import dtypes_of, modes_of, of_group, ours_beside, sweep

GOAL = f"goal for HSTU's Triton: {FASTER_GOAL:g}x"
GOAL_LINE: dict[str, Any] = {
    "color": style.PAPER_COLOR,
    "linewidth": 0.9,
    "linestyle": (0, (4, 2)),
}
TITLES = {
    "latency": "Latency of HSTU's attention, ours and others', on each workload, with the limit of "
    f"the device, {sweeps.BOTH_MODES}",
    "ratios": f"Time of everybody relative to our HSTU attention on each workload, "
    f"{sweeps.BOTH_MODES}",
    "waste": f"Latency of HSTU's attention by padding waste, {sweeps.BOTH_MODES}",
    "waste_ratios": "Time of everybody relative to our HSTU attention by padding waste, "
    f"{sweeps.BOTH_MODES}",
    "memory": "Peak memory of HSTU's attention beyond the inputs, ours and others', on each "
    f"workload, {sweeps.BOTH_MODES}",
}


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw what the results allow; returns the files, SVG, PDF and PNG of each figure.

    `<id>_latency`: ms on the named workloads, with the limit of the device;
    `<id>_ratios`: everybody but padded PyTorch over ours on them, with the goal;
    `<id>_waste`, `<id>_waste_ratios`: the same along padding waste;
    `<id>_memory`: the peak beyond the inputs on the named workloads.
    """
    table, beyond = hstu(results, "latency"), hstu(results, BEYOND)
    figures: dict[str, Figure] = {}
    with style.look():
        if len(named := of_group(table, "workloads")):
            labels = _labels(named)
            figures["latency"] = sweeps.workloads_figure(
                named, manifest, unit=1.0, ylabel="latency (ms)", limits=True, labels=labels
            )
            if len(compared := _relative(named)):
                figures["ratios"] = _ratios_figure(compared, manifest)
        if len(swept := sweep(table, "waste")):
            figures["waste"] = _waste_figure(swept, manifest, "ms", _limit)
            if len(compared := _relative(swept)):
                figures["waste_ratios"] = _waste_figure(compared, manifest, "time / ours", _goal)
        if len(named := of_group(beyond, "workloads")):
            figures["memory"] = sweeps.memory_figure(named, manifest, labels=_labels(named))
        return style.save_all(figures, TITLES, manifest, out)


def _labels(table: pd.DataFrame) -> dict[str, str]:
    """workload -> what stands below its column: batch, waste, and what is beside the mask; all of
    a batch side by side."""
    labels = {}
    for _, mine in table.drop_duplicates("workload").groupby("batch", sort=False):
        for row in mine.itertuples():
            name = style.broken(str(row.batch).removesuffix("-small"))
            kind = WITH[str(row.op)].replace(" and ", "\n")
            labels[str(row.workload)] = f"{name}\n{row.waste:.0%} waste\n{kind}"
    return labels


def _relative(table: pd.DataFrame) -> pd.DataFrame:
    """Times as multiples of ours, where there is one: of all who read jagged tensors, between whom
    it is a matter of tenths."""
    unit = ours_beside(table)
    scaled = table.assign(**{c: table[c] / unit for c in ("value", "q25", "q75")})
    return scaled.loc[unit.notna() & (table["provider"] != "dense_hstu"), :]


def _ratios_figure(compared: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    labels = _labels(compared)
    of_workload = dict(zip(compared["workload"], compared["op"], strict=True))
    judged = [place for place, name in enumerate(labels) if of_workload[name] in WITHOUT_BIASES]

    def goal(panel: Axes, mode: str) -> dict[str, Any]:
        at = np.array(judged, dtype=float)
        panel.hlines([FASTER_GOAL] * len(at), at - 0.5, at + 0.5, **GOAL_LINE, zorder=1)
        return {GOAL: Line2D([], [], **GOAL_LINE)}

    return sweeps.workloads_figure(
        compared,
        manifest,
        unit=1.0,
        ylabel="time / time of ours",
        baseline=1.0,
        labels=labels,
        decorate=goal,
    )


def _waste_figure(
    points: pd.DataFrame,
    manifest: Mapping[str, Any],
    unit: str,
    line: Callable[[Axes, pd.DataFrame], tuple[dict[str, Any], list[float]]],
) -> Figure:
    """A row a mode, a column a kind of attention. `line` draws what is compared with, and returns
    legend entries and the heights that should be seen."""
    modes, ops = modes_of(points), [op for op in WITH if op in set(points["op"])]
    figure, axes = style.new_figure(
        len(modes), len(ops), height=0.95 + 1.6 * len(modes), sharex=True, sharey="row"
    )
    handles: dict[str, Any] = {}
    for row, mode in zip(axes, modes, strict=True):
        of_mode = points[points["mode"] == mode]
        shown = [*of_mode["value"], *of_mode["q25"], *of_mode["q75"]]
        for panel, op in zip(row, ops, strict=True):
            mine = of_mode[of_mode["op"] == op]
            handles |= panels.sweep_panel(panel, mine, group="waste")
            entry, heights = line(panel, mine)
            handles |= entry
            shown += heights
            panel.set_xticks([0, 50, 100], ["0%", "50%", "100%"])
            panel.set_xlabel("padding waste" if mode == modes[-1] else "")
        panels.padded_limits(row[0], shown)
        row[0].set_ylabel(f"{style.MODE_LOOKS[mode].label}, {unit}")
    for panel, op in zip(axes[0], ops, strict=True):
        panel.set_title(f"with {WITH[op]}" if WITH[op] else "the mask alone")
    style.legend(figure, handles)
    style.finish(figure, manifest, dtypes_of(points), note=sweeps.held_fixed(points, "waste"))
    return figure


def _limit(panel: Axes, mine: pd.DataFrame) -> tuple[dict[str, Any], list[float]]:
    least = mine.drop_duplicates("workload")
    heights = least["limit_ms"].to_numpy(float)
    panel.plot(panels.along(least, "waste"), heights, **sweeps.LIMIT_LINE, zorder=2)
    return {sweeps.LIMIT: Line2D([], [], **sweeps.LIMIT_LINE)}, list(heights)


def _goal(panel: Axes, mine: pd.DataFrame) -> tuple[dict[str, Any], list[float]]:
    if mine["op"].iloc[0] not in WITHOUT_BIASES:
        return {}, []
    panel.plot([100 * FASTER_FROM, 100], [FASTER_GOAL] * 2, **GOAL_LINE, zorder=2)
    return {GOAL: Line2D([], [], **GOAL_LINE)}, [FASTER_GOAL]
