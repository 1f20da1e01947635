"""Tables of served requests for reading: everybody, beside the goals that ours is held to."""

import pandas as pd

from jagged_ranking.figures import style
from jagged_ranking.figures.points import value_or_why
from jagged_ranking.figures.serving_points import SCORING, TAIL, cells, served, value
from jagged_ranking.figures.throughput_points import GRAPH
from jagged_ranking.figures.verdicts import number

# metric, what it is called, what its values are divided by, and what stands behind each.
_SHOWN = (
    ("latency", "Latency of requests, p50 / p99, ms", 1.0, TAIL),
    ("requests_per_second", "Requests a second", 1.0, ""),
    ("device_time", "Time of the device for requests, ms", 1.0, ""),
    ("peak_memory_minus_inputs", "Peak memory of requests beyond weights and inputs, MB", 1e6, ""),
)


def serving_tables(results: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(what it is, table): a row a model and kind of requests, a column a way to answer them."""
    found = []
    for metric, title, size, behind in _SHOWN:
        columns = [
            (kind, mode)
            for mode in (SCORING, GRAPH)
            for kind in style.ordered(list(served(results, metric, mode)["provider"].unique()))
        ]
        found_by = {mode: cells(results, metric, mode) for mode in (SCORING, GRAPH)}
        tails = {mode: cells(results, behind, mode) if behind else {} for mode in (SCORING, GRAPH)}
        rows = []
        for cell, mine in found_by[SCORING].items():
            facts = next(iter(mine.values()))
            row = {
                "model": style.look_of(facts["model"]).label,
                "requests": f"{facts['requests']:,}",
                "candidates": f"{facts['candidates']:,}",
                "history cap": f"{facts['cap']:,}",
            }
            for kind, mode in columns:
                second = value(tails[mode].get(cell), kind) if behind else None
                label = style.look_of(kind).label + (f", {mode}" if mode == GRAPH else "")
                row[label] = _cell(found_by[mode].get(cell, {}).get(kind), size, second)
            rows.append(row)
        if rows:
            found.append((title, pd.DataFrame(rows)))
    return found


def _cell(row: dict | None, size: float, second: float | None) -> str:
    if row is None:
        return ""
    behind = "" if second is None or row["status"] != "ok" else f" / {number(second)}"
    return value_or_why(row, size) + behind
