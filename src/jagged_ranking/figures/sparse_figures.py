"""Figures of attention to some of the keys: by length, by density, retrieval, unequal lengths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, PercentFormatter

from jagged_ranking.figures import panels, style, sweeps
from jagged_ranking.figures.labels import reference_line
from jagged_ranking.figures.memory import BEYOND
from jagged_ranking.figures.points import dtypes_of, modes_of, of_group, ours_beside
from jagged_ranking.figures.sparse_points import (
    PAPER_SPEEDUPS,
    DensitySweep,
    density_sweeps,
    lists_ms,
    seen,
    sparse,
)
from jagged_ranking.measure.lineup import (
    ALL_KEYS,
    BY_LENGTH,
    DKERNEL,
    JAGGED_LENGTHS,
    OURS,
    RETRIEVAL,
    RETRIEVED,
    SEMI_LOCAL,
    STRIDED,
)

TITLES = {
    "length": "Latency of S2-Attention, and of attention to all keys by ours and peers, by the "
    f"length of users, {sweeps.BOTH_MODES}",
    "speedup": "How many times faster S2-Attention is than attention to all keys by ours and "
    f"peers, by the length of users, with the paper's claim, {sweeps.BOTH_MODES}",
    "density": "Time of attention to some blocks of keys over that of attention to all, by the "
    f"share of blocks, with fitted lines, {sweeps.BOTH_MODES}",
    "retrieval": "Latency of building lists by retrieval (for a backward with their transpose), of "
    "attention to the blocks retrieved and of attention to all keys, by the number of blocks, "
    f"{sweeps.BOTH_MODES}",
    "seen": "Keys that the newest query sees by one head and by all heads together, under each "
    "rule, by the length of the history",
    "jagged": "Latency of S2-Attention and semi-local attention on histories of unequal lengths, "
    f"padded and not, and of attention to all keys, {sweeps.BOTH_MODES}",
    "memory": "Peak memory beyond the inputs of S2-Attention, and of attention to all keys by ours "
    f"and peers, by the length of users, {sweeps.BOTH_MODES}",
}
LISTS_LINE: dict[str, Any] = {
    "color": "#2f6f4f",
    "marker": "X",
    "linestyle": (0, (1.5, 1)),
    "linewidth": 1.1,
    "markersize": 4.5,
    "markeredgecolor": "white",
    "markeredgewidth": 0.4,
}
_APART = "lists not counted"
BUILT, CEILING, FIT = "ours, building lists", "all blocks / blocks seen", "fitted line"


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw what the results allow; returns the files, SVG, PDF and PNG of each figure.

    `<id>_length`, `<id>_memory`: ms and peak by the length of users;
    `<id>_speedup`: everybody on all keys over our S2-Attention;
    `<id>_density`: our time over ours on all keys, by the share of blocks;
    `<id>_retrieval`: ms by the number of blocks retrieved;
    `<id>_seen`: keys that one head and all heads see;
    `<id>_jagged`: ms on unequal lengths.
    """
    table, beyond = sparse(results, "latency"), sparse(results, BEYOND)
    figures: dict[str, Figure] = {}
    with style.look():
        if len(points := of_group(table, BY_LENGTH)):
            figures["length"] = _length_figure(points, manifest, "latency (ms)", 1.0, _APART)
            figures["speedup"] = _speedup_figure(points, manifest)
        if found := list(density_sweeps(results)):
            figures["density"] = _density_figure(found, table, manifest)
        if len(points := of_group(table, RETRIEVAL)):
            built = {mode: lists_ms(results, mode) for mode in modes_of(points)}
            figures["retrieval"] = _retrieval_figure(points, built, manifest)
        if len(points := seen(results)):
            figures["seen"] = _seen_figure(points, manifest)
        if len(points := of_group(table, JAGGED_LENGTHS)):
            figures["jagged"] = _jagged_figure(points, manifest)
        if len(points := of_group(beyond, BY_LENGTH)):
            size, unit = sweeps.bytes_unit(points)
            label = f"peak beyond inputs ({unit})"
            figures["memory"] = _length_figure(
                points, manifest, label, 1 / size, "lists among inputs"
            )
        return style.save_all(figures, TITLES, manifest, out)


