"""Served requests against the goals, and what a cache of histories saves."""

import math
from collections.abc import Collection
from typing import Any

import pandas as pd

from jagged_ranking.figures import style
from jagged_ranking.figures.points import value_or_why
from jagged_ranking.figures.serving_points import (
    CACHED,
    NOT_MORE,
    NOT_SLOWER,
    PEER,
    TAIL,
    Cells,
    cells,
    value,
)
from jagged_ranking.figures.throughput_points import GRAPH
from jagged_ranking.figures.verdicts import NOT_MEASURED, at_least, both, bound, met, number
from jagged_ranking.measure.lineup import OURS

NOTE = (
    "What a caller waits for a batch of requests, ids on the device to logits on the host, over "
    "histories of lognormal lengths up to the cap: median and 99th percentile by the wall. Goals: "
    f"nowhere slower than padded flash attention (SDPA) in the same model, {NOT_SLOWER:g}x, one "
    "request alone, which is of equal length to itself, and many; and nowhere more of its memory "
    "beyond weights and inputs. *Saves*: times that encoding the whole history takes what a cache "
    "takes, by the wall and of the device; *by graph*: captured in CUDA graphs, one for each of a "
    "few sizes. No goal was set for either. HSTU has no softmax, and so no flash "
    "attention to be held against."
)


def serving_overview(table: pd.DataFrame) -> list[dict[str, str]]:
    """The rows of as many candidates as those requests have that are answered together."""
    facts = [next(iter(mine.values())) for mine in cells(table, "latency").values()]
    together = {one["candidates"] for one in facts if one["requests"] > 1}
    return serving_rows(table, candidates=together or None)


def serving_rows(
    table: pd.DataFrame, *, candidates: Collection[int] | None = None
) -> list[dict[str, str]]:
    """A row for each kind of requests and model, with the goals that hold there; of requests of so
    many candidates alone, if it is given."""
    waited, tails = cells(table, "latency"), cells(table, TAIL)
    device, memory = cells(table, "device_time"), cells(table, "peak_memory_minus_inputs")
    held = cells(table, "cache_memory")
    replayed, their_tails = (cells(table, metric, GRAPH) for metric in ("latency", TAIL))
    rows, failed = [], []
    for cell, mine in waited.items():
        ours = value(mine)
        if OURS not in mine:
            continue
        facts, peer = mine[OURS], mine.get(PEER, {}).get("status", "")
        if candidates is not None and facts["candidates"] not in candidates:
            continue
        if math.isnan(ours):
            if peer == "ok":  # a goal that nobody has seen met
                failed.append(
                    {
                        **_asked(facts),
                        "ours, p50 / p99 (ms)": _shown(mine, OURS),
                        "padded flash, p50 (ms)": _shown(mine, PEER),
                        "at least": bound(NOT_SLOWER),
                        "met": NOT_MEASURED,
                    }
                )
            continue
        judged = peer in ("ok", "out_of_memory")
        faster = math.inf if peer == "out_of_memory" else value(mine, PEER) / ours
        heavy = _share(memory.get(cell))
        least, most = (NOT_SLOWER, NOT_MORE) if judged else (math.nan, math.nan)
        if math.isnan(value(memory.get(cell))):
            most = math.nan
        rows.append(
            {
                **_asked(facts),
                "ours, p50 / p99 (ms)": f"{number(ours)} / {number(value(tails.get(cell)))}",
                "padded flash, p50 (ms)": _shown(mine, PEER),
                "times faster": _said(faster),
                "at least": bound(least),
                "memory / padded flash's": _said(heavy),
                "at most": bound(most),
                "by graph, p50 / p99 (ms)": _with_tail(replayed, their_tails, cell, OURS),
                "padded flash by graph, p50 (ms)": _shown(replayed.get(cell), PEER),
                "times faster by graph": _said(
                    value(replayed.get(cell), PEER) / value(replayed.get(cell))
                ),
                "cached, p50 / p99 (ms)": _with_tail(waited, tails, cell, CACHED),
                "saves (wall)": _said(ours / value(mine, CACHED)),
                "saves (device)": _saved(device.get(cell)),
                "MB of a user in the cache": _bytes(held.get(cell)),
                "met": both(at_least(faster, least), met(heavy, most)),
            }
        )
    return rows + failed if rows else []


def _asked(facts: dict[str, Any]) -> dict[str, str]:
    return {
        "model": style.look_of(facts["model"]).label,
        "requests x candidates": f"{facts['requests']:,} x {facts['candidates']:,}",
        "history cap": f"{facts['cap']:,}",
    }


def _share(rows: dict[str, dict[str, Any]] | None) -> float:
    """Ours as a share of the peer's memory; none of it where that ran out of memory."""
    if (rows or {}).get(PEER, {}).get("status") == "out_of_memory":
        return 0.0
    return value(rows) / value(rows, PEER)


def _with_tail(medians: Cells, tails: Cells, cell: tuple[str, str], provider: str) -> str:
    said, tail = _shown(medians.get(cell), provider), value(tails.get(cell), provider)
    return said if math.isnan(tail) else f"{said} / {number(tail)}"


def _shown(rows: dict[str, dict[str, Any]] | None, provider: str) -> str:
    return value_or_why((rows or {}).get(provider))


def _saved(rows: dict[str, dict[str, Any]] | None) -> str:
    return _said(value(rows) / value(rows, CACHED))


def _bytes(rows: dict[str, dict[str, Any]] | None) -> str:
    held = value(rows, CACHED)
    return "" if math.isnan(held) else number(held / 1e6)


def _said(ratio: float) -> str:
    return "" if math.isnan(ratio) or math.isinf(ratio) or ratio == 0 else f"{ratio:.2f}"
