"""From results rows of HSTU's attention to what figures and tables show."""

import pandas as pd

from jagged_ranking.figures.points import attention
from jagged_ranking.measure.lineup import HSTU_OPS, OURS
from jagged_ranking.results import select, with_config

NOTEBOOK = "07_hstu"
# What is beside the mask that all have.
WITH = dict(zip(HSTU_OPS, ("", "targets", "biases", "targets and biases"), strict=True))
# Those that the kernels of HSTU's authors have.
WITHOUT_BIASES = HSTU_OPS[:2]
NOT_ASKED = (
    "*Error*: the peer fails there, or breaks the device; one that has done the latter on three "
    "batches is *not tried* in that mode again."
)
# What this project set itself: how many times faster than the kernels of HSTU's authors, on these
# workloads and in the sweep from so much padding waste on.
FASTER_GOAL, FASTER_ON, FASTER_FROM = 1.3, ("B", "C", "D"), 0.85


def hstu(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows of HSTU's attention and one metric, facts of the batch as columns. A `workload` is a
    batch under one kind of attention; `batch` is its name alone."""
    table = attention(results, metric, op=list(HSTU_OPS))
    return table.assign(batch=table["workload"], workload=_names(table["workload"], table["op"]))


def hstu_schedule_ms(results: pd.DataFrame) -> dict[str, float]:
    """workload (as in `hstu`) -> median ms to build our schedule, where it was measured."""
    rows = select(results, op="schedule", provider=OURS, metric="latency", status="ok")
    rows = with_config(rows, "targets", "biased")
    rows = rows[rows["biased"].notna()]
    kinds = zip(rows["targets"], rows["biased"], strict=True)
    ops = [HSTU_OPS[(targets > 0) + 2 * biased] for targets, biased in kinds]
    names = _names(rows["workload"], pd.Series(ops, index=rows.index, dtype=object))
    return dict(zip(names, rows["value"], strict=True))


def _names(batches: pd.Series, ops: pd.Series) -> list[str]:
    return [
        f"{batch}, {WITH[op]}" if WITH[op] else str(batch)
        for batch, op in zip(batches, ops, strict=True)
    ]
