"""Figures of whole training steps: time, memory and energy by each kind of attention relative to
ours, where the time of a step goes, and what compiling changes."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from jagged_ranking.figures import panels, style
from jagged_ranking.figures.throughput_points import (
    ATTENTION,
    ATTENTION_BACKWARD,
    BACKWARD,
    COMPILED,
    DATA,
    EAGER,
    EMBEDDINGS,
    ENCODER,
    FASTER_FROM,
    FASTER_GOAL,
    HEAD,
    MEMORY_GOAL,
    MODES,
    PAPER_FASTER,
    PAPER_MEMORY,
    UPDATE,
    parts,
    relative,
    steps,
)
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.results import select

TITLES = {
    "time": "Time of a training step by each kind of attention relative to jagged attention, on "
    "each batch, a row a model, with the goal and the paper's 10% more queries a second",
    "memory": "Peak memory of a training step by each kind of attention relative to jagged "
    "attention, on each batch, a row a model, with the goal and the paper's 18% less memory",
    "energy": "Energy of a training step by each kind of attention relative to jagged attention, "
    "on each batch, a row a model",
    "parts": "Where the time of a training step goes, by each kind of attention, as stacked bars, "
    "with what it waits for the host",
    "modes": "Samples a second in training, eager, through torch.compile and by CUDA graphs",
}
# metric, the y axis, (height, name) of the lines, of which the first is the goal.
_RELATIVE = {
    "time": ("step_time", "time / ours", (FASTER_GOAL, PAPER_FASTER)),
    "memory": ("peak_memory", "memory / ours", (1 / MEMORY_GOAL, 1 / PAPER_MEMORY)),
    "energy": ("energy", "energy / ours", ()),
}
_GOAL, _PAPER = f"goal from {FASTER_FROM:.0%} waste: {{:.2g}}x", "the paper's models: {:.2f}x"
_LINES: tuple[dict[str, Any], ...] = (
    {"color": "#444444", "linewidth": 0.9, "linestyle": (0, (4, 2))},
    {"color": style.PAPER_COLOR, "linewidth": 0.9, "linestyle": (0, (1, 1))},
)
HOST = "waiting for the host"
_COLORS = {
    DATA: "#b3b3b3",
    EMBEDDINGS: "#e7c26b",
    ATTENTION: "#0173b2",
    ATTENTION_BACKWARD: "#6db3de",
    ENCODER: "#029e73",
    HEAD: "#cc78bc",
    BACKWARD: "#7fcfb7",
    UPDATE: "#4d4d4d",
    HOST: "#d62f2f",
}
_SHORT = {"padded_flash": "flash", "padded_dense": "dense", "padded_sdpa": "SDPA"}
_CUT = 0.8  # of the height of a panel, where bars are cut off
_GAP = 0.7  # between the bars of two models; those of one lie 1 apart
_ROW, _BESIDE = 1.0, 1.1  # inches of a row of panels, and of what is around them


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw what the results allow; returns the files, SVG, PDF and PNG of each figure.

    `<id>_time`, `<id>_memory`, `<id>_energy`: everybody relative to ours, eager;
    `<id>_parts`: the parts of a step on the batches of given waste, eager;
    `<id>_modes`: samples a second of what has other modes than eager, too, on the batch where
    steps were compiled, of each model with its fewest layers.
    """
    figures: dict[str, Figure] = {}
    with style.look():
        for name, (metric, label, lines) in _RELATIVE.items():
            table = select(relative(results, metric), mode=EAGER)
            # Where ours ran out of memory or failed, its mark alone says so.
            lost = (table["provider"] == OURS) & panels.is_lost(table["status"])
            table = table.loc[table["ours"].notna() | lost, :]
            if table["ours"].notna().any():
                figures[name] = _relative_figure(table, label, lines, manifest)
        taken = parts(results)
        if len(shown := taken[taken["group"] == "waste"] if len(taken) else taken):
            figures["parts"] = _parts_figure(shown, steps(results, "step_time"), manifest)
        if len(several := _several_modes(steps(results, "samples_per_second"))):
            figures["modes"] = _modes_figure(several, manifest)
        return style.save_all(figures, TITLES, manifest, out)


