"""What the speed and the memory figures share: sweeps, ratios to dense attention, named workloads.

`speed.py` and `memory.py` say which quantity is drawn and how it is called.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter

from jagged_ranking.figures import panels, style
from jagged_ranking.figures.panels import Claim
from jagged_ranking.figures.points import (
    SWEEP_AXIS,
    attention,
    dtypes_of,
    modes_of,
    ratios,
    sweep,
)

BASELINES = {"dense_eager": "dense attention", "dense_flash": "dense flash attention"}
LIMIT = "limit of the device"
LIMIT_LINE: dict[str, Any] = {"color": "#999999", "linewidth": 0.9, "linestyle": ":"}


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What a set of figures is about.

    Args:
        swept: the metric that is drawn along the sweeps and compared with dense attention.
        name: what the figures of the sweeps are called: `<name>_by_<sweep>`.
        label: of the y axis, the unit behind it.
        unit: rows -> (what values are divided by, its name).
        limits: whether rows have a limit of the device (`limit_ms`) in the same unit.
        ratio: the name of the figure of ratios.
        ratio_label: of its y axis.
        claims: baseline -> what the paper claims of it.
    """

    swept: str
    name: str
    label: str
    unit: Callable[[pd.DataFrame], tuple[float, str]]
    limits: bool
    ratio: str
    ratio_label: str
    claims: Mapping[str, Claim]


ALONG = {
    "waste": "padding waste",
    "length": "the longest history",
    "head_dim": "head_dim",
    "tokens": "the number of tokens",
}
BOTH_MODES = "forward and with the backward"


def titles(name: str, what: str) -> dict[str, str]:
    """Of the figures `<name>_by_<sweep>`, whose y axis is `what`."""
    return {
        f"{name}_by_{sweep}": f"{what} of jagged attention and its peers by {along}, {BOTH_MODES}"
        for sweep, along in ALONG.items()
    }


def figures_of(
    quantity: Quantity, results: pd.DataFrame, manifest: Mapping[str, Any]
) -> dict[str, Figure]:
    """The figures of all sweeps that the results have, and of the ratios along them."""
    table = attention(results, quantity.swept)
    figures = {
        f"{quantity.name}_by_{group}": _sweep_figure(quantity, sweep(table, group), group, manifest)
        for group in SWEEP_AXIS
        if len(sweep(table, group))
    }
    compared = {name: ratios(results, quantity.swept, name) for name in BASELINES}
    if any(len(sweep(r, g)) for r in compared.values() for g in panels.RATIO_SWEEPS):
        figures[quantity.ratio] = _ratio_figure(quantity, compared, manifest, dtypes_of(table))
    return figures


def _sweep_figure(
    quantity: Quantity, points: pd.DataFrame, group: str, manifest: Mapping[str, Any]
) -> Figure:
    modes = modes_of(points)
    size, unit = quantity.unit(points)
    figure, axes = style.new_figure(1, len(modes), height=2.9)
    handles: dict[str, Any] = {}
    for panel, mode in zip(axes[0], modes, strict=True):
        mine = points[points["mode"] == mode]
        handles |= panels.sweep_panel(panel, mine, group=group, scale=1 / size)
        shown = [*mine["value"], *mine["q25"], *mine["q75"]]
        if quantity.limits:
            limit = mine.drop_duplicates("workload")
            shown += [*limit["limit_ms"]]
            panel.plot(
                panels.along(limit, group),
                limit["limit_ms"].to_numpy(float) / size,
                **LIMIT_LINE,
                zorder=2,
            )
            handles[LIMIT] = Line2D([], [], **LIMIT_LINE)
        panels.padded_limits(panel, [value / size for value in shown])
        panel.set_title(style.MODE_LOOKS[mode].label)
        panel.set_ylabel(f"{quantity.label} ({unit})")
    style.legend(figure, handles)
    style.finish(figure, manifest, dtypes_of(points), note=held_fixed(points, group))
    return figure


def held_fixed(points: pd.DataFrame, group: str) -> str:
    """What all batches of a sweep have in common, in words."""

    def one(column: str) -> Any:
        values = points[column].dropna().unique()
        return values[0] if len(values) == 1 else None

    said = []
    if (users := one("B")) is not None:
        said.append(style.counted(users, "user"))
    elif (padded := (points["B"] * points["max_len"]).unique()).size == 1:
        said.append(f"{padded[0]:,} tokens with padding")
    if group != "waste" and (distribution := one("distribution")) is not None:
        least, most = points["waste"].min(), points["waste"].max()
        waste = f"{least:.0%}" if f"{least:.0%}" == f"{most:.0%}" else f"{least:.0%} to {most:.0%}"
        said.append(f"{distribution} lengths ({waste} waste)")
    if group != "length" and (longest := one("max_len")) is not None:
        said.append(f"the longest {longest:,}")
    if (heads := one("H")) is not None:
        said.append(style.counted(heads, "head"))
    if group != "head_dim" and (dim := one("D")) is not None:
        said.append(f"head_dim {dim}")
    return "held fixed: " + ", ".join(said)


