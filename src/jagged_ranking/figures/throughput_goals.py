"""Whole training steps against the goals: faster than with padded flash attention, in less memory,
and without waiting for the host."""

import math
from typing import Any

import pandas as pd

from jagged_ranking.devices import CPU
from jagged_ranking.figures import style
from jagged_ranking.figures.points import SHORT
from jagged_ranking.figures.throughput_points import (
    CELL,
    FASTER_FROM,
    FASTER_GOAL,
    HOST_GOAL,
    MEMORY_GOAL,
    MODES,
    NOT_SLOWER,
    PAPER_FASTER,
    PAPER_MEMORY,
    against_peer,
    ours_failed,
    steps,
)
from jagged_ranking.figures.verdicts import NOT_MEASURED, at_least, both, bound, met, number
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.results import select

NOTE = (
    "A step of training, the making of its batch included, by the wall; against padded flash "
    "attention (SDPA) in the same model, all else of which is jagged. Goals: "
    f"{FASTER_GOAL:g}x from {FASTER_FROM:.0%} padding waste on, with at most {MEMORY_GOAL:g} of "
    f"its peak memory (weights and optimiser included), and nowhere below {NOT_SLOWER:g}x; less "
    f"than {HOST_GOAL:.0%} of a step waiting for the host. HSTU has no softmax, and so no flash "
    "attention to be held against. In CUDA graphs, who pads pads to the longest history of all "
    "batches that a graph is to take. Memory is of eager steps."
)


def throughput_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each batch, model, number of layers and mode, with the goals that hold there."""
    memory, energy = (_by_cell(against_peer(table, of)) for of in ("peak_memory", "energy"))
    shares = _by_cell(select(steps(table, "host_share"), provider=OURS))
    rows = []
    for row in against_peer(table, "samples_per_second").to_dict("records"):
        cell = tuple(row[name] for name in CELL)
        wasteful = _wasteful(row["waste"])
        fits = row["peer_status"] in ("ok", "out_of_memory")
        faster = _times(row["ours"], row)
        least = _least(wasteful) if fits else math.nan
        weighed = memory.get(cell, {})
        heavy = _share(weighed)
        most = MEMORY_GOAL if wasteful and fits and weighed else math.nan
        share = shares.get(cell, {})
        host = float(share.get("value", math.nan))
        goal = HOST_GOAL if share.get("status") == "ok" else math.nan
        rows.append(
            {
                **_batch(row),
                "ours (samples/s)": number(row["ours"]),
                "padded flash (samples/s)": _peer(row),
                "times faster": _said(faster),
                "at least": bound(least),
                "memory / padded flash's": _said(heavy),
                "at most": bound(most),
                "J a sample / padded flash's": _said(_share(energy.get(cell, {}))),
                "host's share": "" if math.isnan(host) else f"{host:.1%}",
                "below": "" if math.isnan(goal) else f"{goal:.0%}",
                "met": both(both(at_least(faster, least), met(heavy, most)), _below(host, goal)),
            }
        )
    failed = [
        {
            **_batch(row),
            "ours (samples/s)": SHORT[row["status"]],
            "padded flash (samples/s)": number(row["peer"]),
            "at least": bound(_least(_wasteful(row["waste"]))),
            "met": NOT_MEASURED,
        }
        for row in ours_failed(table, "samples_per_second").to_dict("records")
    ]
    return rows + failed if rows else []


def _batch(row: dict) -> dict[str, str]:
    return {
        "batch": row["workload"],
        "waste": f"{row['waste']:.0%}",
        "model": style.look_of(row["model"]).label,
        "layers": str(row["layers"]),
        "mode": row["mode"],
    }


def throughput_overview(table: pd.DataFrame) -> pd.DataFrame:
    """`throughput_rows` in short, a row for batches of much and of little waste in each mode: the
    least and the most that ours gains over padded flash attention, and where; and what gains less
    than the goal."""
    rates, memory = (against_peer(table, of) for of in ("samples_per_second", "peak_memory"))
    shares = select(steps(table, "host_share"), provider=OURS, status="ok")
    rows = []
    for wasteful in (True, False):
        for mode in MODES:
            mine, heavy, waits = (
                of.loc[(of["mode"] == mode) & (of["waste"].map(_wasteful) == wasteful), :]
                for of in (rates, memory, shares)
            )
            tried = mine[mine["peer_status"].isin(["ok", "out_of_memory"])]
            if tried.empty:
                continue
            fits = select(tried, peer_status="ok")
            gain = fits["ours"] / fits["peer"]
            faster = _ends(fits, gain, "{:.2f}")
            if none := len(tried) - len(fits):
                faster += f"; padded flash out of memory on {none} of {len(tried)}"
            heavy = select(heavy, peer_status="ok")
            goal = _least(wasteful)
            wastes = f"{tried['waste'].min():.0%}", f"{tried['waste'].max():.0%}"
            rows.append(
                {
                    "padding waste": " to ".join(dict.fromkeys(wastes)),
                    "mode": mode,
                    "times faster": faster,
                    "goal": f"{goal:g}x",
                    "missed": _missed(fits.loc[gain.round(2) < goal, :], len(tried)),
                    "memory / padded flash's": _ends(
                        heavy, heavy["ours"] / heavy["peer"], "{:.2f}"
                    ),
                    "host's share": _ends(waits, waits["value"], "{:.0%}"),
                }
            )
    return pd.DataFrame(rows)


def _wasteful(waste: float) -> bool:
    return round(waste, 2) >= FASTER_FROM


def _least(wasteful: bool) -> float:
    """How many times faster ours is to be."""
    return FASTER_GOAL if wasteful else NOT_SLOWER


def _missed(table: pd.DataFrame, tried: int) -> str:
    """How many rows these are of those tried, and of which models."""
    models = (style.of_layers(row["model"], row["layers"]) for row in table.to_dict("records"))
    named = ", ".join(dict.fromkeys(models))
    return f"{len(table)} of {tried}" + (f": {named}" if named else "")


def _ends(table: pd.DataFrame, numbers: pd.Series, form: str) -> str:
    """The least and the largest of the rows' numbers, each with its batch and model."""
    if table.empty:
        return ""
    ends = [numbers.idxmin(), numbers.idxmax()][: numbers.nunique()]
    return " to ".join(
        f"{form.format(numbers[at])} ({row['workload']}, "
        f"{style.of_layers(row['model'], row['layers'])})"
        for at, row in zip(ends, table.loc[ends].to_dict("records"), strict=True)
    )