def _models(table: pd.DataFrame) -> list[tuple[str, int]]:
    """Models and their numbers of layers, in the order of legends."""
    found = set(zip(table["model"], table["layers"], strict=True))
    return [
        (model, layers)
        for model in style.ordered(list(dict.fromkeys(table["model"])))
        for layers in sorted(number for name, number in found if name == model)
    ]


def _of(table: pd.DataFrame, model: str, layers: int) -> pd.DataFrame:
    return table.loc[(table["model"] == model) & (table["layers"] == layers), :]


def _relative_figure(
    table: pd.DataFrame, label: str, lines: tuple[float, ...], manifest: Mapping[str, Any]
) -> Figure:
    models = _models(table)
    labels = {
        str(row["workload"]): f"{style.broken(str(row['workload']))}\n{row['waste']:.0%} waste"
        for row in table.drop_duplicates("workload").to_dict("records")
    }
    height = _BESIDE + _ROW * len(models)
    figure, axes = style.new_figure(len(models), 1, height=height, sharex=True)
    handles: dict[str, Any] = {}
    for (model, layers), panel in zip(models, axes[:, 0], strict=True):
        mine = _of(table, model, layers)
        handles |= panels.dot_panel(
            panel, mine, workloads=list(labels), labels=labels, unit=mine["ours"]
        )
        panel.axhline(1.0, color="#888888", linewidth=0.7, zorder=1)
        for at, said, look in zip(lines, (_GOAL, _PAPER), _LINES, strict=False):
            panel.axhline(at, **look, zorder=1.5)
            handles[said.format(at)] = Line2D([], [], **look)
        ratios = mine["value"] / mine["ours"]
        panels.padded_limits(panel, [*ratios, 1.0, *lines])
        panel.set_ylabel(label)
        panel.set_title(style.of_layers(model, layers))
    style.legend(figure, handles)
    style.finish(figure, manifest, note="relative to jagged attention; eager")
    return figure


