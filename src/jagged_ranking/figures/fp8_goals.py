"""What attention in FP8 gives when it serves, and what a trained ranker loses by it."""

import math

import pandas as pd

from jagged_ranking import results
from jagged_ranking.figures.verdicts import NOT_MEASURED, at_least, bound, difference, number

# The ids and the ops of what `fp8_pays.py` and `fp8_quality.py` in tests/support measure.
FP8_PAYS, FP8_QUALITY = "fp8_pays", "fp8_quality"
# Who takes turns.
BF16, KERNEL, KEPT, WHOLE = "bf16", "fp8", "fp8, queries rounded", "fp8, all rounded"
# What attention was in a trained ranker, and what it is when it serves.
TRAINED, SERVED = "as trained", "fp8"
# By workload, of the call that serves: over keys that are kept.
GOALS = {"G": 1.4}
PAYS_NOTE = (
    "How many times as fast as our forward in bfloat16 ours in FP8 (e4m3) is: the kernel alone; "
    "calls over keys and values that are kept in FP8, which round the queries; and calls that "
    "round keys and values, too. "
    "All with a schedule. Errors are of the longest user's result against float64 attention of the "
    "numbers as they came, relative to it (root of mean squares), of standard normal numbers. "
    "Goal: over kept keys, "
    f"{' and '.join(f'{goal:g} times as fast on {name}' for name, goal in GOALS.items())}."
)
QUALITY_NOTE = (
    "Trained rankers scored twice by the same weights: with attention as they were trained, in "
    "bfloat16, and in FP8; the difference, with the 95% interval of a bootstrap over users. No "
    "goal: what it costs is for whoever serves to weigh."
)
METRICS = ("auc", "log_loss")


def fp8_speed_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each workload."""
    found = results.select(table, op=FP8_PAYS, status="ok")
    rows = [_speed_row(str(name), one) for name, one in found.groupby("workload", sort=False)]
    absent = [name for name in GOALS if rows and name not in set(found["workload"])]
    return rows + [
        {"workload": name, "at least": bound(GOALS[name]), "met": NOT_MEASURED} for name in absent
    ]


def _speed_row(name: str, found: pd.DataFrame) -> dict[str, str]:
    took, errors = (
        dict(zip(one["provider"], one["value"], strict=True))
        for one in (results.select(found, metric=metric) for metric in ("latency", "error"))
    )
    gained = {who: took[BF16] / took[who] for who in (KERNEL, KEPT, WHOLE)}
    goal = GOALS.get(name, math.nan)
    return {
        "workload": name,
        "bf16, ms": number(took[BF16]),
        "kernel": number(gained[KERNEL], 2),
        "kept keys": number(gained[KEPT], 2),
        "all rounded": number(gained[WHOLE], 2),
        "error, bf16": number(errors[BF16]),
        "error, FP8": number(errors[KERNEL]),
        "at least": bound(goal),
        "met": at_least(gained[KEPT], goal),
    }


def fp8_quality_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each data set and training."""
    found = results.select(table, op=FP8_QUALITY, status="ok")
    found = results.with_config(found, "model", "seed", "low", "high")
    return [
        {"data": str(data), "model": str(model), "seed": str(seed), **_lost(rows)}
        for (data, model, seed), rows in found.groupby(["workload", "model", "seed"], sort=False)
    ]


def _lost(rows: pd.DataFrame) -> dict[str, str]:
    by_metric = {who: of.set_index("metric") for who, of in rows.groupby("provider")}
    shown = {}
    for metric in METRICS:
        lost = by_metric[SERVED].loc[f"{metric}_difference"]
        shown[f"{metric}, {TRAINED}"] = f"{by_metric[TRAINED].loc[metric, 'value']:.4f}"
        shown[f"{metric}, FP8's difference"] = difference(*lost[["value", "low", "high"]], 5)
    return shown
