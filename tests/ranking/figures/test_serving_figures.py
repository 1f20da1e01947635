"""Figures, tables and goals of served requests, from made-up results."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from kept_figures import goals_before_and_after
from made_up_rankers import serving_results, throughput_results
from made_up_results import MANIFEST
from matplotlib.text import Text

from jagged_ranking import results
from jagged_ranking.figures import (
    serving_figures,
    speed,
    style,
    tables,
    throughput_figures,
)
from jagged_ranking.figures.serving_goals import serving_overview, serving_rows

ID = "11_serving"
MADE_BY = {**MANIFEST, "id": ID}
TITLE = "Served requests: latency and memory"


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    return serving_results()


def row_of(rows: list[dict[str, str]], **wanted: str) -> dict[str, str]:
    chosen = {"requests x candidates": "1 x 100", "history cap": "1,024", "model": "transformer"}
    chosen |= wanted
    (found,) = [row for row in rows if chosen.items() <= row.items()]
    return found


def changed(table: pd.DataFrame, value: float, **where: str) -> pd.DataFrame:
    table = table.copy()
    at = results.select(table, **where).index
    assert len(at)
    table.loc[at, "value"] *= value
    return table


def test_every_figure_is_drawn(measured: pd.DataFrame, drawn: dict[str, Any]) -> None:
    serving_figures.draw(measured, MADE_BY, Path("nowhere"))
    assert list(drawn) == [f"{ID}_{name}" for name in ("latency", "device", "memory", "rate")]
    for name, figure in drawn.items():
        said = "\n".join(text.get_text() for text in figure.findobj(Text))
        for wanted in ("Imaginary GPU 80GB", "histories to 16,384", "HSTU", "at most 8 new events"):
            assert wanted in said, name
        assert len(figure.axes) == 4, name
    latency, *_, last = drawn[f"{ID}_latency"].axes  # names below the last row alone
    assert [text.get_text() for text in last.get_xticklabels()] == ["1", "100"]
    # bars reach from the median to the 99th percentile, which is twice as much here
    (bars,) = latency.containers[0][2]
    for low, high in (segment[:, 1] for segment in bars.get_segments()):
        assert high == pytest.approx(2 * low)


def test_who_ran_out_of_memory_is_not_drawn_as_the_best(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    """At the edge where the slow are: above for a time, below for a rate."""
    serving_figures.draw(measured, MADE_BY, Path("nowhere"))
    for name, slow_above in (("latency", True), ("rate", False)):
        marks = [
            line.get_ydata()[0]
            for panel in drawn[f"{ID}_{name}"].axes
            for line in panel.lines
            if line.get_marker() == "x" and line.get_transform() == panel.get_xaxis_transform()
        ]
        assert marks, name
        assert all((y > 0.5) == slow_above for y in marks), name


def test_goals_are_held_against_padded_flash(measured: pd.DataFrame) -> None:
    rows = serving_rows(measured)
    assert len(rows) == 2 * 2 * 3
    row = row_of(rows)
    assert row["ours, p50 / p99 (ms)"] == "3.00 / 6.00"
    assert (row["times faster"], row["at least"]) == ("1.20", "1.00")
    assert (row["memory / padded flash's"], row["at most"], row["met"]) == ("0.67", "1.00", "yes")
    assert row["cached, p50 / p99 (ms)"] == "1.50 / 3.00"
    assert (row["saves (wall)"], row["saves (device)"]) == ("2.00", "9.00")
    assert row["MB of a user in the cache"] == "1.05"
    assert row["by graph, p50 / p99 (ms)"] == "0.750 / 1.50"
    assert row["padded flash by graph, p50 (ms)"] == "1.20"
    assert row["times faster by graph"] == "1.60"
    hstu = row_of(rows, model="HSTU")
    assert (hstu["by graph, p50 / p99 (ms)"], hstu["times faster by graph"]) == ("0.750 / 1.50", "")
    assert (hstu["padded flash, p50 (ms)"], hstu["cached, p50 / p99 (ms)"]) == ("n/a", "n/a")
    assert (hstu["at least"], hstu["saves (wall)"], hstu["met"]) == ("", "", "")


def test_an_overview_has_as_many_candidates_as_many_requests_have(measured: pd.DataFrame) -> None:
    rows = serving_overview(measured)
    assert {row["requests x candidates"] for row in rows} == {"1 x 100", "32 x 100"}
    every = serving_rows(measured)
    assert rows == [row for row in every if row["requests x candidates"] != "1 x 1"]
    alone = measured.loc[measured["workload"].str.startswith("1 x")]
    assert serving_overview(alone) == serving_rows(alone)


@pytest.mark.parametrize(
    ("metric", "factor"), [("latency", 1.3), ("peak_memory_minus_inputs", 1.6)]
)
def test_each_goal_can_be_missed(measured: pd.DataFrame, metric: str, factor: float) -> None:
    where = {"provider": "jagged", "metric": metric}
    where["workload"] = "1 x 100 candidates, cap 1024"
    rows = serving_rows(changed(measured, factor, **where))
    assert row_of(rows)["met"] == "**no**"
    assert row_of(rows, **{"history cap": "16,384"})["met"] == "yes"


def test_a_peer_that_does_not_fit_is_no_miss(measured: pd.DataFrame) -> None:
    table = measured.copy()
    at = results.select(table, provider="padded_flash").index
    table.loc[at, ["value", "status"]] = [float("nan"), "out_of_memory"]
    row = row_of(serving_rows(table))
    assert (row["padded flash, p50 (ms)"], row["times faster"], row["met"]) == ("OOM", "", "yes")


def test_tables_have_a_column_a_way_to_answer(measured: pd.DataFrame) -> None:
    found = dict(tables.serving_tables(measured))
    assert list(found) == [
        "Latency of requests, p50 / p99, ms",
        "Requests a second",
        "Time of the device for requests, ms",
        "Peak memory of requests beyond weights and inputs, MB",
    ]
    latency = found["Latency of requests, p50 / p99, ms"]
    row = latency[(latency["history cap"] == "16,384") & (latency["candidates"] == "1")].iloc[0]
    assert row["jagged (ours)"] == "32.2 / 64.3"
    assert row["padded dense"] == "OOM"
    assert row["jagged (ours), CUDA graph"] == "8.04 / 16.1"
    assert "padded dense, CUDA graph" not in row
    rate = found["Requests a second"]
    row = rate[(rate["history cap"] == "1,024") & (rate["requests"] == "32")].iloc[0]
    assert row["ours, histories cached"] == tables.number(32e3 / 1.5)


def test_the_page_of_goals_has_it(measured: pd.DataFrame, tmp_path: Path) -> None:
    before, after = goals_before_and_after(measured, MADE_BY, TITLE, tmp_path)
    assert "\n\nNot measured." in before
    assert "| transformer | 1 x 100 | 1,024 |" in after


def test_other_studies_draw_nothing_of_it_nor_it_of_them(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    speed.draw(measured, MADE_BY, Path("nowhere"))
    throughput_figures.draw(measured, MADE_BY, Path("nowhere"))
    serving_figures.draw(throughput_results(), MADE_BY, Path("nowhere"))
    serving_figures.draw(results.frame([]), MADE_BY, Path("nowhere"))
    assert not drawn
    assert serving_rows(throughput_results()) == []


def test_requests_that_ours_did_not_answer_leave_a_goal_open(measured: pd.DataFrame) -> None:
    table = measured.copy()
    where = {"provider": "jagged", "metric": "latency", "mode": "scoring"}
    at = results.select(table, workload="1 x 100 candidates, cap 1024", **where).index
    table.loc[at, ["value", "status"]] = [float("nan"), "out_of_memory"]
    rows = serving_rows(table)
    row = row_of(rows)
    assert (row["ours, p50 / p99 (ms)"], row["at least"]) == ("OOM", "1.00")
    assert row["met"] == "not measured"
    assert len(rows) == len(serving_rows(measured)) - 1  # HSTU has no goal there


def test_grids_are_of_one_request_in_their_units(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    """To the smaller cap ours takes 2.01 ms for one candidate and 3 ms for 100, in 2 MB."""
    serving_figures.draw(measured, MADE_BY, Path("nowhere"))
    ours = style.look_of("jagged").color
    for name, heights in (("latency", [2.01, 3.0]), ("device", [1.809, 2.7]), ("memory", [2, 2])):
        panel = drawn[f"{ID}_{name}"].axes[0]
        (line,) = [
            one for one in panel.lines if one.get_color() == ours and one.get_marker() == "o"
        ]
        assert line.get_xdata().tolist() == [0, 1]
        assert line.get_ydata() == pytest.approx(heights)


def test_rates_are_of_as_many_candidates_each(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    """One request of a single candidate is no point beside those of 100."""
    serving_figures.draw(measured, MADE_BY, Path("nowhere"))
    ours = style.look_of("jagged").color
    panel = drawn[f"{ID}_rate"].axes[0]
    (line,) = [one for one in panel.lines if one.get_color() == ours and one.get_marker() == "o"]
    assert line.get_ydata() == pytest.approx([1e3 / 3.0, 32e3 / 3.0])
