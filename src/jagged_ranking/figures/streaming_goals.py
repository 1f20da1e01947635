"""Training from disk against its goals: bounded memory, and no waiting for batches."""

import math

import pandas as pd

from jagged_ranking.devices import CPU
from jagged_ranking.figures.streaming_points import (
    GOAL_EVENTS,
    GROWTH_FROM,
    GROWTH_LIMIT,
    MEMORY,
    MEMORY_LIMIT,
    WAIT_GOAL,
    by_log,
    growth,
)
from jagged_ranking.figures.verdicts import NOT_MEASURED, both, met, number

_GIB = 2**30
NOTE = (
    "Synthetic logs trained from their files, which a process maps: pages of files the system can "
    "take back, *anonymous* memory it cannot. *Memory* is the training's peak of that, an "
    "epoch's end with the judging of its validation included. Limits: "
    f"{MEMORY_LIMIT / _GIB:g} GiB up to {GOAL_EVENTS / 1e6:g} million events, and "
    f"{GROWTH_LIMIT:g} bytes for each event that a log has more than the shortest of at least "
    f"{GROWTH_FROM / 1e6:g} million. *Waits* is the share of steps in which the "
    f"device has no batch: less than {WAIT_GOAL:.0%} on a GPU; on a CPU it is the time that making "
    "batches takes."
)


def streaming_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each log, with the goals that hold there."""
    logs = by_log(table)
    rows = []
    for log, more in zip(logs, growth(logs), strict=True):
        memory, wait = log.get(MEMORY, math.nan), log.get("wait_share", math.nan)
        on_gpu = not str(log["device"]).startswith(CPU)
        bounded = log["events"] <= GOAL_EVENTS
        rows.append(
            {
                "events": f"{log['events']:,}",
                "on disk (GiB)": number((log["log_bytes"] or math.nan) / _GIB),
                "prepared in (s)": number(log.get("prepare_seconds", math.nan)),
                "with (GiB)": number(log.get("prepare_memory", math.nan) / _GIB),
                "first step after (s)": number(log.get("start_seconds", math.nan)),
                "memory (GiB)": number(memory / _GIB),
                "limit": number(MEMORY_LIMIT / _GIB) if bounded else "",
                "bytes an event more": "" if math.isnan(more) else number(more, 1),
                "at most": "" if math.isnan(more) else number(GROWTH_LIMIT),
                "samples / s": number(log.get("samples_per_second", math.nan)),
                "waits": "" if math.isnan(wait) else f"{wait:.1%}",
                "below": f"{WAIT_GOAL:.0%}" if on_gpu else "",
                "met": both(
                    both(
                        met(memory / _GIB, MEMORY_LIMIT / _GIB if bounded else math.nan),
                        "" if math.isnan(more) else met(more, GROWTH_LIMIT, digits=1),
                    ),
                    _waits_less(wait) if on_gpu else "",
                ),
            }
        )
    if rows and logs[-1]["events"] < GOAL_EVENTS:
        rows.append({"events": f"{GOAL_EVENTS:,}", "met": NOT_MEASURED})
    return rows


def _waits_less(share: float) -> str:
    """Judged as it is shown, in tenths of a percent."""
    if math.isnan(share):
        return NOT_MEASURED
    return "yes" if round(share, 3) < WAIT_GOAL else "**no**"