def _parts_figure(shown: pd.DataFrame, whole: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    """A row a batch, a group of bars a model, a bar a kind of attention."""
    batches = list(dict.fromkeys(shown["workload"]))
    figure, axes = style.new_figure(len(batches), 1, height=_BESIDE + 2.0 * len(batches))
    seen: set[str] = set()
    marks: dict[str, Any] = {}
    for batch, panel in zip(batches, axes[:, 0], strict=True):
        mine = shown[shown["workload"] == batch]
        bars = _bars_of(mine, select(whole, workload=batch, mode=EAGER))
        marks |= _draw_bars(panel, bars)
        of_all = chain.from_iterable(bars.values())
        seen |= {part for bar in of_all for part, ms in bar.taken.items() if ms > 0}
        panel.set_title(f"{batch}, history cap {int(mine['cap'].iloc[0]):,}")
        panel.set_ylabel("ms of a step")
    handles = {part: Patch(color=color) for part, color in _COLORS.items() if part in seen}
    handles |= marks
    style.legend(figure, handles, columns=5)
    note = (
        "the device's time by part; on a GPU a batch is made beside the step before, which takes "
        "as long as a bar without it"
    )
    style.finish(figure, manifest, note=note)
    return figure


@dataclass(frozen=True)
class _Bar:
    """A step of a model by a kind of attention."""

    kind: str
    at: float  # its place on the axis
    taken: Mapping[str, float]  # ms by part
    lost: str | None  # the status of who ran out of memory or failed

    @property
    def total(self) -> float:
        return sum(self.taken.values())


def _bars_of(mine: pd.DataFrame, whole: pd.DataFrame) -> dict[tuple[str, int], list[_Bar]]:
    """By model and number of layers, side by side with a gap between models.

    Args:
        mine: parts of steps on one batch, by the device.
        whole: the same steps by the wall, and those that ran out of memory or failed.
    """
    on_a_gpu = not mine["device"].astype(str).str.startswith("CPU").any()
    failed = whole.loc[panels.is_lost(whole["status"]), :]
    bars: dict[tuple[str, int], list[_Bar]] = {}
    place = 0.0
    for model, layers in _models(pd.concat([mine, failed])):
        of_model, none = _of(mine, model, layers), _of(failed, model, layers)
        lost = dict(zip(none["provider"], none["status"], strict=True))
        steps_of = _of(select(whole, status="ok"), model, layers)
        of_one = bars[model, layers] = []
        for kind in style.ordered([*of_model["provider"].unique(), *lost]):
            taken = of_model[of_model["provider"] == kind].set_index("metric")["value"].to_dict()
            step = steps_of.loc[steps_of["provider"] == kind, "value"]
            if on_a_gpu and len(step):
                busy = sum(ms for part, ms in taken.items() if part != DATA)
                taken[HOST] = max(0.0, float(step.iloc[0]) - busy)
            by_part = {part: taken.get(part, 0.0) for part in _COLORS}
            of_one.append(_Bar(kind, place, by_part, lost.get(kind)))
            place += 1.0
        place += _GAP
    return bars


def _draw_bars(panel: Axes, groups: Mapping[tuple[str, int], list[_Bar]]) -> dict[str, Any]:
    """Stacked bars with their sums, a mark where there is none; legend entries of the marks."""
    bars = list(chain.from_iterable(groups.values()))
    # Every score in memory takes so long that it would be all that is seen: such bars are cut off.
    others = [bar for bar in bars if bar.kind != "padded_dense"]
    limit = 1.3 * max(bar.total for bar in others or bars)
    for (model, layers), group in groups.items():
        panel.annotate(
            style.of_layers(model, layers).replace(", ", ",\n"),
            ((group[0].at + group[-1].at) / 2, 1.0), xycoords=("data", "axes fraction"),
            ha="center", va="top", fontsize=5.5,
        )  # fmt: skip
    for bar in bars:
        if bar.lost:
            continue
        bottom = 0.0
        for part, ms in bar.taken.items():
            seen = min(ms, _CUT * limit - bottom)
            if seen > 0:
                panel.bar(bar.at, seen, 0.8, bottom, color=_COLORS[part], linewidth=0)
                bottom += seen
        said = f"{bar.total:.3g}" if bar.total < 1000 else f"{bar.total:,.0f}"
        said = said if bar.total <= _CUT * limit else f"to {said}"
        panel.annotate(said, (bar.at, bottom), ha="center", va="bottom", fontsize=4.5)
    names = [_SHORT.get(bar.kind, bar.kind) for bar in bars]
    panel.set_xticks([bar.at for bar in bars], names, rotation=90, fontsize=5.5)
    panel.set_xlim(-0.8, bars[-1].at + 0.8)
    panel.set_ylim(0, limit)
    lost = {bar.at: bar.lost for bar in bars if bar.lost}
    # Where bars that are cut off end; in no kind's colour, as colours are of parts.
    return panels.lost_marks(
        panel, panels.LOST_COLOR, np.array(list(lost)), pd.Series(lost), edge=_CUT
    )


def _several_modes(rates: pd.DataFrame) -> pd.DataFrame:
    """Rows of all modes, of the batches where something was compiled, and there of the models that
    have several modes, with the fewest layers; of who ran out of memory or failed, too."""
    ran = select(rates, status="ok")
    compiled = ran.loc[ran["mode"] == COMPILED, "workload"]
    of_models = ran.loc[ran["workload"].isin(compiled), :].groupby("model")
    fewest = of_models["layers"].min()[of_models["mode"].nunique() > 1]
    tried = rates["workload"].isin(compiled) & panels.is_shown(rates["status"])
    return rates.loc[tried & (rates["layers"] == rates["model"].map(fewest)), :]


def _modes_figure(several: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    models = _models(several)
    figure, axes = style.new_figure(1, len(models), height=2.4)
    handles: dict[str, Any] = {}
    for (model, layers), panel in zip(models, axes[0], strict=True):
        mine = _of(several, model, layers)
        modes = [mode for mode in MODES if (mine["mode"] == mode).any()]
        handles |= panels.lines_panel(panel, mine, column="mode", order=modes, more_is_better=True)
        panel.set_xticks(range(len(modes)), [mode.replace(" ", "\n") for mode in modes])
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        panel.set_ylim(0, 1.15 * float(mine["value"].max()))
        panel.set_xlim(-0.4, len(modes) - 0.6)
        panel.set_title(style.of_layers(model, layers))
    axes[0][0].set_ylabel("samples a second")
    style.legend(figure, handles)
    batch = ", ".join(dict.fromkeys(several["workload"]))
    style.finish(figure, manifest, note=f"on {batch}")
    return figure
