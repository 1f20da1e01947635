"""Panels that the speed and the memory figures share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from jagged_ranking.figures import style
from jagged_ranking.figures.labels import reference_line
from jagged_ranking.figures.points import SWEEP_AXIS, sweep
from jagged_ranking.measure.lineup import OURS

RATIO_SWEEPS = ("waste", "length")
OUT_OF_MEMORY = "out of memory"
LOST_COLOR = "#444444"  # of marks in legends, where they are of all providers
# Where the marks of `LOST` stand, in parts of the axes.
UPPER, LOWER = 0.97, 0.03
# Of workloads side by side: with more of them what stands below is smaller.
FULL_SIZE_COLUMNS = 11


class Mark(NamedTuple):
    """A mark at an edge, and what the legend calls it."""

    label: str
    marker: str
    size: float


# By the status of who has no value.
LOST = {
    "out_of_memory": Mark(OUT_OF_MEMORY, "x", 4.5),
    "error": Mark("failed", "1", 7.0),
    "not_tried": Mark("not tried again", "|", 5.5),
}


@dataclass(frozen=True)
class Claim:
    """A claim of the paper as a line or a band in a panel of ratios.

    `factor` to `upper` where the wording allows two readings.
    """

    factor: float
    label: str
    upper: float | None = None


def marker_handle(name: str) -> Line2D:
    """A legend entry for a provider."""
    looks = style.look_of(name)
    return Line2D(
        [],
        [],
        color=looks.color,
        marker=looks.marker,
        linestyle=looks.line,
        markeredgecolor="white",
        markeredgewidth=0.4,
    )


def lost_handle(mark: Mark) -> Line2D:
    """A legend entry for a mark of `LOST`."""
    return Line2D(
        [], [], color=LOST_COLOR, marker=mark.marker, linestyle="none", markersize=mark.size
    )


def is_lost(status: pd.Series) -> pd.Series:
    """Of each point, whether it has a mark in place of a value."""
    return status.isin(list(LOST))


def is_shown(status: pd.Series) -> pd.Series:
    """Of each point, whether it has a value, or a mark in place of one."""
    return status.eq("ok") | is_lost(status)


def lost_marks(
    axes: Axes,
    color: str,
    at: np.ndarray,
    status: pd.Series,
    *,
    edge: float = UPPER,
    sideways: bool = False,
) -> dict[str, Any]:
    """Marks at an edge for those of the points that have no value; legend entries.

    Args:
        at: where the points stand along the x axis (`sideways`: along the y axis).
        status: of each point.
        edge: how far up (`sideways`: how far to the right), in parts of the axes.
    """
    handles: dict[str, Any] = {}
    for lost, mark in LOST.items():
        if (where := (status == lost).to_numpy()).any():
            _marks(axes, at[where], color, mark, edge=edge, sideways=sideways)
            handles[mark.label] = lost_handle(mark)
    return handles


def sweep_panel(
    axes: Axes, table: pd.DataFrame, *, group: str, scale: float = 1.0
) -> dict[str, Any]:
    """One line a provider along a sweep, error bars from quartile to quartile.

    Returns legend entries. Who ran out of memory or failed has a mark at the upper edge.
    """
    points = sweep(table, group)
    handles: dict[str, Any] = {}
    for name in style.ordered(list(points["provider"].unique())):
        mine = points[points["provider"] == name]
        good = mine[mine["status"] == "ok"]
        if len(good):
            _line(axes, name, along(good, group), good, scale)
        looks = style.look_of(name)
        lost = lost_marks(axes, looks.color, along(mine, group), mine["status"])
        if len(good) or lost:
            handles[looks.label] = marker_handle(name)
        handles |= lost
    _sweep_axis(axes, points, group)
    return handles


def lines_panel(
    axes: Axes,
    table: pd.DataFrame,
    *,
    column: str,
    order: Sequence[str] | Sequence[int],
    scale: float = 1.0,
    more_is_better: bool = False,
) -> dict[str, Any]:
    """One line a provider over the values of a column, in the given order; legend entries. Who ran
    out of memory or failed has a mark at the edge where the worst are."""
    handles: dict[str, Any] = {}
    place = {value: i for i, value in enumerate(order)}
    for name in style.ordered(list(table["provider"].unique())):
        mine = table[table["provider"] == name]
        good = mine[mine["status"] == "ok"]
        if len(good):
            _line(axes, name, good[column].map(place).to_numpy(float), good, scale)
        x, looks = mine[column].map(place).to_numpy(float), style.look_of(name)
        edge = LOWER if more_is_better else UPPER
        lost = lost_marks(axes, looks.color, x, mine["status"], edge=edge)
        if len(good) or lost:
            handles[looks.label] = marker_handle(name)
        handles |= lost
    axes.set_xticks(range(len(order)), [f"{x:,}" if isinstance(x, int) else x for x in order])
    return handles


def _line(axes: Axes, name: str, x: np.ndarray, rows: pd.DataFrame, scale: float) -> None:
    looks = style.look_of(name)
    axes.errorbar(
        x,
        rows["value"].to_numpy() * scale,
        yerr=_bars(rows, scale),
        color=looks.color,
        marker=looks.marker,
        linestyle=looks.line,
        # Ours is broad and below, so that a peer on the same line stays visible.
        linewidth=2.4 if name == OURS else 1.1,
        markersize=6 if name == OURS else 4,
        markeredgecolor="white",
        markeredgewidth=0.4,
        elinewidth=0.8,
        capsize=1.5,
        zorder=2.5 if name == OURS else 3,
    )


def ratio_panel(
    axes: Axes, table: pd.DataFrame, *, group: str, claim: Claim, title: str
) -> dict[str, Any]:
    """How many times more the baseline needs, a line a mode, the paper's claim as a reference."""
    points = sweep(table, group)
    handles: dict[str, Any] = {}
    for mode, looks in style.MODE_LOOKS.items():
        mine = points[points["mode"] == mode]
        good = mine[mine["ratio"].notna()]
        if len(good):
            ratio = good["ratio"].to_numpy()
            low = ratio - good["ratio_low"].to_numpy()
            high = good["ratio_high"].to_numpy() - ratio
            axes.errorbar(
                along(good, group),
                ratio,
                yerr=np.clip(np.stack([low, high]), 0, None),
                color=looks.color,
                marker=looks.marker,
                linestyle=looks.line,
                markeredgecolor="white",
                markeredgewidth=0.4,
                elinewidth=0.8,
                capsize=1.5,
                zorder=3,
            )
            handles[looks.label] = Line2D(
                [], [], color=looks.color, marker=looks.marker, linestyle=looks.line
            )
        lost = mine[mine["baseline_status"] == "out_of_memory"]
        if len(lost):
            handles["dense out of memory"] = lost_handle(LOST["out_of_memory"])
            _marks(axes, along(lost, group), looks.color, LOST["out_of_memory"])
    axes.axhline(1.0, color="#888888", linewidth=0.7, zorder=1)
    line = claim.upper or claim.factor
    if claim.upper is not None:
        axes.axhspan(claim.factor, claim.upper, color=style.PAPER_COLOR, alpha=0.12, linewidth=0)
    reference_line(axes, line, claim.label, color=style.PAPER_COLOR)
    shown = points[["ratio_low", "ratio_high"]].to_numpy().ravel()
    shown = shown[np.isfinite(shown)]
    low = min([*shown, 1.0]) / 1.3
    high = max([*shown, line]) * 1.7
    style.log_y_axis(axes, low, high)
    axes.set_title(title)
    _sweep_axis(axes, points, group)
    return handles


