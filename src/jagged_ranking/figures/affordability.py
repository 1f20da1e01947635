"""The longest history that each kind of attention affords at a fixed time of the device and memory
of a training step.

From results alone, rows of three ops: what a training step costs over the history cap
(`STEP`, provider the kind of attention), the budgets (`BUDGET`, provider the kind whose cost at a
cap the budget is), and how well models rank over the cap (`BY_CAP`, provider the model).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from jagged_ranking.figures import style
from jagged_ranking.figures.points import SHORT
from jagged_ranking.figures.quality import NAMES
from jagged_ranking.figures.verdicts import difference
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.results import select, with_config

STEP, BUDGET, BY_CAP = "training_step", "budget", "ranking_by_cap"
# What is fixed, and how it is said.
COSTS = {"latency": "device time", "peak_memory": "peak memory"}
# What the host takes to launch a step, of which there is none where the host computes itself, and
# what the time of a device does not say.
HOST_TIME = "host_time"
HOST = (
    "Device time is what a GPU has to do. Where the host takes longer to launch a step (*host*), "
    "as it does for small models, kinds of attention differ by less by the wall, unless steps are "
    "captured in CUDA graphs (`--compile cuda_graphs`). Nested tensors ask the host for lengths "
    "within a step, and that waiting is in their time"
)
# What a data set is judged by, the first that it has.
JUDGED_BY = ("list_auc", "gauc")


def judged_by(metrics: Collection[str]) -> str | None:
    """Of the metrics that a data set has the one that it is judged by, None where there is none."""
    return next((name for name in JUDGED_BY if name in metrics), None)


@dataclass(frozen=True)
class Afforded:
    """The longest cap within a budget; 0 where not even the shortest is. `whole`: it is the
    longest history there is, so that the budget is no bound."""

    cap: float
    whole: bool = False


def afforded(caps: Sequence[int], costs: Sequence[float], budget: float, *, whole: int) -> Afforded:
    """The longest cap whose cost, and that of all shorter ones, is within the budget.

    Between measured caps the cost is taken to follow a power law: a line in logarithms.

    Args:
        caps: where the cost was measured, in any order.
        costs: there; NaN where it could not be, which is above any budget.
        budget: in the unit of the costs.
        whole: the longest history there is.
    """
    order = np.argsort(caps)
    cap, cost = (np.asarray(of, float)[order] for of in (caps, costs))
    beyond = np.flatnonzero(~(cost <= budget))
    if len(beyond) == 0:
        return Afforded(float(cap[-1]), bool(cap[-1] >= whole)) if len(cap) else Afforded(0.0)
    first = int(beyond[0])
    if first == 0:
        return Afforded(0.0)
    inside = float(cap[first - 1])
    if math.isnan(cost[first]):
        return Afforded(inside)
    share = math.log(budget / cost[first - 1]) / math.log(cost[first] / cost[first - 1])
    return Afforded(inside * float(cap[first] / inside) ** share)


def unit_of(metric: str, largest: float) -> tuple[str, float]:
    """In what a cost is said, and how much of its own unit that is: memory in GB, or in MB where
    nothing reaches a tenth of a GB."""
    if metric == "latency":
        return "ms", 1.0
    return ("GB", 1e9) if largest >= 1e8 else ("MB", 1e6)


def step_costs(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows of a cost of a training step, or of `HOST_TIME`, with columns model, cap, longest, B,
    waste, device."""
    rows = select(results, op=STEP, metric=metric)
    return with_config(rows, "model", "cap", "longest", "B", "waste", "device")