def paper_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """The paper's claims of production models, held against steps of ours: a row for more samples a
    second in each mode, and one for less memory."""
    rows = []
    for metric, claim, paper, bar in (
        ("samples_per_second", "more samples a second in training", "+10%", PAPER_FASTER),
        ("peak_memory", "less memory in training", "-18%", 1 / PAPER_MEMORY),
    ):
        for mode in MODES:
            found = select(against_peer(table, metric), mode=mode, peer_status="ok")
            if found.empty:
                continue
            of_rate = metric == "samples_per_second"
            gain = found["ours"] / found["peer"] if of_rate else found["peer"] / found["ours"]
            found = found.assign(gain=gain, change=(gain if of_rate else 1 / gain) - 1)
            reached = int((found["gain"] >= bar).sum())
            holds = "no" if not reached else "yes" if reached > len(found) / 2 else "in part"
            on_cpu = found["device"].astype(str).str.startswith(CPU).any()
            ends = (found.loc[found["gain"].idxmax()], found.loc[found["gain"].idxmin()])
            rows.append(
                {
                    "claim": f"{claim} than with padded flash attention",
                    "paper": paper,
                    "mode": mode,
                    "this run": ", ".join(map(_where, ends)),
                    "holds": "n/a: not on a GPU" if on_cpu else holds,
                    "where": f"{paper} or better on {reached} of {len(found)} batches and models",
                    "device": ", ".join(dict.fromkeys(map(str, found["device"]))),
                }
            )
    return rows


def _where(row: Any) -> str:
    model = style.look_of(row["model"]).label
    return f"{row['change']:+.0%} at {row['waste']:.0%} waste ({row['workload']}, {model})"


def _by_cell(table: pd.DataFrame) -> dict[tuple, dict]:
    return {tuple(row[name] for name in CELL): row for row in table.to_dict("records")}


def _times(ours: float, row: dict) -> float:
    """How many times ours a peer takes; without end where it ran out of memory."""
    return math.inf if row["peer_status"] == "out_of_memory" else ours / row["peer"]


def _share(row: dict) -> float:
    """Ours as a share of the peer's; none of it where that ran out of memory."""
    if not row:
        return math.nan
    return 0.0 if row["peer_status"] == "out_of_memory" else row["ours"] / row["peer"]


def _peer(row: dict) -> str:
    return number(row["peer"]) if row["peer_status"] == "ok" else SHORT.get(row["peer_status"], "")


def _said(ratio: float) -> str:
    return "" if math.isnan(ratio) or math.isinf(ratio) or ratio == 0 else f"{ratio:.2f}"


def _below(share: float, goal: float) -> str:
    """Judged as it is shown, in tenths of a percent."""
    if math.isnan(goal):
        return ""
    return NOT_MEASURED if math.isnan(share) else "yes" if round(share, 3) < goal else "**no**"