def dot_panel(
    axes: Axes,
    table: pd.DataFrame,
    *,
    workloads: Sequence[str],
    labels: Mapping[str, str],
    unit: pd.Series | float,
) -> dict[str, Any]:
    """One column a workload, one dot a provider side by side, error bars from quartile to
    quartile. `unit` is what values are divided by: one number, or a series like `table`."""
    table = table.assign(_unit=unit)
    names = style.ordered(list(table["provider"].unique()))
    handles: dict[str, Any] = {}
    step = 0.8 / max(len(names), 1)
    for index, name in enumerate(names):
        looks = style.look_of(name)
        mine = table[table["provider"] == name]
        place = mine["workload"].map({w: i for i, w in enumerate(workloads)}).to_numpy(float)
        x = place - 0.4 + step * (index + 0.5)
        good = (mine["status"] == "ok").to_numpy()
        scale = (1.0 / mine["_unit"]).to_numpy()[good]
        if good.any():
            axes.errorbar(
                x[good],
                mine["value"].to_numpy()[good] * scale,
                yerr=_bars(mine[good], scale),
                color=looks.color,
                marker=looks.marker,
                linestyle="none",
                markersize=5 if name == OURS else 4,
                markeredgecolor="white",
                markeredgewidth=0.4,
                elinewidth=0.8,
                capsize=1.2,
                zorder=4 if name == OURS else 3,
            )
        lost = lost_marks(axes, looks.color, x, mine["status"])
        if good.any() or lost:
            handles[looks.label] = Line2D(
                [], [], color=looks.color, marker=looks.marker, linestyle="none", markersize=5
            )
        handles |= lost
    axes.set_xticks(range(len(workloads)), [labels[w] for w in workloads])
    if len(workloads) > FULL_SIZE_COLUMNS:
        size = style.COLUMN_LABEL * FULL_SIZE_COLUMNS / len(workloads)
        axes.tick_params(axis="x", labelsize=size)
    axes.set_xlim(-0.55, len(workloads) - 0.45)
    for edge in range(1, len(workloads)):
        axes.axvline(edge - 0.5, color="#eeeeee", linewidth=0.8, zorder=0)
    axes.tick_params(axis="x", length=0)
    return handles