def _length_figure(
    points: pd.DataFrame, manifest: Mapping[str, Any], ylabel: str, scale: float, lists: str
) -> Figure:
    """A column a mode, a line a provider; `lists` says where those of ours are counted."""
    modes, lengths = modes_of(points), sorted({int(n) for n in points["max_len"]})
    scaled = points.assign(**{c: points[c] * scale for c in ("value", "q25", "q75")})
    figure, axes = style.new_figure(1, len(modes), height=2.9)
    handles: dict[str, Any] = {}
    for panel, mode in zip(axes[0], modes, strict=True):
        mine = scaled[scaled["mode"] == mode]
        handles |= panels.lines_panel(panel, mine, column="max_len", order=lengths)
        _said_lengths(panel, lengths)
        panels.padded_limits(panel, [*mine["value"], *mine["q25"], *mine["q75"]])
        panel.set_title(style.MODE_LOOKS[mode].label)
        panel.set_ylabel(ylabel)
    style.legend(figure, handles)
    style.finish(figure, manifest, dtypes_of(points), note=f"{_held_fixed(points)}; {lists}")
    return figure


def _speedup_figure(points: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    """How many times more everybody needs than our S2-Attention; how many it could be at most, if
    a block cost the same."""
    modes, lengths = modes_of(points), sorted({int(n) for n in points["max_len"]})
    own = ours_beside(points)
    ratio = points.assign(**{c: points[c] / own for c in ("value", "q25", "q75")})
    shown = ratio["value"].notna() | panels.is_lost(ratio["status"])
    ratio = ratio[(ratio["provider"] != OURS) & shown]
    figure, axes = style.new_figure(1, len(modes), height=2.9)
    handles: dict[str, Any] = {}
    for panel, mode in zip(axes[0], modes, strict=True):
        mine = ratio[ratio["mode"] == mode]
        handles |= panels.lines_panel(panel, mine, column="max_len", order=lengths)
        of_length = points.drop_duplicates("max_len").set_index("max_len")["density"]
        most = [1.0 / float(of_length[n]) for n in lengths]
        panel.plot(range(len(lengths)), most, **sweeps.LIMIT_LINE)
        handles[CEILING] = Line2D([], [], **sweeps.LIMIT_LINE)
        panel.axhline(1.0, color="#888888", linewidth=0.7, zorder=1)
        claim = PAPER_SPEEDUPS[1]
        label = f"S2's paper, 128k tokens, over FA2: {claim:g}x"
        reference_line(panel, claim, label, color=style.PAPER_COLOR)
        _said_lengths(panel, lengths)
        panels.padded_limits(panel, [*mine["value"], *most, claim, 1.0])
        panel.set_title(style.MODE_LOOKS[mode].label)
        panel.set_ylabel("time / time of our S2-Attention")
    style.legend(figure, handles)
    style.finish(figure, manifest, dtypes_of(points), note=f"{_held_fixed(points)}; {_APART}")
    return figure


def _density_figure(
    found: list[DensitySweep], table: pd.DataFrame, manifest: Mapping[str, Any]
) -> Figure:
    """A row a mode, a column a kind of list."""
    titles = list(dict.fromkeys(sweep.title for sweep in found))
    modes = [mode for mode in style.MODE_LOOKS if any(sweep.mode == mode for sweep in found)]
    figure, axes = style.new_figure(
        len(modes), len(titles), height=0.75 + 2.0 * len(modes), sharex=True, sharey=True
    )
    looks = style.look_of(OURS)
    for sweep in found:
        panel = axes[modes.index(sweep.mode)][titles.index(sweep.title)]
        distance = np.stack([sweep.relative - sweep.low, sweep.high - sweep.relative])
        panel.plot([0, 1], [0, 1], **sweeps.LIMIT_LINE)
        panel.errorbar(
            sweep.density,
            sweep.relative,
            yerr=np.clip(distance, 0, None),
            color=looks.color,
            marker=looks.marker,
            linestyle="none",
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.4,
            elinewidth=0.8,
            capsize=1.5,
            zorder=3,
        )
        panel.set_title(f"{sweep.title}\n{style.MODE_LOOKS[sweep.mode].label}")
        if np.isfinite(sweep.r2):
            ends = np.array([0.0, 1.0])
            panel.plot(ends, sweep.intercept + sweep.slope * ends, **_FIT_LINE)
            said = f"R² {sweep.r2:.3f}\nintercept {sweep.intercept:.1%}"
            # Where nothing is drawn: whoever sees most blocks takes long.
            where: dict[str, Any] = {"transform": panel.transAxes, "va": "bottom", "ha": "right"}
            where["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.6}
            panel.text(0.97, 0.04, said, color=style.PAPER_COLOR, fontsize=6.5, **where)
    for panel in axes[-1]:
        panel.set_xlabel("blocks seen, of all blocks")
    for panel in axes.flat:
        panel.set_xlim(0, 1.04)
        panel.set_ylim(bottom=0)
        panel.xaxis.set_major_formatter(PercentFormatter(1.0))
    for row in axes:
        row[0].set_ylabel("time / time of ours on all keys")
    handles = {
        looks.label: panels.marker_handle(OURS),
        FIT: Line2D([], [], **_FIT_LINE),
        "in proportion": Line2D([], [], **sweeps.LIMIT_LINE),
    }
    style.legend(figure, handles)
    style.finish(figure, manifest, dtypes_of(table))
    return figure


_FIT_LINE: dict[str, Any] = {
    "color": style.PAPER_COLOR,
    "linewidth": 0.9,
    "linestyle": (0, (4, 2)),
    "zorder": 2,
}


def _retrieval_figure(
    points: pd.DataFrame, built: Mapping[str, Mapping[str, float]], manifest: Mapping[str, Any]
) -> Figure:
    """A row a mode, a column a number of candidates; built: of each mode, see `lists_ms`."""
    modes, counts = modes_of(points), sorted({int(n) for n in points["queries"]})
    blocks = sorted({int(n) for n in points["top_k"]})
    figure, axes = style.new_figure(
        len(modes), len(counts), height=0.75 + 1.9 * len(modes), sharex=True, sharey="row"
    )
    handles: dict[str, Any] = {}
    for row, mode in zip(axes, modes, strict=True):
        of_mode = points[points["mode"] == mode]
        shown = [*of_mode["value"], *of_mode["q25"], *of_mode["q75"], *built[mode].values()]
        for panel, count in zip(row, counts, strict=True):
            mine = of_mode[of_mode["queries"] == count]
            handles |= panels.lines_panel(panel, mine, column="top_k", order=blocks)
            name = dict(zip(mine["top_k"], mine["workload"], strict=True))
            lists = [built[mode].get(str(name.get(k)), np.nan) for k in blocks]
            panel.plot(range(len(blocks)), lists, **LISTS_LINE)
            handles[BUILT] = Line2D([], [], **LISTS_LINE)
            panel.set_title(f"{style.MODE_LOOKS[mode].label}\n{count} candidates")
            panel.set_xlim(-0.3, len(blocks) - 0.7)
        panels.padded_limits(row[0], shown)
        row[0].set_ylabel("latency (ms)")
    for panel in axes[-1]:
        panel.set_xlabel("blocks retrieved")
    style.legend(figure, handles)
    style.finish(figure, manifest, dtypes_of(points), note=_held_fixed(points))
    return figure


def _seen_figure(points: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    """One head on the left, all of them on the right; a line a rule."""
    lengths = sorted({int(n) for n in points["max_len"]})
    heads = int(points["H"].iloc[0])
    titles = {"one_head": "one head", "all_heads": f"{heads} heads together"}
    figure, axes = style.new_figure(1, len(titles), height=2.7, sharey=True)
    handles: dict[str, Any] = {}
    for panel, (metric, title) in zip(axes[0], titles.items(), strict=True):
        for rule in style.ordered(list(points["provider"].unique())):
            mine = points[(points["provider"] == rule) & (points["metric"] == metric)]
            line = _seen_line(rule)
            panel.plot([lengths.index(int(n)) for n in mine["max_len"]], mine["value"], **line)
            handles[style.look_of(rule).label] = Line2D([], [], **line)
        _said_lengths(panel, lengths)
        panel.set_xlabel("history (tokens)")
        panel.set_title(title)
    panels.padded_limits(axes[0][0], list(points["value"]))
    axes[0][0].yaxis.set_major_formatter(EngFormatter(sep=""))
    axes[0][0].set_ylabel("keys that the newest query sees")
    style.legend(figure, handles)
    style.finish(figure, manifest, note=_rules(points))
    return figure


def _seen_line(rule: str) -> dict[str, Any]:
    """All keys are broad and below: what sees as many is on them."""
    looks, broad = style.look_of(rule), rule == ALL_KEYS
    return {
        "color": looks.color,
        "marker": "" if broad else looks.marker,
        "linestyle": "-" if broad else looks.line,
        "linewidth": 5.0 if broad else 1.1,
        "alpha": 0.35 if broad else 1.0,
        "markersize": 4,
        "markeredgecolor": "white",
        "markeredgewidth": 0.4,
        "zorder": 2 if broad else 3,
    }


def _jagged_figure(points: pd.DataFrame, manifest: Mapping[str, Any]) -> Figure:
    labels = {}
    for row in points.drop_duplicates("workload").itertuples():
        name = style.broken(str(row.workload).replace("-small", ""), 12)
        labels[str(row.workload)] = f"{name}\n{row.waste:.0%} waste\n{row.density:.0%} of blocks"
    return sweeps.workloads_figure(points, manifest, unit=1.0, ylabel="latency (ms)", labels=labels)


def _said_lengths(panel: Axes, lengths: list[int]) -> None:
    """1k, 2k, ..., 128k, at every place, or every second where there are many."""
    said = [f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else f"{n}" for n in lengths]
    panel.set_xticks(range(len(lengths)), said)
    panel.set_xlabel("tokens of a user")


def _held_fixed(points: pd.DataFrame) -> str:
    facts = points.iloc[0]
    said = [_rule(facts), style.counted(int(facts["H"]), "head"), f"head_dim {int(facts['D'])}"]
    if points["tokens"].nunique() == 1:
        said.insert(1, f"{int(facts['tokens']):,} tokens in all")
    ran = set(points.loc[points["status"] == "ok", "provider"])
    listed = [name for name in (OURS, DKERNEL) if name in ran]
    names = " and ".join(style.look_of(name).label for name in listed)
    fixed = ", ".join(text for text in said if text)
    return f"held fixed: {fixed}; all but {names} see all keys"


def _rules(points: pd.DataFrame) -> str:
    found = []
    for _, facts in points.drop_duplicates("provider").iterrows():
        found.append(_rule(facts))
        if facts["rule"] == RETRIEVED:
            found[-1] = (
                f"retrieval: {int(facts['top_k'])} blocks, and {int(facts['newest'])} newest"
            )
    return "; ".join(text for text in found if text)


def _rule(facts: pd.Series) -> str:
    """A rule in words; nothing of what changes along a sweep."""
    block = f"blocks of {int(facts['block'])}" if pd.notna(facts["block"]) else ""
    if facts["rule"] == STRIDED:
        return f"S2: one block in {int(facts['stride'])}, {int(facts['local'])} local, {block}"
    if facts["rule"] == SEMI_LOCAL:
        return f"semi-local: {int(facts['window'])} newest, {int(facts['first'])} first tokens"
    if facts["rule"] == RETRIEVED:
        newest = style.counted(int(facts["newest"]), "newest block")
        return f"retrieval: {newest} besides, {block}"
    return ""
