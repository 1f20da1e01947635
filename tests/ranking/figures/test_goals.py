"""Goals and the pages of results, from made-up results: what is met, and what a page says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from left_results import save_run
from made_up_rankers import quality_results
from made_up_results import MANIFEST, hstu_results, sparse_results, target_results

from jagged_ranking import provenance, results
from jagged_ranking.figures import goals, headlines, redraw, style


def _save(folder: Path, table: pd.DataFrame, **manifest: Any) -> Path:
    return save_run(folder, table, {**MANIFEST, **manifest})


def _rows(block: str, title: str) -> dict[tuple[str, ...], list[str]]:
    """(workload, mode) or (mode, users, provider) -> cells of the table below a heading."""
    lines = block.split(f"### {title}", 1)[1].split("###")[0].splitlines()
    cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    key = 3 if cells[0][1] == "users" else 2
    return {tuple(row[:key]): row for row in cells[2:]}


def test_goals_are_judged_from_one_run(tmp_path: Path, measured: pd.DataFrame) -> None:
    figures = tmp_path / "figures"
    green = {"outcome": "passed"}
    _save(figures / "01_speed", measured, tests=green)
    _save(figures / "03_target_attention", target_results(), id="03_target_attention")
    block = goals.goal_tables(figures)
    assert "tests of these kernels: passed" in block
    assert "tests of these kernels: unknown" in block  # 03 says nothing
    assert "Imaginary GPU 80GB" in block
    speed_of = _rows(block, "Self-attention: time")
    # 2.2 of the limit against 3.0 is 0.73: met on C (must 0.95, aim 0.80), not on A (0.60).
    assert [speed_of["C", "forward"][i] for i in (4, 7, 8, 9)] == [
        "varlen_attn (FA2)",
        "0.95",
        "0.80",
        "aim",
    ]
    assert float(speed_of["C", "forward"][6]) == pytest.approx(0.73, abs=0.03)
    assert speed_of["A", "forward"][9] == "**no**"
    # cuDNN needs no padding there and 1.6 of the limit: 2.2 / 1.6 is above every bound.
    assert speed_of["G", "forward"][4] == "dense cuDNN (SDPA)"
    assert speed_of["G", "forward"][9] == "**no**"
    assert speed_of["N", "forward"][7:] == ["0.85", "", "yes"]
    host = _rows(block, "Self-attention: how long a call keeps the host")
    assert [float(host["C", "forward"][i]) for i in (2, 4, 5)] == [0.4, 0.5, 0.8]
    assert host["C", "forward"][6:] == ["0.06", "**no**"]
    assert "Not measured." in block.split("### Self-attention: peak memory")[1].split("###")[0]


def test_by_the_wall_counts_who_is_slower_device_or_host(
    tmp_path: Path, measured: pd.DataFrame
) -> None:
    title, call = "Self-attention: eager calls by the wall", ("C", "forward")
    run = {"workload": call[0], "mode": call[1], "op": "attention"}
    hosts = results.select(measured, **run, metric="host_time").index
    ours = results.select(measured, **run, metric="host_time", provider="jagged").index
    device = results.select(measured, **run, metric="latency", status="ok")
    fastest = device.loc[device["provider"] != "jagged", "value"].min()

    def row(host: float, our_host: float) -> list[str]:
        table = measured.copy()
        table.loc[hosts, "value"], table.loc[ours, "value"] = host, our_host
        _save(tmp_path / "01_speed", table, id="01_speed")
        return _rows(goals.goal_tables(tmp_path), title)[call]

    fast, slow = row(0.001, 0.001), row(0.001, 2 * fastest)
    assert float(fast[4]) == float(slow[4]) == pytest.approx(fastest, rel=0.01)
    assert (fast[6:], slow[5:]) == (["1.00", "yes"], ["2.00", "1.00", "**no**"])
    assert row(4 * fastest, 2 * fastest)[5:] == ["0.50", "1.00", "yes"]


def test_goals_of_target_attention(tmp_path: Path) -> None:
    figures = tmp_path / "figures"
    _save(figures / "03_target_attention", target_results(), id="03_target_attention")
    block = goals.goal_tables(figures)
    named = _rows(block, "Target attention: time")
    assert named["T1", "forward"][5] == ""  # the limit is below 0.1 ms
    assert named["T1", "forward"][8:] == ["4.00", "yes"]
    assert named["T2", "forward"][8:] == ["4.00", "yes"]
    assert float(named["T3", "forward"][4]) == pytest.approx(1.25, abs=0.02)
    assert named["T3", "forward"][5] == "1.60"
    assert named["T3", "forward"][9] == "yes"
    assert named["T3", "forward+backward"][9] == ""
    skew = _rows(block, "Target attention: the same events")
    assert skew["forward", "16", "jagged (ours)"][-3:] == ["1.00", "1.15", "yes"]
    assert skew["forward", "16", "ours, stream-K"][-1] == ""
    slow = target_results()
    whale = slow["workload"].str.startswith("whale") & (slow["provider"] == "jagged")
    t4 = (slow["workload"] == "T4") & (slow["provider"] == "jagged")
    slow.loc[whale | t4, "value"] *= 10
    results.write(slow, figures / "03_target_attention" / redraw.RESULTS)
    block = goals.goal_tables(figures)
    assert _rows(block, "Target attention: time")["T4", "forward"][-1] == "**no**"
    skew = _rows(block, "Target attention: the same events")
    assert skew["forward", "16", "jagged (ours)"][-1] == "**no**"


def test_memory_is_held_against_the_best_peer(tmp_path: Path, measured: pd.DataFrame) -> None:
    figures = tmp_path / "figures"
    more = measured.copy()
    ours = (more["provider"] == "jagged") & (more["workload"] == "B")
    more.loc[ours & (more["metric"] == "peak_memory_minus_inputs"), "value"] *= 1.004
    _save(figures / "02_memory", more, id="02_memory")
    block = goals.goal_tables(figures)
    rows = _rows(block, "Self-attention: peak memory")
    # One of the peers is not installed, and the table says so.
    assert rows["A", "forward"][5:] == ["1.000", "1.00", "yes, of those here"]
    assert rows["B", "forward"][5:] == ["1.004", "1.00", "**no**"]
    assert "flash-attn 4**" in block
    _save(figures / "02_memory", more.loc[more["status"] != "missing", :], id="02_memory")
    rows = _rows(goals.goal_tables(figures), "Self-attention: peak memory")
    assert rows["A", "forward"][5:] == ["1.000", "1.00", "yes"]


@pytest.mark.parametrize(
    ("folder", "made_up", "name"),
    [("08_sparse_attention", sparse_results, "dkernel"), ("07_hstu", hstu_results, "hstu_triton")],
)
def test_whom_a_run_was_without_is_named_of_every_study(
    tmp_path: Path, folder: str, made_up: Callable[[], pd.DataFrame], name: str
) -> None:
    table, peer = made_up(), style.look_of(name).label
    its = results.select(table, provider=name).index
    assert len(its)
    table.loc[its, ["value", "status"]] = [float("nan"), "missing"]
    _save(tmp_path / folder, table, id=folder)
    assert f"· **without {peer}**" in goals.goal_tables(tmp_path)
    # Of a few calls alone it may have been: then its rows say so.
    table.loc[its[0], ["value", "status"]] = [1.0, "ok"]
    _save(tmp_path / folder, table, id=folder)
    assert "**without" not in goals.goal_tables(tmp_path)


def test_what_a_run_set_besides_its_preset_is_said(tmp_path: Path, measured: pd.DataFrame) -> None:
    command = "jagged run 01_speed --preset paper --out o -p seconds=0.07 --parameter rounds=3"
    _save(tmp_path / "01_speed", measured, id="01_speed", command=command)
    assert " · `seconds=0.07` · `rounds=3`" in goals.goal_tables(tmp_path)
    page = tmp_path / "results.md"
    page.write_text(f"{redraw.BEGIN}{redraw.END}")
    redraw.update_results(page, tmp_path)
    assert " · `seconds=0.07` · `rounds=3`" in page.read_text()
    assert " · with options of its own*" in headlines.headlines(tmp_path)


@pytest.mark.parametrize(
    ("command", "changes"),
    [
        ("jagged run 04 -p 'seeds=[0, 1]' --quiet -p a=b", ["seeds=[0, 1]", "a=b"]),
        ("jagged run 04 -p seeds=[0, 1] --quiet", ["seeds=[0, 1]"]),  # kept without quotes
        ("jagged run 04 -p 'a=it", ["'a=it"]),
        (f"jagged run 04 -p 'own={'word ' * 50}'", ["own=" + "word " * 14 + "..."]),
        ("jagged run 04 --preset small", []),
    ],
)
def test_what_a_command_set(command: str, changes: list[str]) -> None:
    assert provenance.changes_of_preset({"command": command}) == changes


def test_a_goal_whose_workload_was_left_out_is_not_measured(
    tmp_path: Path, measured: pd.DataFrame
) -> None:
    _save(tmp_path / "01_speed", measured.loc[measured["workload"] != "E", :])
    block = goals.goal_tables(tmp_path)
    assert _rows(block, "Self-attention: time")["E", "forward"][-3:] == [
        "0.40",
        "0.28",
        "not measured",
    ]


def test_the_page_of_goals_keeps_its_prose(tmp_path: Path) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"# P\n\n{redraw.GOALS_BEGIN}\n{redraw.GOALS_END}\n\n## Prose\n")
    assert redraw.update_performance(page, tmp_path / "figures")
    text = page.read_text()
    assert text.count("Not measured.") == text.count("\n### ") >= 6
    assert text.endswith("\n\n## Prose\n")
    assert not redraw.update_performance(page, tmp_path / "figures")
    page.write_text("no marks")
    with pytest.raises(ValueError, match=r"performance\.md: needs one"):
        redraw.update_performance(page, tmp_path / "figures")


def test_what_has_numbers_beside_its_goals_alone_is_no_empty_section(
    tmp_path: Path, measured: pd.DataFrame
) -> None:
    _save(tmp_path / "01_speed", measured)
    assert "performance.md" not in redraw.all_results(tmp_path)
    names = dict.fromkeys(("op", "provider", "workload", "mode", "metric", "unit"), "exactness")
    wrong = results.row(**names, value=1.0)
    _save(tmp_path / "exactness", results.frame([wrong]), id="exactness")
    _, said = redraw.all_results(tmp_path).split("## exactness")
    assert said.endswith("\n\nIn [performance.md](performance.md), beside its goals.")


def test_every_result_is_on_one_page(tmp_path: Path, measured: pd.DataFrame) -> None:
    figures, page = tmp_path / "figures", tmp_path / "docs" / "results.md"
    figures.mkdir()
    page.parent.mkdir()
    page.write_text(f"# Title\n\n{redraw.BEGIN}\nold\n{redraw.END}\n\nafter\n")
    assert redraw.update_results(page, figures)
    assert "No results are committed yet." in page.read_text()
    _save(figures / "04_quality", quality_results(), id="04_quality")
    _save(figures / "01_speed", measured)
    (figures / "01_speed" / "01_speed_speedup.svg").write_text("<svg/>")
    (figures / "runs" / "smoke" / "01_speed").mkdir(parents=True)
    assert redraw.update_results(page, figures)
    text = page.read_text()
    assert text.startswith("# Title\n")
    assert text.endswith("\nafter\n")
    assert "\nold\n" not in text
    assert text.index("01_speed: Imaginary GPU") < text.index("04_quality: Imaginary GPU")
    assert "![01_speed_speedup](../figures/01_speed/01_speed_speedup.svg)" in text
    assert not redraw.update_results(page, figures)
    page.write_text("no marks")
    with pytest.raises(ValueError, match=r"results\.md: needs one"):
        redraw.update_results(page, figures)


def test_a_spread_that_failed_is_not_left_out_of_the_skew(tmp_path: Path) -> None:
    """Ours on two of three is no ratio of all."""
    table = target_results()
    ours = results.select(table, provider="jagged", mode="forward", metric="latency")
    skewed = results.with_config(ours, "distribution", "group", "B")
    one = skewed.query("distribution == 'whale' and group == 'skew' and B == 16").index
    table.loc[one, ["value", "status"]] = [float("nan"), "error"]
    _save(tmp_path / "03_target_attention", table, id="03_target_attention")
    rows = _rows(goals.goal_tables(tmp_path), "Target attention: the same events")
    lost = rows["forward", "16", "jagged (ours)"]
    assert lost[-3:] == ["–", "1.15", "not measured"]
    assert rows["forward", "64", "jagged (ours)"][-1] in ("yes", "**no**")