def workload_labels(table: pd.DataFrame) -> dict[str, str]:
    """workload -> what stands below its column: name, lengths, waste."""
    labels = {}
    for row in table.drop_duplicates("workload").itertuples():
        name = style.broken(str(row.workload).removesuffix("-small"))
        if "\n" not in name:  # else a data set; that it is real goes without saying
            name += f"\n{row.distribution}"
        labels[str(row.workload)] = f"{name}\n{row.waste:.0%} waste"
    return labels


def padded_limits(axes: Axes, values: Sequence[float], *, more_is_better: bool = False) -> None:
    """A readable logarithmic y axis with room for the marks of `LOST` where the worst are."""
    finite = [v for v in values if np.isfinite(v) and v > 0]
    if finite:
        below, above = (2.2, 1.4) if more_is_better else (1.4, 2.2)
        low, high = min(finite) / below, max(finite) * above
        style.log_y_axis(axes, low, high)


def along(table: pd.DataFrame, group: str) -> np.ndarray:
    """Where the points of a sweep stand on its axis."""
    x = table[SWEEP_AXIS[group]].to_numpy(float)
    return x * 100 if group == "waste" else x


def _sweep_axis(axes: Axes, points: pd.DataFrame, group: str) -> None:
    if group == "waste":
        style.waste_axis(axes)
        return
    if group == "tokens":
        style.count_axis(axes, "tokens")
        return
    label = {"length": "longest history (tokens)", "head_dim": "head_dim"}[group]
    style.binary_axis(axes, [int(n) for n in points[SWEEP_AXIS[group]]], label)


def _bars(table: pd.DataFrame, scale: float | np.ndarray) -> np.ndarray:
    """[2, n] distances to the quartiles; 0 where there is one value only."""
    value = table["value"].to_numpy()
    low = value - table["q25"].fillna(table["value"]).to_numpy()
    high = table["q75"].fillna(table["value"]).to_numpy() - value
    return np.clip(np.stack([low, high]), 0, None) * scale


def _marks(
    axes: Axes,
    at: np.ndarray,
    color: str,
    mark: Mark,
    *,
    edge: float = UPPER,
    sideways: bool = False,
) -> None:
    edges = np.full(len(at), edge)
    axes.plot(
        *((edges, at) if sideways else (at, edges)),
        transform=axes.get_yaxis_transform() if sideways else axes.get_xaxis_transform(),
        color=color,
        marker=mark.marker,
        markersize=mark.size,
        markeredgewidth=1.2,
        linestyle="none",
        clip_on=False,
        zorder=5,
    )
