"""Where we stand against the goals, from committed results: the tables of docs/performance.md."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from jagged_ranking import provenance
from jagged_ranking.figures import style
from jagged_ranking.figures.cached_goals import (
    DECODE_NOTE,
    PREFIX_NOTE,
    SCORING_NOTE,
    decode_rows,
    prefix_rows,
    scoring_rows,
)
from jagged_ranking.figures.choice_goals import CHOICE, choice_rows
from jagged_ranking.figures.choice_goals import NOTE as CHOICE_NOTE
from jagged_ranking.figures.exactness_goals import EXACTNESS, exactness_rows
from jagged_ranking.figures.exactness_goals import NOTE as EXACTNESS_NOTE
from jagged_ranking.figures.fp8_goals import (
    FP8_PAYS,
    FP8_QUALITY,
    PAYS_NOTE,
    QUALITY_NOTE,
    fp8_quality_rows,
    fp8_speed_rows,
)
from jagged_ranking.figures.hstu_goals import NOTE as HSTU_NOTE
from jagged_ranking.figures.hstu_goals import hstu_rows
from jagged_ranking.figures.hstu_points import NOTEBOOK as HSTU_NOTEBOOK
from jagged_ranking.figures.memory import BEYOND
from jagged_ranking.figures.operation_goals import NOTE, interaction_rows
from jagged_ranking.figures.operation_points import NOTEBOOK
from jagged_ranking.figures.points import (
    Pair,
    against_best,
    attention,
    limits_of,
    of_group,
    ours_failed,
    schedule_ms,
)
from jagged_ranking.figures.result_folder import Results, runs_of
from jagged_ranking.figures.scaling_goals import NOTE as SCALING_NOTE
from jagged_ranking.figures.scaling_goals import scaling_rows
from jagged_ranking.figures.scaling_points import NOTEBOOK as SCALING_NOTEBOOK
from jagged_ranking.figures.serving_goals import NOTE as SERVING_NOTE
from jagged_ranking.figures.serving_goals import serving_rows
from jagged_ranking.figures.serving_points import NOTEBOOK as SERVING
from jagged_ranking.figures.sparse_goals import (
    DENSITY_NOTE,
    LENGTH_NOTE,
    RETRIEVAL_NOTE,
    density_rows,
    length_rows,
    retrieval_rows,
)
from jagged_ranking.figures.sparse_points import NOTEBOOK as SPARSE_NOTEBOOK
from jagged_ranking.figures.streaming_goals import NOTE as STREAMING_NOTE
from jagged_ranking.figures.streaming_goals import streaming_rows
from jagged_ranking.figures.tables import number, to_markdown
from jagged_ranking.figures.throughput_goals import NOTE as THROUGHPUT_NOTE
from jagged_ranking.figures.throughput_goals import throughput_rows
from jagged_ranking.figures.throughput_points import NOTEBOOK as THROUGHPUT
from jagged_ranking.figures.verdicts import NOT_MEASURED, both, bound, met
from jagged_ranking.measure.cached.cached_ops import NOTEBOOK as CACHED
from jagged_ranking.measure.lineup import OURS, default_providers

# What this project set itself on an H100: our time over that of the best peer in the same run,
# (must, aim) for each workload. Derived from the times of all peers on one H100 (bf16, torch 2.11,
# Triton 3.6) and from what a first plain Triton forward reached there; of N, K, L and W, and aims
# below what was reached, when that was measured.
SPEED_GOALS: dict[str, dict[str, tuple[float, float]]] = {
    "forward": {
        "A": (0.60, 0.47),
        "B": (0.50, 0.38),
        "C": (0.95, 0.80),
        "D": (1.05, 0.85),
        "E": (0.40, 0.28),
        "F": (1.10, 1.00),
        "G": (1.15, 1.00),
        "N": (0.85, math.nan),
        "K": (0.80, math.nan),
        "L": (0.90, math.nan),
        "W": (0.80, math.nan),
    },
    "forward+backward": {
        "A": (0.80, 0.60),
        "B": (0.75, 0.50),
        "C": (1.00, 0.85),
        "D": (1.10, 0.95),
        "E": (0.70, 0.33),
        "F": (1.15, 1.00),
        "G": (1.20, 1.00),
        "N": (0.95, math.nan),
        "K": (0.90, math.nan),
        "L": (0.95, math.nan),
        "W": (0.90, math.nan),
    },
}
# Of the host, for one call whose schedule is given; by the wall, eagerly, ours over the best peer.
HOST_GOALS_MS = {"forward": 0.06, "forward+backward": 0.30}
WALL_GOAL = 1.0
# Peak memory beyond the inputs, ours over the best peer's, on every workload.
MEMORY_GOAL = 1.0
# Target attention, forward: time over the limit where the limit is above 0.1 ms; FA2's time over
# ours on the skewed small batches; slowest over fastest spread of the same number of events.
LIMIT_GOAL, LIMIT_COUNTS_FROM_MS = 1.6, 0.1
FASTER_GOAL, FASTER_ON, FASTER_THAN = 4.0, ("T1", "T2", "T4"), "varlen_attn"
SKEW_GOAL = 1.15


def _said(run: Results) -> str:
    """Device, commit, whether the tests were green there, and what the run was without."""
    manifest = run.manifest
    tests = (manifest.get("tests") or {}).get("outcome", "unknown")
    smoke = ", a smoke run" if manifest.get("preset") == "smoke" else ""
    said = f"*{style.footer(manifest)} · tests of these kernels: {tests}{smoke}*"
    for change in provenance.changes_of_preset(manifest):
        said += f" · `{change}`"
    if absent := absent_peers(run.table, str(manifest.get("device_type"))):
        said += f" · **without {', '.join(absent)}**"
    return said


def goal_tables(figures_dir: Path | str) -> str:
    """Markdown: self-attention, target attention and memory against their goals, of each device
    that they were measured on (`runs_of`)."""
    parts = []
    for title, name, note, rows_of in _TABLES:
        parts += [f"### {title}", note]
        measured = [(run, rows_of(run.table)) for run in runs_of(figures_dir, name)]
        for run, rows in measured:
            if rows:
                parts += [_said(run), to_markdown(pd.DataFrame(rows).fillna(""))]
        if not any(rows for _, rows in measured):
            parts.append(f"{NOT_MEASURED[0].upper()}{NOT_MEASURED[1:]}.")
    return "\n\n".join(parts)


def _speed_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    built = schedule_ms(table)
    named = of_group(attention(table, "latency"), "workloads")
    rows = []
    for row in against_best(named):
        must, aim = _speed_goal(row.workload, row.mode)
        rows.append(
            {
                "workload": row.workload,
                "mode": row.mode,
                "ours (ms)": number(row.ours),
                "schedule (ms)": number(built.get(row.workload, math.nan)),
                "best peer": style.look_of(row.peer).label,
                "its ms": number(row.best),
                "ours / best": f"{row.ratio:.2f}",
                "must": bound(must),
                "aim": bound(aim),
                "met": met(row.ratio, must, aim),
            }
        )
    for (workload, mode), why in ours_failed(named).items():
        must, aim = _speed_goal(workload, mode)
        goal = {"must": bound(must), "aim": bound(aim), "met": met(math.nan, must)}
        rows.append({"workload": workload, "mode": mode, "ours (ms)": why, **goal})
    return rows + _goals_not_measured(rows)


def _speed_goal(workload: str, mode: str) -> tuple[float, float]:
    """(must, aim), NaN where there is none."""
    return SPEED_GOALS[mode].get(workload, (math.nan, math.nan))


def _open(table: pd.DataFrame, ours: str) -> list[dict[str, str]]:
    """A row for each call that ours ran out of memory on or failed, whose goal nobody has seen met;
    `ours` is the column that says so."""
    return [
        {"workload": workload, "mode": mode, ours: why, "met": NOT_MEASURED}
        for (workload, mode), why in ours_failed(table).items()
    ]


def _against(row: Pair) -> dict[str, str]:
    """Ours and the best peer's, in ms."""
    return {
        "workload": row.workload,
        "mode": row.mode,
        "ours (ms)": number(row.ours),
        "best peer": style.look_of(row.peer).label,
        "its ms": number(row.best),
        "ours / best": f"{row.ratio:.2f}",
    }