def _ratio_figure(
    quantity: Quantity,
    compared: Mapping[str, pd.DataFrame],
    manifest: Mapping[str, Any],
    dtypes: list[str],
) -> Figure:
    """A row a baseline, a column a sweep."""
    shown = {name: table for name, table in compared.items() if len(table)}
    groups = [g for g in panels.RATIO_SWEEPS if any(len(sweep(t, g)) for t in shown.values())]
    figure, axes = style.new_figure(len(shown), len(groups), height=0.6 + 1.9 * len(shown))
    handles: dict[str, Any] = {}
    titles = {"waste": "by padding waste", "length": "by longest history"}
    for row, (name, table) in zip(axes, shown.items(), strict=True):
        for panel, group in zip(row, groups, strict=True):
            handles |= panels.ratio_panel(
                panel,
                table,
                group=group,
                claim=quantity.claims[name],
                title=f"against {BASELINES[name]}, {titles[group]}",
            )
            panel.set_ylabel(quantity.ratio_label)
    style.legend(figure, handles)
    style.finish(figure, manifest, dtypes)
    return figure


def workloads_figure(
    named: pd.DataFrame,
    manifest: Mapping[str, Any],
    *,
    unit: pd.Series | float,
    ylabel: str,
    baseline: float | None = None,
    limits: bool = False,
    labels: Mapping[str, str] | None = None,
    decorate: Callable[[Any, str], dict[str, Any]] | None = None,
) -> Figure:
    """A row a mode, a column a workload, a dot a provider.

    Args:
        named: rows of one metric.
        manifest: of the run.
        unit: what values are divided by: one number, or a series like `named`.
        ylabel: of every panel.
        baseline: a line across all columns.
        limits: a short line in each column at the limit of the device (values are ms).
        labels: workload -> what stands below its column.
        decorate: draws more into the panel of a mode, and returns legend entries.
    """
    modes = modes_of(named)
    labels = labels or panels.workload_labels(named)
    figure, axes = style.new_figure(len(modes), 1, height=0.75 + 1.85 * len(modes), sharex=True)
    handles: dict[str, Any] = {}
    divided = named.assign(_unit=unit)
    for panel, mode in zip(axes[:, 0], modes, strict=True):
        mine = divided[divided["mode"] == mode]
        handles |= panels.dot_panel(
            panel, mine, workloads=list(labels), labels=labels, unit=mine["_unit"]
        )
        shown = np.concatenate([(mine[c] / mine["_unit"]) for c in ("q25", "q75", "value")])
        if baseline is not None:
            panel.axhline(baseline, **LIMIT_LINE, zorder=1)
            shown = np.append(shown, baseline)
        if limits:
            least = mine.drop_duplicates("workload").set_index("workload")["limit_ms"]
            heights = np.array([float(least.get(name, np.nan)) for name in labels])
            places = np.arange(len(labels))
            panel.hlines(heights, places - 0.45, places + 0.45, **LIMIT_LINE)
            handles[LIMIT] = Line2D([], [], **LIMIT_LINE)
            shown = np.append(shown, heights)
        handles |= decorate(panel, mode) if decorate else {}
        panels.padded_limits(panel, list(shown))
        panel.set_title(style.MODE_LOOKS[mode].label)
        panel.set_ylabel(ylabel)
    style.legend(figure, handles, columns=5)
    style.finish(figure, manifest, dtypes_of(named))
    return figure


def memory_figure(table: pd.DataFrame, manifest: Mapping[str, Any], **options: Any) -> Figure:
    """`workloads_figure` of peaks beyond the inputs."""
    figure = workloads_figure(table, manifest, unit=1.0, ylabel="peak beyond inputs", **options)
    for panel in figure.axes:
        # From a few kB to many GB.
        panel.yaxis.set_major_formatter(EngFormatter("B"))
    return figure


def bytes_unit(table: pd.DataFrame) -> tuple[float, str]:
    """Decimal units, by the largest value."""
    return (1e9, "GB") if table["value"].max() >= 1e9 else (1e6, "MB")
