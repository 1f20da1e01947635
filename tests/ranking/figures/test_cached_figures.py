"""Figures, tables and goals of cached and shared keys, from made-up results."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from left_results import save_run
from made_up_cached import CACHED, POLICIES, cached_results
from matplotlib.text import Text

from jagged_ranking import results
from jagged_ranking.figures import cached_figures, goals, speed, style, tables
from jagged_ranking.figures.cached_goals import (
    append_table,
    compression_table,
    decode_rows,
    persistence_table,
    prefix_rows,
    scoring_rows,
)
from jagged_ranking.figures.cached_points import by_compression

ID = "09_history_cache_"


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    return cached_results()


def text_of(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_figures_say_what_they_show(measured: pd.DataFrame, drawn: dict[str, Any]) -> None:
    cached_figures.draw(measured, CACHED, Path("nowhere"))
    assert [name.removeprefix(ID) for name in drawn] == [
        "decode", "append", "prefix", "scoring", "compression",
    ]  # fmt: skip
    for figure in drawn.values():
        assert "Imaginary GPU 80GB" in text_of(figure)
    said = text_of(drawn[f"{ID}decode"])
    for text in (
        "limit of the device",
        "goal: 1.6 x limit",
        "varlen_attn, keys copied",
        "out of memory",
        "64 users",
        "histories of up to 4,096",
        "each user has 1 to 64 new events, 4 heads, head_dim 64",
    ):
        assert text in said
    assert "paged" not in said  # it is missing there
    assert "goal" not in text_of(drawn[f"{ID}append"])
    assert "512 users" in text_of(drawn[f"{ID}prefix"])
    assert "peak beyond inputs (GB)" in text_of(drawn[f"{ID}prefix"])
    assert "the last 400 queries" in text_of(drawn[f"{ID}scoring"])
    for text in ("pivotal (Scissorhands)", "heavy hitters (H2O)", "newest", "random", "10x"):
        assert text in text_of(drawn[f"{ID}compression"])
    assert "gAUC, against the whole history\n(there 0.800)" in text_of(drawn[f"{ID}compression"])


def test_the_goal_stands_where_it_counts(measured: pd.DataFrame, drawn: dict[str, Any]) -> None:
    """Where the limit is above 0.1 ms, and nowhere in a run where none is."""
    cached_figures.draw(measured, CACHED, Path("nowhere"))
    panel = drawn[f"{ID}decode"].axes[1]  # over users
    (goal,) = [line for line in panel.lines if line.get_color() == style.PAPER_COLOR]
    limit = next(
        line for line in panel.lines if line.get_color() == "#999999" and len(line.get_xdata()) == 3
    )
    heights = np.asarray(limit.get_ydata())
    assert (heights > 0.1).tolist() == [False, False, True]
    assert np.mean(goal.get_xdata()) == 2
    np.testing.assert_allclose(goal.get_ydata(), 1.6 * heights[2])
    names = ["64 x 1024, by history", "1 x 4096, by users", "64 x 4096, by users"]
    few = results.select(measured, workload=names)
    cached_figures.draw(few, CACHED, Path("nowhere"))
    assert "goal" not in text_of(drawn[f"{ID}decode"])


def test_lines_of_compression_are_what_is_lost(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    cached_figures.draw(measured, CACHED, Path("nowhere"))
    assert [panel.get_title() for panel in drawn[f"{ID}compression"].axes] == ["log_a", "log_b"]
    panel = drawn[f"{ID}compression"].axes[0]
    for policy, lost in POLICIES.items():
        color = style.look_of(policy).color
        (line,) = [line for line in panel.lines if line.get_color() == color]
        assert line.get_xdata().tolist() == [1.0, 2.0, 5.0, 10.0]
        np.testing.assert_allclose(line.get_ydata(), [0.0, -lost, -4 * lost, -9 * lost])


def test_results_of_something_else_draw_nothing(tmp_path: Path, measured: pd.DataFrame) -> None:
    nothing = results.frame([])
    assert cached_figures.draw(nothing, CACHED, tmp_path) == []
    assert tables.cached_tables(nothing) == []
    assert speed.draw(measured, CACHED, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_goals_of_cached_queries(measured: pd.DataFrame) -> None:
    rows = {(row["users"], row["longest history"]): row for row in decode_rows(measured)}
    large = rows["1,024", "4,096"]
    assert (large["at most"], large["met"], large["ours / limit"]) == ("1.60", "yes", "1.30")
    assert large["best peer"] == "varlen_attn, keys copied"
    assert large["schedule (ms)"] == "0.0310"
    small = rows["1", "4,096"]  # its limit is below what counts
    assert (small["at most"], small["met"]) == ("", "")
    slow = measured.copy()
    ours = (slow["op"] == "cached_attention") & (slow["provider"] == "jagged")
    slow.loc[ours, "value"] *= 2
    met = {row["met"] for row in decode_rows(slow) if row["at most"]}
    assert met == {"**no**"}


def test_goals_of_key_statistics(measured: pd.DataFrame) -> None:
    for row in scoring_rows(measured):
        assert (row["times faster"], row["at least"], row["met"]) == ("5.00", "3.00", "yes")
        assert (row["counters off by"], row["scissorhands (ms)"]) == ("1", "0.0310")
    off = measured.copy()
    errors = (off["op"] == "key_statistics") & (off["metric"] == "max_abs_error")
    off.loc[errors, "value"] = 2.0
    assert {row["met"] for row in scoring_rows(off)} == {"**no**"}
    slow = measured.copy()
    ours = (slow["op"] == "key_statistics") & (slow["provider"] == "jagged")
    slow.loc[ours & (slow["metric"] == "latency"), "value"] *= 2
    assert {row["met"] for row in scoring_rows(slow)} == {"**no**"}


def test_tables_for_people(measured: pd.DataFrame) -> None:
    prefix = prefix_rows(measured)
    assert [row["prefix"] for row in prefix] == ["64", "64", "4,096", "4,096"]
    assert {row["times faster"] for row in prefix} == {"3.00"}
    assert [row["times less"] for row in prefix] == ["1.64", "1.64", "41.96", "41.96"]
    append = append_table(measured)
    assert len(append) == 5
    assert "jagged_cat: a copy of all (ms)" in append
    compressed = compression_table(measured)
    assert compressed["compression"].tolist() == ["1x", "2x", "5x", "10x"] * 2
    assert compressed["events kept"].tolist()[:3] == ["200.0", "100.0", "40.0"]
    assert compressed["newest"].tolist()[:2] == ["0.8005", "-0.0300 [-0.0400, -0.0200]"]
    persisted = persistence_table(measured)
    assert persisted["persistence ratio"].tolist() == ["0.900"] * 2
    captions = [caption for caption, _ in tables.summaries(measured)]
    assert len(captions) == 6
    assert by_compression(measured)["kept"].max() == 200.0


def test_the_page_of_goals_has_them(tmp_path: Path, measured: pd.DataFrame) -> None:
    save_run(tmp_path / "09_history_cache", measured, CACHED)
    said = goals.goal_tables(tmp_path)
    for title in (
        "### Cached histories: time against the limit and peers",
        "### Events that were attended to: time against all scores",
        "### A prefix that users share: time and memory",
    ):
        assert title in said
    assert "| 1,024 | 4,096 |" in said


def test_the_best_peer_is_the_fastest_whoever_was_first(measured: pd.DataFrame) -> None:
    for table in (measured, measured.iloc[::-1]):
        assert {row["best peer"] for row in decode_rows(table)} == {"varlen_attn, keys copied"}


def test_persistence_is_the_mean_over_seeds(measured: pd.DataFrame) -> None:
    once = results.select(measured, op="persistence", metric="persistence_ratio")
    table = pd.concat([measured, once.assign(value=0.7), once.assign(value=0.2)])
    assert persistence_table(table)["persistence ratio"].tolist() == ["0.600"] * 2


def test_what_ours_failed_on_is_a_row_that_leaves_its_goal_open(measured: pd.DataFrame) -> None:
    ours = (measured["provider"] == "jagged") & (measured["metric"] == "latency")
    calls = ours & measured["op"].isin(["cached_attention", "key_statistics", "prefixed_attention"])
    table = measured.assign(
        value=measured["value"].mask(calls), status=measured["status"].mask(calls, "out_of_memory")
    )
    decoded = decode_rows(table)
    assert len(decoded) == len(decode_rows(measured))
    assert {row["ours (ms)"] for row in decoded} == {"OOM"}
    assert {row["met"] for row in decoded if row["at most"]} == {"not measured"}
    assert {row["met"] for row in decoded if not row["at most"]} == {""}
    scored = scoring_rows(table)
    assert len(scored) == len(scoring_rows(measured))
    assert {(row["ours (ms)"], row["met"]) for row in scored} == {("OOM", "not measured")}


def test_counters_that_nobody_compared_are_not_measured(measured: pd.DataFrame) -> None:
    without = measured.loc[measured["metric"] != "max_abs_error", :]
    for row in scoring_rows(without):
        assert (row["counters off by"], row["met"]) == ("not measured", "not measured")


def test_a_prefix_is_a_row_in_megabytes_whether_ours_ran_or_not(measured: pd.DataFrame) -> None:
    where = {"op": "prefixed_attention", "mode": "forward"}
    table = results.select(measured, **where).copy()
    peaks = table["metric"] == "peak_memory_minus_inputs"
    table.loc[peaks & (table["provider"] == "jagged"), "value"] = 2e6
    table.loc[peaks & (table["provider"] == "cat"), "value"] = 5e6
    shown = {
        (row["ours (MB)"], row["copied (MB)"], row["times less"]) for row in prefix_rows(table)
    }
    assert shown == {("2.00", "5.00", "2.50")}
    lost = (table["metric"] == "latency") & (table["provider"] == "jagged")
    table.loc[lost, ["value", "status"]] = [float("nan"), "error"]
    assert {(row["ours (ms)"], row["times faster"]) for row in prefix_rows(table)} == {
        ("error", "")
    }


def test_counters_are_those_of_ours(measured: pd.DataFrame) -> None:
    table = measured.copy()
    where = {"op": "key_statistics", "metric": "max_abs_error"}
    table.loc[results.select(table, provider="dense_scores", **where).index, "value"] = 0.0
    table.loc[results.select(table, provider="jagged", **where).index, "value"] = 2.0
    assert {(row["counters off by"], row["met"]) for row in scoring_rows(table)} == {
        ("2", "**no**")
    }


def test_bands_of_compression_reach_from_end_to_end(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    cached_figures.draw(measured, CACHED, Path("nowhere"))
    panel = drawn[f"{ID}compression"].axes[0]
    band = panel.collections[list(POLICIES).index("newest")]  # 0.03 less, 0.01 to both sides
    heights = {round(float(y), 3) for x, y in band.get_paths()[0].vertices if x == 2.0}
    assert heights == {-0.04, -0.02}


def test_memory_of_a_prefix_is_in_the_unit_of_its_axis(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    cached_figures.draw(measured, CACHED, Path("nowhere"))
    panel = drawn[f"{ID}prefix"].axes[2]  # below the times of the forward
    where = {"op": "prefixed_attention", "mode": "forward", "provider": "jagged"}
    peaks = results.select(measured, metric="peak_memory_minus_inputs", **where)["value"]
    assert panel.get_ylabel() == "peak beyond inputs (GB)"
    color = style.look_of("jagged").color
    (line,) = [
        line for line in panel.lines if line.get_color() == color and line.get_marker() == "o"
    ]
    np.testing.assert_allclose(line.get_ydata(), peaks / 1e9)