def _host_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    named = of_group(attention(table, "host_time"), "workloads")
    rows = [
        {
            **_against(row),
            "at most (ms)": bound(HOST_GOALS_MS[row.mode]),
            # Judged as it is shown, in three significant digits.
            "met": met(float(number(row.ours)), HOST_GOALS_MS[row.mode], digits=4),
        }
        for row in against_best(named)
    ]
    return rows + _open(named, "ours (ms)")


def _wall_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """Of an eager loop of calls, which is as fast as the slower of device and host."""
    device, host = (
        of_group(attention(table, metric), "workloads") for metric in ("latency", "host_time")
    )
    call = ["provider", "workload", "mode"]
    wall = device.merge(host[[*call, "value"]], on=call, suffixes=("", " of host"))
    wall["value"] = wall[["value", "value of host"]].max(axis=1)
    rows = [
        {
            **_against(row),
            "at most": bound(WALL_GOAL),
            "met": met(row.ratio, WALL_GOAL),
        }
        for row in against_best(wall)
    ]
    return rows + (_open(device, "ours (ms)") if len(host) else [])


def absent_peers(table: pd.DataFrame, device: str) -> list[str]:
    """Labels of those that were not there: whose rows all say so, and who is compared on the named
    workloads wherever it is installed, and was not."""
    rows = table.groupby("provider")["status"]
    names = [str(name) for name, said in rows if (said == "missing").all()]
    shown = [of_group(attention(table, metric), "workloads") for metric in ("latency", BEYOND)]
    if len(tried := pd.concat(shown)):
        there = set(tried.loc[tried["status"] != "missing", "provider"])
        names += [name for name in default_providers(device) if name not in there]
    return [style.look_of(name).label for name in style.ordered(names)]


