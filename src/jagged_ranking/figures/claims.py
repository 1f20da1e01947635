"""The claims of the paper, one row each, held against whatever was measured."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import pandas as pd

from jagged_ranking.devices import CPU
from jagged_ranking.figures import style
from jagged_ranking.figures.affordability import COSTS, judged_by, longest_caps, said_cap
from jagged_ranking.figures.memory import CLAIMS as MEMORY_CLAIMS
from jagged_ranking.figures.memory import TOTAL
from jagged_ranking.figures.panels import Claim
from jagged_ranking.figures.points import FAILED, attention, modes_of, ratios
from jagged_ranking.figures.quality import FLOORS, NAMES, differences
from jagged_ranking.figures.sparse_points import (
    PAPER_SPEEDUPS,
    PEER_OF_THE_PAPER,
    against,
    density_sweeps,
    sparse,
)
from jagged_ranking.figures.speed import CLAIMS as SPEED_CLAIMS
from jagged_ranking.figures.sweeps import BASELINES
from jagged_ranking.figures.throughput_goals import paper_rows
from jagged_ranking.figures.verdicts import difference
from jagged_ranking.measure.lineup import BY_LENGTH, OURS
from jagged_ranking.results import select

COLUMNS = ("claim", "paper", "mode", "this run", "holds", "where", "device")


@dataclass(frozen=True)
class _Wanted:
    claim: str
    paper: str
    metric: str
    baseline: str
    bound: Claim


def claims(results: pd.DataFrame) -> pd.DataFrame:
    """The paper's claim, the best we saw, whether and where it holds: strings, for people.

    "up to Nx" holds if most batches of this run reach N, and in part if some do. Claims of speed
    and memory are about GPUs: measured elsewhere, they neither hold nor fail. Ours includes
    building its schedule. A claim that the results say nothing about is not in the table.
    """
    rows: list[dict[str, str]] = []
    for name, title in BASELINES.items():
        speed, memory = SPEED_CLAIMS[name], MEMORY_CLAIMS[name]
        paper = f"up to {speed.factor:g}x"
        rows += _attention_rows(
            results, _Wanted(f"faster than {title}", paper, "latency", name, speed)
        )
        paper = f"up to {memory.factor:g}x" if memory.upper is None else "up to 53%"
        rows += _attention_rows(
            results, _Wanted(f"less memory than {title}, with inputs", paper, TOTAL, name, memory)
        )
    rows += _quality_rows(results) + _history_rows(results) + _sparse_rows(results)
    rows += paper_rows(results)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _attention_rows(results: pd.DataFrame, wanted: _Wanted) -> list[dict[str, str]]:
    table = ratios(results, wanted.metric, wanted.baseline)
    ours = select(attention(results, wanted.metric), provider=OURS, status=FAILED)
    rows = []
    for mode, mine in table.groupby("mode", sort=False):
        failed = list(ours.loc[ours["mode"] == mode, "workload"])
        known = mine[mine["ratio"].notna()]
        lost = mine[mine["baseline_status"] == "out_of_memory"]
        if known.empty and lost.empty:
            continue
        rows.append(
            {
                "claim": wanted.claim,
                "paper": wanted.paper,
                "mode": str(mode),
                "this run": _range(known),
                "holds": _on_a_gpu(mine, _holds(known, wanted.bound, len(failed))),
                "where": _where(known, lost, wanted.bound, failed),
                "device": _device(mine),
            }
        )
    return rows


def _range(known: pd.DataFrame) -> str:
    if known.empty:
        return ""
    best = known.loc[known["ratio"].idxmax()]
    least = known.loc[known["ratio"].idxmin()]
    return (
        f"{_times(best['ratio'])} at {best['waste']:.0%} waste ({best['workload']}), "
        f"{_times(least['ratio'])} at {least['waste']:.0%} ({least['workload']})"
    )


def _holds(known: pd.DataFrame, claim: Claim, failed: int) -> str:
    """`failed`: batches on which ours has no number, which reach nothing."""
    if known.empty:
        return "not measured"
    reached = known["ratio"] >= claim.factor
    if reached.sum() <= 0.5 * (len(known) + failed):
        return "in part" if reached.any() else "no"
    if claim.upper is not None and known["ratio"].max() < claim.upper:
        return f"yes, if it means {claim.factor:.3g}x"
    return "yes"


def _where(known: pd.DataFrame, lost: pd.DataFrame, claim: Claim, failed: list[str]) -> str:
    factor, said = f"{claim.factor:g}x", []
    reached = known[known["ratio"] >= claim.factor]
    if len(known):
        said.append(f"{factor} or more on {len(reached) or 'none'} of {len(known)} batches")
    if len(reached):
        failing = known[known["ratio"] < claim.factor]["waste"]
        above = reached["waste"]
        if len(failing):  # in whole percent, as all waste is said
            above = above[above.round(2) > round(failing.max(), 2)]
        if len(above):
            said.append(f"on all with {above.min():.0%} waste or more")
        named = reached[reached["group"] == "workloads"]["workload"]
        if len(named):
            said.append(f"of the named ones {', '.join(named)}")
    if len(lost):
        said.append(f"the dense one runs out of memory on {', '.join(lost['workload'])}")
    if failed:
        said.append(f"ours fails on {', '.join(failed)}")
    return "; ".join(said)


def _quality_rows(results: pd.DataFrame) -> list[dict[str, str]]:
    """Not a claim of the paper, but what its layers are for: attention beats mean-pooling.

    By users, or, where there are lists of candidates, by lists: scores of what was trained on
    lists cannot be compared from one to another.
    """
    gains = differences(results)
    judged = {name: judged_by(set(of)) for name, of in gains.groupby("workload")["metric"]}
    gains = gains[gains["metric"] == gains["workload"].map(judged)]
    # those of users first
    gains = gains.sort_values("metric", kind="stable")
    rows = []
    for provider, mine in gains[~gains["provider"].isin(FLOORS)].groupby("provider", sort=False):
        said, found = [], []
        for row in mine.itertuples():
            said.append(f"{difference(row.value, row.low, row.high)} ({row.workload})")
            found.append({1: "yes", -1: "no", 0: "undecided"}[int(str(row.side))])
        kinds = dict.fromkeys(f"test {NAMES[str(metric)]}" for metric in mine["metric"])
        rows.append(
            {
                "claim": f"{provider} ranks better than mean_pool (ours, not the paper's)",
                "paper": "",
                "mode": ", ".join(kinds),
                "this run": "; ".join(said),
                "holds": _of_all(found),
                "where": _where_yes(mine["workload"], found),
                "device": _device(mine),
            }
        )
    return rows


def _of_all(found: list[str]) -> str:
    """What data sets say together, each "yes", "no" or "undecided"."""
    if len(set(found)) == 1:
        return found[0]
    return "in part" if "yes" in found else "undecided"


def _where_yes(datasets: Iterable[str], found: list[str]) -> str:
    return ", ".join(name for name, one in zip(datasets, found, strict=True) if one == "yes")


def _history_rows(results: pd.DataFrame) -> list[dict[str, str]]:
    """What the paper is for, without a number of it: longer histories at the same cost."""
    found = longest_caps(results)
    rows = []
    for kind, model, metric in (
        dict.fromkeys(zip(found["attention"], found["model"], found["metric"], strict=True))
        if len(found)
        else ()
    ):
        mine = select(found, model=model, metric=metric, status="ok")
        pairs = select(mine, attention=OURS).merge(
            select(mine, attention=kind), on="workload", suffixes=("", "_theirs")
        )
        # where all of the history is within reach, the budget is no bound
        pairs = pairs[~pairs["whole_theirs"].astype(bool)]
        if kind == OURS or pairs.empty:
            continue
        said, holds = [], []
        for row in pairs.to_dict("records"):
            theirs = {name: row[f"{name}_theirs"] for name in ("status", "cap", "whole")}
            said.append(f"{said_cap(row)} against {said_cap(theirs)} ({row['workload']})")
            holds.append("yes" if row["cap"] > theirs["cap"] else "no")
        label = style.look_of(kind).label
        rows.append(
            {
                "claim": f"{model} affords longer histories than with {label}",
                "paper": "",
                "mode": f"same {COSTS[metric]}",
                "this run": "; ".join(said),
                "holds": _on_a_gpu(pairs, _of_all(holds)),
                "where": _where_yes(pairs["workload"], holds),
                "device": _device(pairs),
            }
        )
    return rows


def _sparse_rows(results: pd.DataFrame) -> list[dict[str, str]]:
    """What the papers of attention to some of the keys claim."""
    table = sparse(results, "latency")
    points = table[table["group"] == BY_LENGTH]
    times = against(points, PEER_OF_THE_PAPER)
    length = dict(zip(points["workload"], points["max_len"], strict=True))
    paper = [f"{speedup:g}x" for speedup in PAPER_SPEEDUPS]
    rows = []
    for mode in modes_of(points):
        found = {int(length[name]): ratio for (name, of), ratio in times.items() if of == mode}
        if not found:
            continue
        reached = [ratio >= PAPER_SPEEDUPS[0] for ratio in found.values()]
        holds = "yes" if max(found.values()) >= PAPER_SPEEDUPS[1] else "in part"
        said = [f"{_times(ratio)} at {tokens:,} tokens" for tokens, ratio in sorted(found.items())]
        above = [f"{tokens:,}" for tokens, ratio in found.items() if ratio >= PAPER_SPEEDUPS[0]]
        rows.append(
            {
                "claim": "S2-Attention is faster than FlashAttention-2 (arXiv 2407.17678)",
                "paper": f"{', '.join(paper)} (three models)",
                "mode": mode,
                "this run": f"{said[-1]}, {said[0]}",
                "holds": _on_a_gpu(points, holds if any(reached) else "no"),
                "where": f"{paper[0]} or more at {', '.join(above)} tokens" if above else "",
                "device": _device(points),
            }
        )
    for sweep in density_sweeps(results):
        if math.isnan(sweep.r2):
            continue
        ends = f"{sweep.relative[0]:.2f} of it at {sweep.density[0]:.1%}"
        rows.append(
            {
                "claim": "time falls in proportion to the blocks (arXiv 2205.14135, section 3.3)",
                "paper": "in proportion",
                "mode": sweep.mode,
                "this run": f"{ends}; intercept {sweep.intercept:.1%}, R² {sweep.r2:.3f}",
                "holds": _on_a_gpu(table, "yes" if sweep.in_proportion else "no"),
                "where": sweep.title,
                "device": _device(table),
            }
        )
    return rows


def _on_a_gpu(table: pd.DataFrame, holds: str) -> str:
    return holds if _on_gpu(table) else "n/a: not on a GPU"


def _device(table: pd.DataFrame) -> str:
    return ", ".join(dict.fromkeys(str(name) for name in table["device"] if name))


def _on_gpu(table: pd.DataFrame) -> bool:
    return not table["device"].astype(str).str.startswith(CPU).any()


def _times(ratio: float) -> str:
    return f"{ratio:.2g}x" if ratio < 10 else f"{ratio:.0f}x"
