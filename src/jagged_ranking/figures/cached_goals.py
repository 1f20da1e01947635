"""Cached and shared keys against their goals, and tables of them for people."""

import math

import pandas as pd

from jagged_ranking.figures import style
from jagged_ranking.figures.cached_points import (
    PERSISTENCE,
    against,
    by_compression,
    cached,
    times_of,
)
from jagged_ranking.figures.memory import BEYOND
from jagged_ranking.figures.points import value_or_why
from jagged_ranking.figures.quality import NAMES
from jagged_ranking.figures.verdicts import NOT_MEASURED, both, bound, difference, met, number
from jagged_ranking.measure.cached.cached_ops import (
    APPEND,
    DECODE,
    KEEP,
    PREFIX,
    SCHEDULE,
    SCORING,
)
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.results import select

# Of `cached_attention` over the limit of the device where that is above so many ms; how many times
# faster than on all scores at once `key_statistics` is.
LIMIT_GOAL, LIMIT_COUNTS_FROM_MS = 1.6, 0.1
SCORING_GOAL = 3.0
DECODE_NOTE = (
    "New events of each user ask all that the cache has of it; the schedule is made once a step, "
    "for all layers, and not part of *ours*. The limit reads the cached keys and values and the "
    f"queries and writes the output once. The goal: {LIMIT_GOAL:g}x of a limit above "
    f"{LIMIT_COUNTS_FROM_MS:g} ms."
)
SCORING_NOTE = (
    "In how many of a user's last queries a key had less than its share. The goal: the same "
    f"counters as from all scores at once, {SCORING_GOAL:g}x faster. A probability that is as near "
    "to its share as arithmetic is exact may count either way, so counters may be off by 1. "
    "*scissorhands* then chooses the events to keep and writes their lists."
)
_EQUAL = 1  # how far off equal counters may be
PREFIX_NOTE = (
    "The prefix that all users share once, against `jagged_cat` of it in front of every user at "
    "each call. Memory is beyond the inputs."
)


def decode_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """Queries of a cache against the limit and the best peer."""
    built = times_of(table, SCHEDULE)
    rows = []
    for row in against(cached(table, DECODE, "latency")).to_dict("records"):
        limit, ours = float(row["limit_ms"]), float(row["value"])
        most = LIMIT_GOAL if limit > LIMIT_COUNTS_FROM_MS else math.nan
        rows.append(
            {
                **_batch(row),
                "ours (ms)": value_or_why(row),
                "schedule (ms)": number(built.get(row["workload"], math.nan)),
                "limit (ms)": number(limit),
                "ours / limit": _times(ours / limit),
                "at most": bound(most),
                **_peer(row),
                "met": met(ours / limit, most),
            }
        )
    return rows


def scoring_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """Which events were attended to: against all scores at once."""
    errors = cached(table, SCORING, "max_abs_error")
    off = dict(zip(zip(errors["workload"], errors["provider"], strict=True), errors["value"],
                   strict=True))  # fmt: skip
    kept = times_of(table, KEEP)
    rows = []
    for row in against(cached(table, SCORING, "latency")).to_dict("records"):
        error = off.get((row["workload"], OURS), math.nan)
        speed = met(-row["ratio"], -SCORING_GOAL)
        rows.append(
            {
                "users": f"{row['B']:,}",
                "events of each": f"{row['max_len']:,}",
                "to be kept": f"{row['kept']:,}",
                "queries that count": f"{row['recent']:,}",
                "ours (ms)": value_or_why(row),
                **_peer(row),
                "at least": bound(SCORING_GOAL),
                "counters off by": NOT_MEASURED if math.isnan(error) else f"{math.floor(error)}",
                "met": both(speed, _equal(error)),
                "scissorhands (ms)": number(kept.get(row["workload"], math.nan)),
            }
        )
    return rows


