"""Rows of the goals of attention, from a few numbers that are easy to reckon with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from left_results import save_run
from made_up_results import MANIFEST

from jagged_ranking import results
from jagged_ranking.figures import goals, headline_tables, style
from jagged_ranking.figures.points import against_best, attention, ratios

SPEED, HOST = "Self-attention: time against the best peer", "Self-attention: how long a call"
WALL, MEMORY = "Self-attention: eager calls by the wall", "Self-attention: peak memory"
TARGET, SKEW = "Target attention: time against", "Target attention: the same events"
BOTH = ("forward", "forward+backward")


def row(provider: str, workload: str, value: float | str, **more: Any) -> dict[str, Any]:
    """Of a call; a word instead of a value is the status of who has none."""
    mode = more.pop("mode", "forward")
    metric, op = more.pop("metric", "latency"), more.pop("op", "attention")
    config = {"group": "workloads", "limit_ms": 0.2, "tokens": 10, "waste": 0.5, "B": 2, "H": 1}
    config |= {"D": 64, "max_len": 8, "distribution": "lognormal", "device": MANIFEST["device"]}
    got: dict[str, Any] = {"status": value} if isinstance(value, str) else {"value": value}
    if isinstance(value, str) and value != "out_of_memory":
        got["message"] = "why"
    return results.row(
        op=op, provider=provider, workload=workload, mode=mode, metric=metric, unit="ms",
        config={**config, **more}, **got,
    )  # fmt: skip


def said(
    folder: Path,
    rows: Sequence[dict[str, Any]],
    title: str,
    name: str = "01_speed",
    **manifest: Any,
) -> list[dict[str, str]]:
    """The rows of the table below a heading, by its columns."""
    save_run(folder / name, results.frame(list(rows)), {**MANIFEST, "id": name, **manifest})
    section = goals.goal_tables(folder).split(f"### {title}", 1)[1].split("###")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], one, strict=True)) for one in cells[2:]]


def only(rows: list[dict[str, str]], workload: str, mode: str = "forward") -> dict[str, str]:
    (found,) = [one for one in rows if (one["workload"], one["mode"]) == (workload, mode)]
    return found


def test_each_mode_has_goals_of_its_own(tmp_path: Path) -> None:
    """On B 0.50 and 0.38 forward, 0.75 and 0.50 with the backward."""
    table = [
        row(who, "B", value, mode=mode)
        for mode in BOTH
        for who, value in (("jagged", 1.0), ("flex", 2.0))
    ]
    table.append(row("jagged", "B", 0.031, op="schedule"))
    rows = said(tmp_path, table, SPEED)
    assert [only(rows, "B", mode)["ours / best"] for mode in BOTH] == ["0.50", "0.50"]
    assert [only(rows, "B", mode)["must"] for mode in BOTH] == ["0.50", "0.75"]
    # What is as fast as a goal asks for meets it.
    assert [only(rows, "B", mode)["met"] for mode in BOTH] == ["must", "aim"]
    assert [only(rows, "B", mode)["schedule (ms)"] for mode in BOTH] == ["0.0310", "0.0310"]


def test_a_goal_is_open_in_the_mode_that_was_not_measured(tmp_path: Path) -> None:
    table = [row("jagged", "B", 1.0), row("flex", "B", 2.0)]
    rows = said(tmp_path, table, SPEED)
    assert only(rows, "B", "forward")["met"] == "must"
    assert only(rows, "B", "forward+backward")["met"] == "not measured"
    assert only(rows, "B", "forward+backward")["must"] == "0.75"


def test_what_ours_failed_on_is_no_row_less(tmp_path: Path) -> None:
    """Neither where there is a goal, nor where there is none."""
    table = [row("flex", name, 2.0) for name in ("A", "B", "real")]
    table += [row("jagged", "A", 1.0), row("jagged", "B", "error")]
    table += [row("jagged", "real", "out_of_memory"), row("jagged", "other", "unsupported")]
    rows = said(tmp_path, table, SPEED)
    assert "other" not in {one["workload"] for one in rows}  # nor one that nobody tried
    failed = only(rows, "B")
    assert (failed["ours (ms)"], failed["must"], failed["aim"]) == ("error", "0.50", "0.38")
    assert failed["met"] == "not measured"
    real = only(rows, "real")
    assert (real["ours (ms)"], real["must"], real["met"]) == ("OOM", "", "")


@pytest.mark.parametrize(
    ("title", "name", "metric", "column"),
    [
        (HOST, "01_speed", "host_time", "ours (ms)"),
        (MEMORY, "02_memory", "peak_memory_minus_inputs", "ours (MB)"),
    ],
)
def test_goals_of_host_and_memory_stay_open_where_ours_failed(
    tmp_path: Path, title: str, name: str, metric: str, column: str
) -> None:
    table = [row("flex", workload, 2.0, metric=metric) for workload in "AB"]
    table += [row("jagged", "A", 1.0, metric=metric), row("jagged", "B", "error", metric=metric)]
    failed = only(said(tmp_path, table, title, name), "B")
    assert (failed[column], failed["met"]) == ("error", "not measured")


@pytest.mark.parametrize(
    ("mode", "ms", "shown", "verdict"),
    [
        ("forward", 0.06, "0.0600", "yes"),
        ("forward", 0.06004, "0.0600", "yes"),
        ("forward", 0.0604, "0.0604", "**no**"),
        ("forward", 0.064, "0.0640", "**no**"),
        ("forward+backward", 0.3004, "0.300", "yes"),
        ("forward+backward", 0.301, "0.301", "**no**"),
    ],
)
def test_the_host_is_judged_as_it_is_shown(
    tmp_path: Path, mode: str, ms: float, shown: str, verdict: str
) -> None:
    more = {"metric": "host_time", "mode": mode}
    table = [row("jagged", "A", ms, **more), row("flex", "A", 1.0, **more)]
    found = only(said(tmp_path, table, HOST), "A", mode)
    assert (found["ours (ms)"], found["met"]) == (shown, verdict)


def test_by_the_wall_ours_is_the_slower_of_its_two(tmp_path: Path) -> None:
    table = [row("jagged", "A", 1.0), row("flex", "A", 2.0)]
    table += [
        row("jagged", "A", 3.0, metric="host_time"),
        row("flex", "A", 1.0, metric="host_time"),
    ]
    found = only(said(tmp_path, table, WALL), "A")
    assert (found["ours (ms)"], found["its ms"], found["ours / best"]) == ("3.00", "2.00", "1.50")
    table.append(row("jagged", "B", "error"))
    failed = only(said(tmp_path, table, WALL), "B")
    assert (failed["ours (ms)"], failed["met"]) == ("error", "not measured")


def test_ours_under_a_policy_is_no_peer(tmp_path: Path) -> None:
    table = [row("jagged", "A", 2.0), row("jagged_split", "A", 1.0), row("flex", "A", 4.0)]
    found = only(said(tmp_path, table, SPEED), "A")
    assert (found["best peer"], found["ours / best"]) == ("FlexAttention", "0.50")


def test_a_limit_is_of_its_mode() -> None:
    table = [
        row(who, "A", value, mode=mode, limit_ms=limit)
        for mode, limit in zip(BOTH, (1.0, 3.0), strict=True)
        for who, value in (("jagged", 6.0), ("flex", 6.0))
    ]
    pairs = against_best(attention(results.frame(table), "latency"))
    assert [(pair.mode, pair.limit) for pair in pairs] == [("forward", 1.0), (BOTH[1], 3.0)]


def test_a_schedule_takes_time_and_no_memory() -> None:
    table = [row("jagged", "A", 0.5, op="schedule")]
    for metric in ("latency", "peak_memory"):
        table += [row("jagged", "A", 1.5, metric=metric), row("flex", "A", 6.0, metric=metric)]
    found = results.frame(table)
    assert ratios(found, "latency", "flex")["ratio"].tolist() == [3.0]
    assert ratios(found, "peak_memory", "flex")["ratio"].tolist() == [4.0]


def test_quartiles_of_a_ratio_are_the_worst_and_the_best_of_both() -> None:
    table = results.frame([row("jagged", "A", 2.0), row("flex", "A", 6.0)])
    table[["q25", "q75"]] = [[1.0, 4.0], [4.0, 8.0]]
    schedule = results.frame([row("jagged", "A", 1.0, op="schedule")])
    (found,) = ratios(table, "latency", "flex").to_dict("records")
    assert (found["ratio_low"], found["ratio"], found["ratio_high"]) == (1.0, 3.0, 8.0)
    (found,) = ratios(pd.concat([table, schedule]), "latency", "flex").to_dict("records")
    assert (found["ratio_low"], found["ratio"], found["ratio_high"]) == (0.8, 2.0, 4.0)


def target(who: str, workload: str, value: float | str, **more: Any) -> dict[str, Any]:
    return row(who, workload, value, **{"group": "target", "queries": 8, **more})


def test_few_queries_have_goals_in_the_forward_alone(tmp_path: Path) -> None:
    table = [
        target(who, "T1", value, mode=mode)
        for mode in BOTH
        for who, value in (("jagged", 0.32), ("varlen_attn", 1.28))
    ]
    rows = said(tmp_path, table, TARGET, "03_target_attention")
    forward, backward = (only(rows, "T1", mode) for mode in BOTH)
    goal = ("ours / limit", "at most", "times faster", "at least", "met")
    assert [forward[name] for name in goal] == ["1.60", "1.60", "4.00", "4.00", "yes"]
    assert [backward[name] for name in goal] == ["1.60", "", "4.00", "", ""]


def test_goals_of_few_queries_stay_open_where_ours_failed(tmp_path: Path) -> None:
    table = [target("varlen_attn", name, 2.0) for name in ("T1", "T5", "T6")]
    table += [target("jagged", "T1", "out_of_memory"), target("jagged", "T6", 0.1)]
    table.append(target("jagged", "T5", "error", limit_ms=0.1))
    rows = said(tmp_path, table, TARGET, "03_target_attention")
    lost = only(rows, "T1")
    assert (lost["ours (ms)"], lost["at most"], lost["at least"]) == ("OOM", "1.60", "4.00")
    assert lost["met"] == "not measured"
    # On T5 nobody asks FA2, and a limit of no more than 0.1 ms does not count.
    lost = only(rows, "T5")
    assert (lost["ours (ms)"], lost["at most"], lost["at least"]) == ("error", "", "")
    assert lost["met"] == ""


def test_a_skew_is_the_slowest_spread_over_the_fastest(tmp_path: Path) -> None:
    spreads = (("constant", 1.1), ("lognormal", 1.0), ("whale", 1.2))
    table = [
        row("jagged", f"{name} 2", value, group="skew", distribution=name)
        for name, value in spreads
    ]
    (found,) = said(tmp_path, table, SKEW, "03_target_attention")
    assert (found["slowest / fastest"], found["met"]) == ("1.20", "**no**")
    assert [found[f"{name} (ms)"] for name, _ in spreads] == ["1.10", "1.00", "1.20"]


def test_whom_a_run_never_asked_is_named() -> None:
    asked = [row("jagged", "A", 1.0)]
    asked += [row(name, "A", 1.0) for name in goals.default_providers("cuda")]
    assert goals.absent_peers(results.frame(asked), "cuda") == []
    without = [one for one in asked if one["provider"] != "flex"]
    assert goals.absent_peers(results.frame(without), "cuda") == [style.look_of("flex").label]


def test_a_smoke_run_is_called_one_on_the_page_of_goals(tmp_path: Path) -> None:
    table = [row("jagged", "A", 1.0), row("flex", "A", 2.0)]
    said(tmp_path, table, SPEED, preset="smoke")
    assert "unknown, a smoke run*" in goals.goal_tables(tmp_path)
    said(tmp_path, table, SPEED)
    assert "smoke" not in goals.goal_tables(tmp_path)


def test_a_study_without_rows_of_a_table_is_not_measured(tmp_path: Path) -> None:
    """As training from disk, which is of the notebook of whole steps."""
    save_run(
        tmp_path / "01_speed",
        results.frame([row("jagged", "A", 1.0, metric="useful_flops")]),
        {**MANIFEST, "id": "01_speed"},
    )
    section = goals.goal_tables(tmp_path).split(f"### {SPEED}", 1)[1].split("###")[0]
    assert section.endswith("Not measured.\n\n")
    assert headline_tables.self_attention(results.frame([row("jagged", "A", 1.0)])).empty
