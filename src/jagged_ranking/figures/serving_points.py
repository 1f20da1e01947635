"""From results rows of requests that are served to what figures and tables show."""

import math
from typing import Any

import pandas as pd

from jagged_ranking.measure.lineup import OURS
from jagged_ranking.results import select, with_config

NOTEBOOK = "11_serving"
SERVING, SCORING = "serving", "scoring"  # the op and the mode of its rows, but of CUDA graphs
TAIL = "latency_p99"
# Who has histories in a cache; all others encode them with each request.
CACHED = "jagged_cached"
# Who is compared with: what pads, by the fastest kernels there are for that.
PEER = "padded_flash"
# What this project set itself against that: nowhere slower, and nowhere more memory.
NOT_SLOWER, NOT_MORE = 1.0, 1.0
CELL = ["workload", "model"]
Cells = dict[tuple[str, str], dict[str, dict[str, Any]]]  # see `cells`
_FACTS = (
    "model", "layers", "cap", "requests", "candidates", "B", "tokens", "waste", "new_events",
    "device",
)  # fmt: skip


def served(results: pd.DataFrame, metric: str, mode: str = SCORING) -> pd.DataFrame:
    """Rows of one metric, facts of model and requests as columns, in the order of measurement."""
    return with_config(select(results, op=SERVING, metric=metric, mode=mode), *_FACTS)


def cells(results: pd.DataFrame, metric: str, mode: str = SCORING) -> Cells:
    """(workload, model) -> provider -> its row."""
    found: Cells = {}
    for row in served(results, metric, mode).to_dict("records"):
        found.setdefault((row["workload"], row["model"]), {})[row["provider"]] = row
    return found


def value(rows: dict[str, dict[str, Any]] | None, provider: str = OURS) -> float:
    """Of a cell; NaN where there is none."""
    row = (rows or {}).get(provider)
    return float(row["value"]) if row and row["status"] == "ok" else math.nan
