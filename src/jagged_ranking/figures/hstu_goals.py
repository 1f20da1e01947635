"""HSTU's attention against the goal: so many times faster than the kernels of its authors."""

import math
from collections.abc import Mapping

import pandas as pd

from jagged_ranking.figures.hstu_points import (
    FASTER_FROM,
    FASTER_GOAL,
    FASTER_ON,
    NOT_ASKED,
    WITH,
    WITHOUT_BIASES,
    hstu,
    hstu_schedule_ms,
)
from jagged_ranking.figures.points import SHORT, modes_of
from jagged_ranking.figures.tables import number
from jagged_ranking.figures.verdicts import NOT_MEASURED, bound, met
from jagged_ranking.measure.lineup import AUTHORS, OURS

MODES = ("forward", "forward+backward")
NOTE = (
    f"The goal is {FASTER_GOAL:g}x, on {', '.join(FASTER_ON)} and on lengths of "
    f"{FASTER_FROM:.0%} padding waste or more, over the Triton kernels of HSTU's authors "
    "(`generative_recommenders`; handed users longest first, which spares them a sort in each "
    "call), which have no biases. *Softmax* is our softmax attention of the same pairs; "
    f"*schedule* is as above. {NOT_ASKED}"
)


def hstu_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each batch, kind of attention without biases, and mode; and for what the goal is
    about and was not measured."""
    times = hstu(table, "latency")
    times = times[times["op"].isin(WITHOUT_BIASES)]
    built = hstu_schedule_ms(table)
    rows = []
    for (batch, op), mine in times.groupby(["batch", "op"], sort=False):
        facts = mine.iloc[0]
        wasteful = facts["group"] == "waste" and round(facts["waste"], 2) >= FASTER_FROM
        for mode in modes_of(mine):
            shown = mine[mine["mode"] == mode]
            good = shown[shown["status"] == "ok"]
            of = dict(zip(good["provider"], good["value"], strict=True))
            said = dict(zip(shown["provider"], shown["status"].map(SHORT), strict=True))
            ours = of.get(OURS, math.nan)
            theirs = of.get(AUTHORS, math.nan)
            faster = theirs / ours
            least = FASTER_GOAL if wasteful or batch in FASTER_ON else math.nan
            rows.append(
                {
                    **_where(str(batch), str(op), mode),
                    "waste": f"{facts['waste']:.0%}",
                    "ours (ms)": number(ours),
                    "limit (ms)": number(float(shown["limit_ms"].iloc[0])),
                    "schedule (ms)": number(built.get(str(facts["workload"]), math.nan)),
                    "softmax (ms)": number(of.get("jagged_softmax", math.nan)),
                    "authors' (ms)": number(theirs) if AUTHORS in of else said.get(AUTHORS, "–"),
                    "times faster": "" if math.isnan(faster) else f"{faster:.2f}",
                    "at least": bound(least),
                    "met": met(-faster, -least),
                }
            )
    there = [_key(row) for row in rows]
    wanted = [_where(b, op, mode) for b in FASTER_ON for op in WITHOUT_BIASES for mode in MODES]
    absent = [row for row in wanted if rows and _key(row) not in there]
    return rows + [{**row, "at least": bound(FASTER_GOAL), "met": NOT_MEASURED} for row in absent]


def _where(batch: str, op: str, mode: str) -> dict[str, str]:
    return {"workload": batch, "mode": mode, "with": WITH[op]}


def _key(row: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("workload", "mode", "with"))