def prefix_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A prefix once against a copy for every user: time and memory."""
    times, peaks = (against(cached(table, PREFIX, metric)) for metric in ("latency", BEYOND))
    memory = {(row["workload"], row["mode"]): row for row in peaks.to_dict("records")}
    rows = []
    for row in times.to_dict("records"):
        peak = memory.get((row["workload"], row["mode"]))
        ours, best = (math.nan, math.nan) if peak is None else (peak["value"], peak["best"])
        rows.append(
            {
                "users": f"{row['B']:,}",
                "events": f"{row['tokens']:,}",
                "prefix": f"{row['prefix']:,}",
                "mode": str(row["mode"]),
                "ours (ms)": value_or_why(row),
                "copied (ms)": number(float(row["best"])),
                "times faster": _times(row["ratio"]),
                "ours (MB)": number(ours / 1e6),
                "copied (MB)": number(best / 1e6),
                "times less": _times(best / ours),
            }
        )
    return rows


def append_table(results: pd.DataFrame) -> pd.DataFrame:
    """Growth of a cache, beside padded keys and a copy of all."""
    table = cached(results, APPEND, "latency")
    rows = []
    for _, mine in table.groupby("workload", sort=False):
        row = _batch(mine.iloc[0].to_dict())
        for provider in style.ordered(list(table["provider"].unique())):
            cell = mine[(mine["provider"] == provider) & (mine["status"] == "ok")]
            value = float(cell["value"].iloc[0]) if len(cell) else math.nan
            row[f"{style.look_of(provider).label} (ms)"] = number(value)
        rows.append(row)
    return pd.DataFrame(rows)


def compression_table(results: pd.DataFrame) -> pd.DataFrame:
    """What ranking loses by policy and compression."""
    scored = by_compression(results)
    rows = []
    for (dataset, compression), mine in scored.groupby(["workload", "compression"], sort=False):
        row = {
            "dataset": str(dataset),
            "compression": f"{float(str(compression)):g}x",
            "events kept": f"{float(mine['kept'].iloc[0]):.1f}",
            "metric": NAMES[str(mine["metric"].iloc[0])],
        }
        by_policy = {str(one["policy"]): one for one in mine.to_dict("records")}
        for policy in style.ordered(list(scored["policy"].unique())):
            row[style.look_of(policy).label] = _said(by_policy.get(policy))
        rows.append(row)
    return pd.DataFrame(rows)


def persistence_table(results: pd.DataFrame) -> pd.DataFrame:
    """Whether who is attended to later was attended to before: means over seeds."""
    rows = select(results, op=PERSISTENCE, status="ok")
    titles = {
        "persistence_ratio": "persistence ratio",
        "pivotal_kept": "of those pivotal before, pivotal later",
        "pivotal": "pivotal before, of all",
    }
    found = []
    for dataset, mine in rows.groupby("workload", sort=False):
        values = {name: select(mine, metric=name)["value"] for name in titles}
        shown = {titles[n]: number(float(of.mean()), 3) for n, of in values.items() if len(of)}
        found.append({"dataset": str(dataset), **shown})
    return pd.DataFrame(found)


def cached_tables(results: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(what it is, table) of every table of cached keys that the results allow."""
    found = [
        (f"New queries over cached histories. {DECODE_NOTE}", pd.DataFrame(decode_rows(results))),
        ("Events appended to cached histories, ms", append_table(results)),
        (f"A shared prefix. {PREFIX_NOTE}", pd.DataFrame(prefix_rows(results))),
        (f"Which events were attended to. {SCORING_NOTE}", pd.DataFrame(scoring_rows(results))),
        (
            "Histories compressed to the events that a policy keeps: what is lost, with its 95% "
            "interval over users and seeds",
            compression_table(results),
        ),
        (
            "Persistence of importance: of the first half's events that are pivotal to the second "
            "half's queries, the share that was before",
            persistence_table(results),
        ),
    ]
    return [(caption, table) for caption, table in found if len(table)]


def _batch(row: dict) -> dict[str, str]:
    return {
        "users": f"{row['B']:,}",
        "longest history": f"{row['max_len']:,}",
        "events": f"{row['tokens']:,}",
        "queries": f"{row['queries']:,}",
    }


def _equal(error: float) -> str:
    """Whether counters are the same, where that was measured."""
    return NOT_MEASURED if math.isnan(error) else "yes" if error <= _EQUAL else "**no**"


def _peer(row: dict) -> dict[str, str]:
    has = bool(row["peer"])
    return {
        "best peer": style.look_of(row["peer"]).label if has else NOT_MEASURED,
        "its ms": number(float(row["best"])),
        "times faster": _times(row["ratio"]),
    }


def _said(row: dict | None) -> str:
    if row is None:
        return ""
    if math.isnan(row["loss"]):
        return f"{row['mean']:.4f}"
    return difference(row["loss"], row["low"], row["high"])


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if math.isfinite(ratio) else ""