def _memory_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    named = of_group(attention(table, BEYOND), "workloads")
    # Nobody is judged against who was not there.
    all_there = not (named["status"] == "missing").any()
    rows = [
        {
            "workload": row.workload,
            "mode": row.mode,
            "ours (MB)": number(row.ours / 1e6),
            "best peer": style.look_of(row.peer).label,
            "its MB": number(row.best / 1e6),
            "ours / best": f"{row.ratio:.3f}",
            "must": bound(MEMORY_GOAL),
            "met": met(row.ratio, MEMORY_GOAL, digits=3).replace(
                "yes", "yes" if all_there else "yes, of those here"
            ),
        }
        for row in against_best(named)
    ]
    return rows + _open(named, "ours (MB)")


def _target_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    named = of_group(attention(table, "latency"), "target")
    rows = []
    for row in against_best(named, peer=FASTER_THAN):
        over = row.ours / row.limit
        most, least = _target_goals(row.workload, row.mode, row.limit)
        faster = row.best / row.ours
        rows.append(
            {
                "workload": row.workload,
                "mode": row.mode,
                "ours (ms)": number(row.ours),
                "limit (ms)": number(row.limit),
                "ours / limit": f"{over:.2f}",
                "at most": bound(most),
                "varlen_attn (ms)": number(row.best),
                "times faster": f"{faster:.2f}" if math.isfinite(faster) else NOT_MEASURED,
                "at least": bound(least),
                "met": both(met(over, most), met(-faster, -least)),
            }
        )
    limits = limits_of(named)
    for (workload, mode), why in ours_failed(named).items():
        most, least = _target_goals(workload, mode, float(limits[workload, mode]))
        goals = {"at most": bound(most), "at least": bound(least)}
        judged = {"met": NOT_MEASURED if any(goals.values()) else ""}
        rows.append({"workload": workload, "mode": mode, "ours (ms)": why, **goals, **judged})
    return rows


def _target_goals(workload: str, mode: str, limit_ms: float) -> tuple[float, float]:
    """At most so many times the limit, at least so many times faster; NaN where there is none."""
    forward = mode == "forward"
    most = LIMIT_GOAL if forward and limit_ms > LIMIT_COUNTS_FROM_MS else math.nan
    return most, FASTER_GOAL if forward and workload in FASTER_ON else math.nan


def _skew_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    skewed = of_group(attention(table, "latency"), "skew")
    good = skewed[skewed["status"] == "ok"]
    spreads = list(dict.fromkeys(skewed["distribution"]))
    rows = []
    for (mode, users), mine in good.groupby(["mode", "B"], sort=False):
        for name in style.ordered(list(mine["provider"].unique())):
            own = mine[mine["provider"] == name].set_index("distribution")["value"]
            # of some of the spreads it would say less than it seems to
            ratio = float(own.max() / own.min()) if len(own) == len(spreads) > 1 else math.nan
            goal = SKEW_GOAL if name == OURS else math.nan
            rows.append(
                {
                    "mode": str(mode),
                    "users": str(users),
                    "provider": style.look_of(name).label,
                    **{f"{skew} (ms)": number(own.get(skew, math.nan)) for skew in spreads},
                    "slowest / fastest": number(ratio, 2),
                    "at most": bound(goal),
                    "met": met(ratio, goal),
                }
            )
    return rows