def budgets(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows of the budgets of a cost, with columns model and cap (None of a budget that was given
    as a number)."""
    return with_config(select(results, op=BUDGET, metric=metric), "model", "cap")


def by_cap(results: pd.DataFrame) -> pd.DataFrame:
    """Test scores over the cap: a row a data set, model and cap, with the mean over seeds (`mean`),
    the values of all seeds (`seeds`), and where there are any the gain over the shortest cap
    (`gain`, `low`, `high`), in the metric that the data set is judged by (`metric`)."""
    rows = select(results, op=BY_CAP, mode="test", status="ok")
    rows = with_config(rows, "cap", "longest", "low", "high")
    found = []
    for (dataset, model), mine in rows.groupby(["workload", "provider"], sort=False):
        judged = judged_by(set(mine["metric"]))
        if judged is None:
            continue
        gains = mine[mine["metric"] == f"{judged}_gain"].set_index("cap")
        for cap, scored in mine[mine["metric"] == judged].groupby("cap"):
            gain = gains.loc[cap] if cap in gains.index else None
            found.append(
                {
                    "workload": dataset,
                    "model": model,
                    "metric": judged,
                    "cap": int(cap),
                    "longest": int(scored["longest"].iloc[0]),
                    "mean": float(scored["value"].mean()),
                    "seeds": scored["value"].tolist(),
                    **{
                        name: math.nan if gain is None else float(gain[column])
                        for name, column in (("gain", "value"), ("low", "low"), ("high", "high"))
                    },
                }
            )
    columns = ("workload", "model", "metric", "cap", "longest", "mean", "seeds")
    return pd.DataFrame(found, columns=[*columns, "gain", "low", "high"])


def longest_caps(results: pd.DataFrame) -> pd.DataFrame:
    """A row a data set, model, fixed cost (`metric`) and kind of attention (`attention`): the
    budget and whose it is (`budget`, `budget_of`, `budget_cap`), the longest cap within it (`cap`,
    `whole`), the quality at the longest cap within that with which the model was trained
    (`quality_cap`, `mean`, `gain`, `low`, `high`, `judged`; NaN or "" where there is none), and the
    ms that the host takes for a step (`host`, the median over caps)."""
    quality, hosts = by_cap(results), step_costs(results, HOST_TIME)
    found = []
    for metric in COSTS:
        costs, bounds = step_costs(results, metric), budgets(results, metric)
        for _, bound in bounds.iterrows():
            mine = costs[
                (costs["workload"] == bound["workload"]) & (costs["model"] == bound["model"])
            ]
            trained = quality[
                (quality["workload"] == bound["workload"]) & (quality["model"] == bound["model"])
            ]
            for kind in style.ordered(list(mine["provider"].unique())):
                measured = mine[mine["provider"] == kind]
                reach = afforded(
                    measured["cap"].tolist(),
                    measured["value"].tolist(),
                    float(bound["value"]),
                    whole=int(measured["longest"].iloc[0]),
                )
                of_host = select(
                    hosts, workload=bound["workload"], model=bound["model"], provider=kind
                )
                inside = trained[trained["cap"] <= reach.cap].sort_values("cap")
                at = inside.iloc[-1] if len(inside) else None
                found.append(
                    {
                        "workload": bound["workload"],
                        "model": bound["model"],
                        "metric": metric,
                        "attention": kind,
                        "status": _status(measured),
                        "device": str(measured["device"].iloc[0]),
                        "budget": float(bound["value"]),
                        "budget_of": str(bound["provider"]),
                        "budget_cap": bound["cap"],
                        "cap": reach.cap,
                        "whole": reach.whole,
                        "host": float(of_host["value"].median()) if len(of_host) else math.nan,
                        "judged": "" if at is None else str(at["metric"]),
                        "quality_cap": math.nan if at is None else float(at["cap"]),
                        **{
                            name: math.nan if at is None else float(at[name])
                            for name in ("mean", "gain", "low", "high")
                        },
                    }
                )
    return pd.DataFrame(found)


def _status(measured: pd.DataFrame) -> str:
    """ "ok" where anything could be measured, else why not."""
    good = (measured["status"] == "ok").any()
    return "ok" if good else str(measured["status"].iloc[0])


def history_table(results: pd.DataFrame) -> pd.DataFrame:
    """For people: the longest cap that each kind of attention affords, and the quality there."""
    rows = []
    for row in longest_caps(results).to_dict("records"):
        rows.append(
            {
                "dataset": row["workload"],
                "model": style.look_of(row["model"]).label,
                "fixed": COSTS[row["metric"]],
                "budget": said_budget(row),
                "attention": style.look_of(row["attention"]).label,
                "longest cap": said_cap(row),
                "quality there": _said_quality(row),
                "host (ms)": _said_host(row),
            }
        )
    return pd.DataFrame(rows)


def history_overview(results: pd.DataFrame) -> pd.DataFrame:
    """`history_table` in short: kinds of attention side by side, each with its cap and the score
    there."""
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in longest_caps(results).to_dict("records"):
        fixed = f"{COSTS[row['metric']]}, {said_budget(row)}"
        model = style.look_of(row["model"]).label
        mine = found.setdefault((row["workload"], model, fixed), {"judged by": ""})
        if row["attention"] == OURS:
            mine["host, ours (ms)"] = _said_host(row)
        cap = said_cap(row)
        if row["judged"]:
            mine["judged by"] = NAMES[row["judged"]]
            cap += f": {row['mean']:.4f}"
        mine[style.look_of(row["attention"]).label] = cap
    rows = [
        {"dataset": dataset, "model": model, "fixed": fixed, **mine}
        for (dataset, model, fixed), mine in found.items()
    ]
    return pd.DataFrame(rows).fillna("")


def said_budget(row: Mapping[str, Any]) -> str:
    """The budget of a row of `longest_caps`, and whose cost it is."""
    unit, size = unit_of(row["metric"], row["budget"])
    whose = "given"
    if row["budget_cap"] is not None and not math.isnan(row["budget_cap"]):
        whose = f"{style.look_of(row['budget_of']).label} at {row['budget_cap']:.0f}"
    return f"{row['budget'] / size:.3g} {unit} ({whose})"


def said_cap(row: Mapping[str, Any]) -> str:
    """The cap of a row of `longest_caps`."""
    if row["status"] != "ok":
        return SHORT[row["status"]]
    if row["cap"] == 0:
        return "none"
    return f"all ({row['cap']:,.0f})" if row["whole"] else f"{math.floor(row['cap']):,}"


def _said_host(row: Mapping[str, Any]) -> str:
    return "" if math.isnan(row["host"]) else f"{row['host']:.3g}"


def _said_quality(row: Mapping[str, Any]) -> str:
    if not row["judged"]:
        return ""
    said = f"{NAMES[row['judged']]} {row['mean']:.4f} at {row['quality_cap']:.0f}"
    if math.isnan(row["gain"]):
        return said
    return f"{said} ({difference(row['gain'], row['low'], row['high'])})"
