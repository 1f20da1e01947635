"""Figures of served requests: how long a caller waits, the device's time and memory by the number
of candidates, and requests a second by how many are answered together."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from jagged_ranking.figures import panels, style
from jagged_ranking.figures.serving_points import TAIL, served

TITLES = {
    "latency": "How long the caller of one request waits, from the median to the 99th percentile, "
    "by candidates, history cap and model, with histories encoded and with histories in a cache",
    "device": "The device's time of one request by candidates, history cap and model, with "
    "histories encoded and with histories in a cache",
    "memory": "Peak memory of one request beyond weights, inputs and caches, by candidates, "
    "history cap and model",
    "rate": "Requests answered a second by how many are answered together, by history cap and "
    "model, with histories encoded and with histories in a cache",
}
_CANDIDATES, _TOGETHER = "candidates", "requests together"
_ROW, _BESIDE = 1.62, 1.1  # inches of a row of panels, and of what is around them


def draw(results: pd.DataFrame, manifest: Mapping[str, Any], out: Path | str) -> list[Path]:
    """Draw what the results allow; returns the files, SVG, PDF and PNG of each figure.

    `<id>_latency`, `<id>_device`, `<id>_memory`: of one request at a time, by candidates;
    `<id>_rate`: requests a second, by how many are answered together.
    """
    figures: dict[str, Figure] = {}
    grid = {"latency": "latency", "device": "device_time", "memory": "peak_memory_minus_inputs"}
    units = {"latency": "ms, median to p99", "device": "ms of the device", "memory": "MB"}
    with style.look():
        for name, metric in grid.items():
            alone = served(results, metric)
            alone = alone[alone["requests"] == 1] if len(alone) else alone
            if name == "latency":
                alone = _to_the_tail(alone, served(results, TAIL))
            if (alone["status"] == "ok").any():
                scale = 1e-6 if name == "memory" else 1.0
                figures[name] = _grid(
                    alone, manifest, along="candidates", label=units[name], scale=scale
                )
        rates = served(results, "requests_per_second")
        if len(rates):
            together = rates.loc[rates["requests"] > 1, "candidates"]
            rates = rates[rates["candidates"].isin(together)]
        if (rates["status"] == "ok").any():
            asked = style.counted(int(rates["candidates"].iloc[0]), "candidate")
            figures["rate"] = _grid(
                rates, manifest, along="requests", label="requests a second", note=f"{asked} each"
            )
        return style.save_all(figures, TITLES, manifest, out)


def _to_the_tail(table: pd.DataFrame, tails: pd.DataFrame) -> pd.DataFrame:
    """With bars that reach from the median to the 99th percentile."""
    keys = ["workload", "model", "provider"]
    of = {tuple(row[key] for key in keys): row["value"] for row in tails.to_dict("records")}
    rows = table.to_dict("records")
    reach = [of.get(tuple(row[key] for key in keys), math.nan) for row in rows]
    return table.assign(q25=table["value"], q75=reach)


def _grid(
    table: pd.DataFrame,
    manifest: Mapping[str, Any],
    *,
    along: str,
    label: str,
    scale: float = 1.0,
    note: str = "",
) -> Figure:
    """A row a model, a column a history cap, a line a provider."""
    more_is_better = along == "requests"
    models = style.ordered(list(table["model"].unique()))
    caps = sorted(int(cap) for cap in table["cap"].unique())
    order = sorted(int(number) for number in table[along].unique())
    figure, axes = style.new_figure(
        len(models), len(caps), height=_BESIDE + _ROW * len(models), sharex=True, sharey="row"
    )
    handles: dict[str, Any] = {}
    for model, row in zip(models, axes, strict=True):
        of_model = table[table["model"] == model]
        for cap, panel in zip(caps, row, strict=True):
            mine = of_model[of_model["cap"] == cap]
            handles |= panels.lines_panel(
                panel, mine, column=along, order=order, scale=scale, more_is_better=more_is_better
            )
            panel.set_title(f"{style.look_of(model).label}\nhistories to {cap:,}")
        shown = of_model[of_model["status"] == "ok"]
        values = [*(scale * shown["value"]), *(scale * shown["q75"])]
        panels.padded_limits(row[0], values, more_is_better=more_is_better)
        row[0].set_ylabel(label)
    for panel in axes[-1]:
        panel.set_xlabel(_CANDIDATES if along == "candidates" else _TOGETHER)
    style.legend(figure, handles)
    facts = table.iloc[0]
    about = f"lognormal lengths; from a cache with at most {facts['new_events']} new events"
    style.finish(figure, manifest, note=", ".join(filter(None, (note, about))))
    return figure
