"""What attention in FP8 gives when it serves, and what a trained ranker loses by it."""

import math
from typing import Any

import pandas as pd

from jagged_ranking import results
from jagged_ranking.figures.verdicts import at_least, bound, number

# The ids and the ops of what `fp8_pays.py` and `fp8_quality.py` in tests/support measure.
FP8_PAYS, FP8_QUALITY = "fp8_pays", "fp8_quality"
# Who takes turns.
BF16, KERNEL, KEPT, WHOLE = "bf16", "fp8", "fp8, queries rounded", "fp8, all rounded"
# By workload, of the call that serves: over keys that are kept.
GOALS = {"G": 1.4}
PAYS_NOTE = (
    "Our forward in bfloat16 over ours in FP8 (e4m3), both with a schedule: the kernel alone; the "
    "call over keys and values that are kept in FP8, which rounds its queries; and with keys and "
    "values rounded in each call. Errors are of the longest user's result against float64 "
    "attention of the numbers as they came, relative to it (root of mean squares), of standard "
    "normal numbers. Goal: the call over kept keys at least "
    f"{' and '.join(f'{goal:g}x on {name}' for name, goal in GOALS.items())}."
)
QUALITY_NOTE = (
    "One trained ranker scored by the same weights, with attention in float32, of numbers rounded "
    "to bfloat16, and in FP8; difference to float32, with the 95% interval of a bootstrap over "
    "users. No goal: what it costs is for whoever serves to weigh."
)
NUMBERS = ("bfloat16", "fp8")
METRICS = ("auc", "log_loss")


def fp8_speed_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each workload."""
    found = results.select(table, op=FP8_PAYS, status="ok")
    return [_speed_row(str(name), one) for name, one in found.groupby("workload", sort=False)]


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
        "kernel": f"{gained[KERNEL]:.2f}x",
        "over kept keys": f"{gained[KEPT]:.2f}x",
        "all rounded": f"{gained[WHOLE]:.2f}x",
        "error, bf16": number(errors[BF16]),
        "error, FP8": number(errors[KERNEL]),
        "at least": bound(goal),
        "met": at_least(gained[KEPT], goal),
    }


def fp8_quality_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each data set, training and way to round."""
    found = results.select(table, op=FP8_QUALITY, status="ok")
    found = results.with_config(found, "model", "seed", "low", "high")
    return [
        _quality_row(workload, model, seed, numbers, rows)
        for (workload, model, seed), of_training in found.groupby(
            ["workload", "model", "seed"], sort=False
        )
        for numbers in NUMBERS
        if len(rows := of_training[of_training["provider"] == numbers])
    ]


def _quality_row(
    workload: Any, model: Any, seed: Any, numbers: str, rows: pd.DataFrame
) -> dict[str, str]:
    by_metric = rows.set_index("metric")
    shown = {"data": str(workload), "model": str(model), "seed": f"{seed}", "numbers": numbers}
    for metric in METRICS:
        if metric not in by_metric.index:
            continue
        shown[metric] = f"{by_metric.loc[metric, 'value']:.4f}"
        lost = by_metric.loc[f"{metric}_difference"]
        shown[f"{metric}, difference"] = (
            f"{lost['value']:+.5f} ({lost['low']:+.5f} to {lost['high']:+.5f})"
        )
    return shown
