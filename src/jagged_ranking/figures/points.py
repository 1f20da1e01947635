"""From results rows to what figures and tables show: points of a sweep, and ratios."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from jagged_ranking.figures.verdicts import number
from jagged_ranking.measure.lineup import NOT_TRIED, OURS
from jagged_ranking.results import select, with_config

FACTS = ("group", "distribution", "waste", "max_len", "tokens", "B", "H", "D", "dtype", "queries")
# What changes along each sweep.
SWEEP_AXIS = {"waste": "waste", "length": "max_len", "head_dim": "D", "tokens": "tokens"}
EXTRA = ("limit_ms", "device", "low", "high", "seed")
# Status of who has no number -> what tables say in its place.
SHORT = {
    "out_of_memory": "OOM",
    "missing": "–",
    "unsupported": "n/a",
    "error": "error",
    "not_tried": "not tried",
}
# Of whoever took part and has no number.
FAILED = ("error", "out_of_memory")


def attention(
    results: pd.DataFrame, metric: str, *, op: str | Sequence[str] = "attention"
) -> pd.DataFrame:
    """Rows of an op (or several) and one metric, facts of the workload as columns, in the order of
    measurement. The status of an "error" that nobody ran into, since the provider had broken the
    device before, is "not_tried"."""
    rows = select(results, op=op, metric=metric)
    spared = (rows["status"] == "error") & rows["message"].str.startswith(NOT_TRIED)
    rows = rows.assign(status=rows["status"].mask(spared, "not_tried"))
    return with_config(rows, *FACTS, *EXTRA)


def modes_of(table: pd.DataFrame) -> list[str]:
    """The modes that were measured, forward first."""
    return [mode for mode in ("forward", "forward+backward") if mode in set(table["mode"])]


def dtypes_of(table: pd.DataFrame) -> list[str]:
    """The dtypes of the measured batches."""
    return sorted(set(table["dtype"].dropna())) if "dtype" in table else []


def schedule_ms(results: pd.DataFrame) -> dict[str, float]:
    """workload -> median ms to build our schedule, where it was measured."""
    rows = select(results, op="schedule", provider=OURS, metric="latency", status="ok")
    return dict(zip(rows["workload"], rows["value"], strict=True))


def ratios(results: pd.DataFrame, metric: str, baseline: str, *, ours: str = OURS) -> pd.DataFrame:
    """How many times more `baseline` needs than we do, on each workload and mode.

    Columns: those of `attention` (of our rows) and ratio, ratio_low, ratio_high, baseline_status.
    low and high come from the quartiles of both. Our latency includes building the schedule,
    once for each call. Where the baseline has no number, the ratio is NaN and baseline_status
    says why.
    """
    table = attention(results, metric)
    own = table[(table["provider"] == ours) & (table["status"] == "ok")].copy()
    if metric == "latency":
        built = schedule_ms(results)
        extra = np.array([built.get(workload, 0.0) for workload in own["workload"]], dtype=float)
        for column in ("value", "q25", "q75"):
            own[column] = own[column] + extra
    other = table[table["provider"] == baseline]
    keys = ["workload", "mode"]
    columns = [*keys, "value", "q25", "q75", "status", "message"]
    both = own.merge(other[columns], on=keys, suffixes=("", "_other"))
    both["ratio"] = both["value_other"] / both["value"]
    both["ratio_low"] = (both["q25_other"] / both["q75"]).fillna(both["ratio"])
    both["ratio_high"] = (both["q75_other"] / both["q25"]).fillna(both["ratio"])
    both["baseline_status"] = both["status_other"]
    return both.drop(columns=[c for c in both if c.endswith("_other")])


def sweep(table: pd.DataFrame, group: str) -> pd.DataFrame:
    """The rows of one sweep, ordered along its axis."""
    return of_group(table, group).sort_values(SWEEP_AXIS[group], kind="stable")


def of_group(table: pd.DataFrame, group: str) -> pd.DataFrame:
    """The rows of one group of workloads."""
    return table.loc[table["group"] == group, :]


def value_or_why(row: Mapping[str, Any] | None, size: float = 1.0) -> str:
    """The value of a row in units of `size`; of who has none, why; nothing without a row."""
    if row is None:
        return ""
    return number(row["value"] / size) if row["status"] == "ok" else SHORT[row["status"]]


def ours_of(table: pd.DataFrame) -> dict[tuple[str, str], float]:
    """(workload, mode) -> our value, where we have one."""
    own = table[(table["provider"] == OURS) & (table["status"] == "ok")]
    return dict(zip(zip(own["workload"], own["mode"], strict=True), own["value"], strict=True))


def ours_beside(table: pd.DataFrame) -> pd.Series:
    """Of each row, our value on its workload and in its mode; NaN where we have none."""
    ours, keys = ours_of(table), zip(table["workload"], table["mode"], strict=True)
    return pd.Series([ours.get(key, np.nan) for key in keys], index=table.index, dtype=float)


def limits_of(table: pd.DataFrame) -> dict[tuple[str, str], float]:
    """(workload, mode) -> the limit of the device in ms, which is the same for all providers."""
    keys = zip(table["workload"], table["mode"], strict=True)
    return dict(zip(keys, table["limit_ms"], strict=True))


def ours_failed(table: pd.DataFrame) -> dict[tuple[str, str], str]:
    """(workload, mode) -> what tables say of ours, where it ran out of memory or failed."""
    own = select(table, provider=OURS, status=[*FAILED, "not_tried"])
    return {
        (str(row["workload"]), mode): SHORT[row["status"]]
        for mode in modes_of(own)
        for row in select(own, mode=mode).to_dict("records")
    }


@dataclass(frozen=True)
class Pair:
    """Ours and a peer (its name; "" and NaN where there is none) on one workload and mode, in the
    unit of the results; limit: ms."""

    workload: str
    mode: str
    ours: float
    peer: str
    best: float
    limit: float

    @property
    def ratio(self) -> float:
        return self.ours / self.best


def against_best(table: pd.DataFrame, peer: str | None = None) -> list[Pair]:
    """Ours and the best peer (or the given one) of each workload and mode where both ran; ours
    under a policy of choice is no peer.

    Args:
        table: rows as `attention` gives them.
    """
    own = ours_of(table)
    others = table[(table["status"] == "ok") & ~table["provider"].str.startswith(OURS)]
    if peer is not None:
        others = others[others["provider"] == peer]
    limits = limits_of(table)
    pairs = []
    for mode in modes_of(table):
        for workload in dict.fromkeys(table["workload"]):
            if (workload, mode) not in own:
                continue
            mine = others[(others["workload"] == workload) & (others["mode"] == mode)]
            if mine.empty and peer is None:
                continue
            best = mine.loc[mine["value"].idxmin()] if len(mine) else None
            pairs.append(
                Pair(
                    str(workload),
                    mode,
                    own[workload, mode],
                    "" if best is None else str(best["provider"]),
                    math.nan if best is None else float(best["value"]),
                    float(limits[workload, mode]),
                )
            )
    return pairs
