"""Training on several ranks against the goal for its scaling efficiency."""

import math

import pandas as pd

from jagged_ranking.figures import style
from jagged_ranking.figures.scaling_points import (
    BY_TOKENS,
    EFFICIENCY_GOAL,
    GOAL_RANKS,
    PARTS,
    efficiency,
    measured,
)
from jagged_ranking.figures.verdicts import NOT_MEASURED, at_least, bound, number

NOTE = (
    "Requests grow with the ranks. *Efficiency* is samples a second over as many times those of "
    f"one rank; the goal is {EFFICIENCY_GOAL:.0%} at {GOAL_RANKS}, balanced by tokens. "
    "*Imbalance* is the fullest rank's share over the mean. The parts of a step are means over "
    "ranks in ms; who waits, waits for the slowest rank."
)


def scaling_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each number of ranks and each way to balance."""
    found = efficiency(table)
    if found.empty:
        return []
    facts = measured(table, "throughput", "imbalance", "peak_memory", *PARTS)
    rows = []
    for point in found.to_dict("records"):
        key = (facts["ranks"] == point["ranks"]) & (facts["provider"] == point["provider"])
        of = dict(zip(facts.loc[key, "metric"], facts.loc[key, "value"], strict=True))
        judged = point["ranks"] == GOAL_RANKS and point["provider"] == BY_TOKENS
        least = EFFICIENCY_GOAL if judged else math.nan
        rows.append(
            {
                "ranks": f"{point['ranks']:g}",
                "batches": style.look_of(point["provider"]).label,
                "samples / s": number(of["throughput"]),
                "efficiency": number(point["value"], 2),
                "at least": bound(least),
                "met": at_least(point["value"], least),
                "imbalance": number(of.get("imbalance", math.nan), 2),
                **{f"{part} (ms)": number(of.get(part, math.nan)) for part in PARTS},
                "memory (GB)": number(of.get("peak_memory", math.nan) / 1e9),
            }
        )
    if not any(row["at least"] for row in rows):
        label = style.look_of(BY_TOKENS).label
        goal = {"ranks": f"{GOAL_RANKS}", "batches": label, "at least": bound(EFFICIENCY_GOAL)}
        rows.append({**goal, "met": NOT_MEASURED})
    return rows
