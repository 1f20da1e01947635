"""Figure of training from disk: memory, waiting and samples a second by the length of the log."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator, PercentFormatter, StrMethodFormatter

from jagged_ranking.figures import style
from jagged_ranking.figures.labels import reference_line
from jagged_ranking.figures.streaming_points import (
    FROM_DISK,
    MEMORY,
    MEMORY_LIMIT,
    WAIT_GOAL,
    by_log,
)

TITLES = {
    "streaming": "Anonymous memory of a training from disk, the share of its steps spent waiting "
    "for batches, and samples a second, by the events of the log",
}
_GIB = 2**30
# metric, the y axis, what its values are divided by.
_PANELS = (
    (MEMORY, "memory, GiB", _GIB),
    ("wait_share", "waiting for batches", 1.0),
    ("samples_per_second", "samples a second", 1.0),
)


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw what the results allow; returns the files, SVG, PDF and PNG.

    `<id>_streaming`: a panel for memory, with the size of the log, for waiting and for samples a
    second.
    """
    figures: dict[str, Figure] = {}
    with style.look():
        logs = [log for log in by_log(results) if log.get(MEMORY, 0) > 0]
        if logs:
            figures["streaming"] = _figure(logs, manifest)
        return style.save_all(figures, TITLES, manifest, out)


def _figure(logs: list[dict], manifest: Mapping[str, Any]) -> Figure:
    figure, (panels,) = style.new_figure(1, len(_PANELS), height=2.2)
    looks = style.look_of(FROM_DISK)
    line: dict[str, Any] = {"color": looks.color, "marker": looks.marker, "linestyle": looks.line}
    size: dict[str, Any] = {"color": "#8a8a8a", "marker": "s", "linestyle": (0, (3, 1))}
    events = [log["events"] for log in logs]
    for panel, (metric, label, unit) in zip(panels, _PANELS, strict=True):
        panel.plot(events, [log[metric] / unit for log in logs], **line)
        panel.set_xscale("log")
        panel.set_xticks(events, [_short(count) for count in events])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.set_xlabel("events of the log")
        panel.set_ylabel(label)
    memory, waiting, rate = panels
    memory.plot(events, [log["log_bytes"] / _GIB for log in logs], **size)
    reference_line(
        memory, MEMORY_LIMIT / _GIB, f"limit: {MEMORY_LIMIT / _GIB:g} GiB", color=style.PAPER_COLOR
    )
    reference_line(waiting, WAIT_GOAL, f"goal: below {WAIT_GOAL:.0%}", color=style.PAPER_COLOR)
    waiting.set_ylim(0, 1.2 * max(WAIT_GOAL, *(log["wait_share"] for log in logs)))
    waiting.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    memory.set_ylim(bottom=0)
    rate.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    rate.set_ylim(0, 1.2 * max(log["samples_per_second"] for log in logs))
    handles = {looks.label: Line2D([], [], **line), "the log's columns": Line2D([], [], **size)}
    style.legend(figure, handles)
    facts = logs[0]
    note = (
        f"{style.look_of(str(facts['model'])).label}, {facts['batch_size']:g} requests a batch; "
        "memory that the system cannot take back, at most"
    )
    style.finish(figure, manifest, note=note)
    return figure


def _short(count: int) -> str:
    """1,500,000 is 1.5M."""
    for unit, letter in ((10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:g}{letter}"
    return f"{count}"
