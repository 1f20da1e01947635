"""From results rows of whole training steps to what figures and tables show."""

import math
from collections.abc import Sequence

import pandas as pd

from jagged_ranking.figures.points import FAILED
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.results import select, with_config

NOTEBOOK = "10_training_throughput"
# The ops of its rows: steps, and the parts of a step.
STEP, PART = "throughput", "throughput_part"
# The parts of a step, in its order; `BACKWARD` is all of it but that of attention.
PARTS = (DATA, EMBEDDINGS, ATTENTION, ENCODER, HEAD, ATTENTION_BACKWARD, BACKWARD, UPDATE) = (
    "batch", "embeddings", "attention", "encoder, the rest", "head and loss",
    "attention, backward", "backward", "optimiser",
)  # fmt: skip
EAGER, COMPILED, GRAPH = MODES = ("eager", "torch.compile", "CUDA graph")
# Who is compared with: what pads, by the fastest kernels there are for that.
PEER = "padded_flash"
# What this project set itself against that: so many times faster from so much padding waste on, and
# nowhere slower; there at most this share of its memory; and of a step less than this share waiting
# for the host.
FASTER_FROM, FASTER_GOAL, NOT_SLOWER = 0.85, 1.5, 1.0
MEMORY_GOAL, HOST_GOAL = 0.5, 0.1
# arXiv 2409.15373, abstract, of production models: 10% more queries a second, 18% less memory.
PAPER_FASTER, PAPER_MEMORY = 1.10, 1 - 0.18
CELL = ["workload", "model", "layers", "mode"]
_FACTS = ("model", "layers", "cap", "group", "waste", "B", "tokens", "device")


def steps(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows of steps and one metric, facts of model and batch as columns, in the order of
    measurement."""
    return with_config(select(results, op=STEP, metric=metric), *_FACTS)


def parts(results: pd.DataFrame) -> pd.DataFrame:
    """Rows of the parts of steps, likewise; the metric is the part."""
    return with_config(select(results, op=PART), *_FACTS)


def relative(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """`steps` with the column `ours`, what ours has in the same cell (`CELL`): NaN without."""
    table = steps(results, metric)
    own = table[(table["provider"] == OURS) & (table["status"] == "ok")]
    ours = {_cell(row): row["value"] for row in own.to_dict("records")}
    return table.assign(ours=[ours.get(_cell(row), math.nan) for row in table.to_dict("records")])


def against_peer(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A row a cell where ours has a number, with columns `ours`, `peer` (NaN without) and
    `peer_status` ("" where the peer did not take part)."""
    own = _beside_peer(results, metric, ["ok"])
    return own.assign(ours=own["value"])


def ours_failed(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A row a cell where ours ran out of memory or was wrong and the peer has a number (`peer`)."""
    own = _beside_peer(results, metric, FAILED)
    return select(own, peer_status="ok")


def _beside_peer(results: pd.DataFrame, metric: str, status: Sequence[str]) -> pd.DataFrame:
    """A row a cell where ours has one of these, with `peer` and `peer_status` as `against_peer`."""
    table = steps(results, metric)
    own = select(table, provider=OURS, status=status)
    theirs = {_cell(row): row for row in select(table, provider=PEER).to_dict("records")}
    found = [theirs.get(_cell(row), {}) for row in own.to_dict("records")]
    return own.assign(
        peer=[float(row.get("value", math.nan)) for row in found],
        peer_status=[str(row.get("status", "")) for row in found],
    )


def _cell(row: dict) -> tuple:
    return tuple(row[name] for name in CELL)