_TABLES: Sequence[tuple[str, str, str, Callable[[pd.DataFrame], list[dict[str, str]]]]] = (
    (
        "Self-attention: time against the best peer",
        "01_speed",
        "Medians of one interleaved run; of the device alone where the host is timed apart (the "
        "next table). *Schedule* is built once a batch, shared by layers and directions, and not "
        "part of *ours*. Real histories have no goal. K has a head_dim of 96, L histories of up to "
        "8,192, W one user of 16,384 among 512 short ones.",
        _speed_rows,
    ),
    (
        "Self-attention: how long a call keeps the host",
        "01_speed",
        "From the call to its return, on a device with nothing else to do; a model whose layers "
        "take the device less than this is limited by its host. It varies with the machine.",
        _host_rows,
    ),
    (
        "Self-attention: eager calls by the wall",
        "01_speed",
        "One call after another, with a schedule. Not timed apart: such a loop is as fast as the "
        "slower of device and host, so it is the longer of what the two tables above have, of each "
        "who ran.",
        _wall_rows,
    ),
    (
        "Self-attention: peak memory against the best peer",
        "02_memory",
        "Beyond the inputs.",
        _memory_rows,
    ),
    (
        "Target attention: time against the limit and FA2",
        "03_target_attention",
        "The limit reads K, V and Q and writes the output once (with the backward: also dO, and "
        f"dQ, dK, dV). Goals are for the forward: {LIMIT_GOAL:g}x of a limit above "
        f"{LIMIT_COUNTS_FROM_MS:g} ms; {FASTER_GOAL:g}x faster than FA2 on "
        f"{', '.join(FASTER_ON)}.",
        _target_rows,
    ),
    (
        "Target attention: the same events, spread ever more unequally",
        "03_target_attention",
        f"The goal for ours is {SKEW_GOAL:g}; the policies beside it are what its rule picks from.",
        _skew_rows,
    ),
    (
        "Attention: the pick against the fastest that could take a call",
        CHOICE,
        CHOICE_NOTE,
        choice_rows,
    ),
    ("Attention: errors on random batches", EXACTNESS, EXACTNESS_NOTE, exactness_rows),
    ("Attention in FP8: time and error", FP8_PAYS, PAYS_NOTE, fp8_speed_rows),
    ("Attention in FP8: what a trained ranker loses", FP8_QUALITY, QUALITY_NOTE, fp8_quality_rows),
    ("Interaction operations: time against the limit and peers", NOTEBOOK, NOTE, interaction_rows),
    ("Cached histories: time against the limit and peers", CACHED, DECODE_NOTE, decode_rows),
    ("Events that were attended to: time against all scores", CACHED, SCORING_NOTE, scoring_rows),
    ("A prefix that users share: time and memory", CACHED, PREFIX_NOTE, prefix_rows),
    ("S2-Attention: time by length", SPARSE_NOTEBOOK, LENGTH_NOTE, length_rows),
    ("Blocks of keys: time by density", SPARSE_NOTEBOOK, DENSITY_NOTE, density_rows),
    ("Retrieval: time of building lists", SPARSE_NOTEBOOK, RETRIEVAL_NOTE, retrieval_rows),
    ("HSTU's attention: time against its authors' kernels", HSTU_NOTEBOOK, HSTU_NOTE, hstu_rows),
    ("Whole training steps: time and memory", THROUGHPUT, THROUGHPUT_NOTE, throughput_rows),
    ("Training from disk: memory and waiting", THROUGHPUT, STREAMING_NOTE, streaming_rows),
    ("Served requests: latency and memory", SERVING, SERVING_NOTE, serving_rows),
    ("Training on several GPUs: scaling efficiency", SCALING_NOTEBOOK, SCALING_NOTE, scaling_rows),
)


def _goals_not_measured(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """A row for each goal of speed whose workload is not among the rows."""
    there = {(row["workload"], row["mode"]) for row in rows}
    return [
        {
            "workload": name,
            "mode": mode,
            "must": bound(must),
            "aim": bound(aim),
            "met": NOT_MEASURED,
        }
        for mode, by_workload in SPEED_GOALS.items()
        for name, (must, aim) in by_workload.items()
        if rows and (name, mode) not in there
    ]
