"""The figure and the table of what longer histories are worth and who affords them."""

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from made_up_rankers import HISTORY_CAPS, HOST_MS, history_results
from made_up_results import MANIFEST
from matplotlib.text import Text

from jagged_ranking import results
from jagged_ranking.figures import history_length, quality, speed, style, tables
from jagged_ranking.figures.affordability import (
    Afforded,
    afforded,
    by_cap,
    history_overview,
    history_table,
    longest_caps,
)

HISTORY = {**MANIFEST, "id": "06_history_length"}
KINDS = ("jagged", "padded_sdpa", "padded_flash", "nested")


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    return history_results()


def hand_made(
    costs: dict[str, list[float]], *, budget: float, device: str = "Imaginary GPU"
) -> pd.DataFrame:
    """A step's times at the caps 10, 100 and 1000 (all), and scores of 0.5, 0.6, 0.7 there."""
    rows = []
    for place, cap in enumerate((10, 100, 1000)):
        config = {"model": "transformer", "cap": cap, "longest": 1000, "device": device}
        where: dict[str, Any] = {"workload": "log", "config": config}
        for kind, times in costs.items():
            lost = math.isnan(times[place])
            step: dict[str, Any] = {"op": "training_step", "provider": kind, "mode": "train"}
            step |= {"status": "out_of_memory", "message": "full"} if lost else {}
            ms = times[place]
            rows.append(results.row(metric="latency", unit="ms", value=ms, **step, **where))
        scored: dict[str, Any] = {"op": "ranking_by_cap", "provider": "transformer", "unit": "1"}
        value = 0.5 + place / 10
        rows.append(results.row(metric="gauc", mode="test", value=value, **scored, **where))
    bound: dict[str, Any] = {"op": "budget", "provider": "padded_flash", "mode": "train"}
    config = {"model": "transformer", "cap": 100, "device": device}
    bound |= {"workload": "log", "config": config}
    rows.append(results.row(metric="latency", unit="ms", value=budget, **bound))
    return results.frame(rows)


def test_the_longest_cap_within_a_budget() -> None:
    caps, costs = [10, 100, 1000], [1.0, 2.0, 32.0]
    assert afforded(caps, costs, 2.0, whole=1000) == Afforded(100.0)  # the budget's own point
    assert afforded(caps, costs, 0.9, whole=1000) == Afforded(0.0)
    assert afforded(caps, costs, 32.0, whole=1000) == Afforded(1000.0, whole=True)
    assert afforded(caps, costs, 99.0, whole=4000) == Afforded(1000.0)
    # Between 100 and 1000 the cost grows 16-fold: half way, in logarithms, it is 4-fold.
    assert afforded(caps, costs, 8.0, whole=1000).cap == pytest.approx(100 * 10**0.5)
    shuffled = afforded([1000, 10, 100], [32.0, 1.0, 2.0], 8.0, whole=1000)
    assert shuffled == afforded(caps, costs, 8.0, whole=1000)


def test_what_could_not_be_measured_is_not_afforded() -> None:
    assert afforded([10, 100, 1000], [1.0, 2.0, math.nan], 99.0, whole=1000) == Afforded(100.0)
    assert afforded([10, 100], [math.nan, 1.0], 99.0, whole=100) == Afforded(0.0)
    # Nor is what comes behind a cap that is above the budget.
    assert afforded([10, 100, 1000], [1.0, 4.0, 1.5], 2.0, whole=1000).cap < 100


def test_the_table_says_cap_and_quality() -> None:
    lost = math.nan
    costs = {
        "jagged": [1.0, 1.5, 2.0],
        "nested": [1.0, 2.0, 32.0],
        "padded_flash": [1.0, 4.0, 64.0],
        "padded_sdpa": [9.0, lost, lost],
    }
    table = history_table(hand_made(costs, budget=4.0)).set_index("attention")
    assert set(table["budget"]) == {"4 ms (padded flash (SDPA) at 100)"}
    assert set(table["fixed"]) == {"device time"}
    assert table["longest cap"].to_dict() == {
        "jagged (ours)": "all (1,000)",
        "nested tensor + SDPA": "177",
        "padded flash (SDPA)": "100",
        "padded, masked (SDPA)": "none",
    }
    assert table["quality there"].to_dict() == {
        "jagged (ours)": "gAUC 0.7000 at 1000",
        "nested tensor + SDPA": "gAUC 0.6000 at 100",
        "padded flash (SDPA)": "gAUC 0.6000 at 100",
        "padded, masked (SDPA)": "",
    }
    never = {"jagged": [1.0, 1.5, 2.0], "padded_sdpa": [lost, lost, lost]}
    table = history_table(hand_made(never, budget=4.0)).set_index("attention")
    assert table["longest cap"].loc["padded, masked (SDPA)"] == "OOM"


def test_the_overview_has_a_row_for_what_is_fixed() -> None:
    costs = {"jagged": [1.0, 1.5, 2.0], "padded_flash": [1.0, 4.0, 64.0]}
    costs["padded_sdpa"] = [9.0, math.nan, math.nan]
    (row,) = history_overview(hand_made(costs, budget=4.0)).to_dict("records")
    assert row == {
        "dataset": "log",
        "model": "transformer",
        "fixed": "device time, 4 ms (padded flash (SDPA) at 100)",
        "judged by": "gAUC",
        "host, ours (ms)": "",
        "jagged (ours)": "all (1,000): 0.7000",
        "padded flash (SDPA)": "100: 0.6000",
        "padded, masked (SDPA)": "none",
    }


def test_claims_are_made_on_a_gpu_alone() -> None:
    costs = {"jagged": [1.0, 1.5, 2.0], "padded_flash": [1.0, 4.0, 64.0]}
    (claim,) = tables.claims(hand_made(costs, budget=4.0)).to_dict("records")
    assert claim["claim"] == "transformer affords longer histories than with padded flash (SDPA)"
    assert claim["mode"] == "same device time"
    assert claim["this run"] == "all (1,000) against 100 (log)"
    assert (claim["holds"], claim["where"]) == ("yes", "log")
    swapped = {"jagged": costs["padded_flash"], "padded_flash": [1.0, 2.0, 8.0]}
    (claim,) = tables.claims(hand_made(swapped, budget=4.0)).to_dict("records")
    assert (claim["holds"], claim["where"]) == ("no", "")
    (claim,) = tables.claims(hand_made(costs, budget=4.0, device="CPU (some)")).to_dict("records")
    assert claim["holds"] == "n/a: not on a GPU"
    # A budget within which both have all of the history bounds nobody.
    assert tables.claims(hand_made(costs, budget=99.0)).empty


def test_scores_are_those_a_data_set_is_judged_by(measured: pd.DataFrame) -> None:
    found = by_cap(measured)
    judged = dict(zip(found["workload"], found["metric"], strict=True))
    assert judged == {
        "trivago_val100k": "list_auc",
        "ml_latest_small": "gauc",
        "synthetic_far": "gauc",
    }
    for dataset, caps in HISTORY_CAPS.items():
        mine = results.select(found, workload=dataset)
        assert mine["cap"].tolist() == list(caps)
        assert mine["seeds"].map(len).eq(3).all()
        assert mine["mean"].tolist() == pytest.approx([sum(s) / 3 for s in mine["seeds"]])
        shortest, *longer = mine["gain"].tolist()
        assert math.isnan(shortest)
        assert not any(map(math.isnan, longer))


def test_the_figure_shows_quality_costs_budgets_and_failures(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    history_length.draw(measured, HISTORY, Path("nowhere"))
    assert list(drawn) == ["06_history_length_transformer"]
    (figure,) = drawn.values()
    said = "\n".join(text.get_text() for text in figure.findobj(Text))
    for wanted in (
        *HISTORY_CAPS,
        "list AUC, gain over cap 10",
        "gAUC, gain over cap 10",
        "device time of a step (ms)",
        history_length.HOST_LABEL,
        "peak memory of a step (GB)",
        "out of memory",
        "budget: padded flash (SDPA) at cap 100",
        "cap, events\n(all: 2,698)",
        "Imaginary GPU 80GB",
    ):
        assert wanted in said
    assert "CPU" not in said
    top = figure.axes[: len(HISTORY_CAPS)]
    marked = longest_caps(measured)
    for panel, dataset in zip(top, HISTORY_CAPS, strict=True):
        mine = results.select(marked, workload=dataset)
        shown = [
            float(line.get_xdata()[0])
            for line in panel.lines
            if len(line.get_xdata()) == 1 and line.get_marker() != "."
        ]
        assert sorted(shown) == pytest.approx(sorted(mine["cap"]))


def test_what_failed_is_marked_at_its_cap(drawn: dict[str, Any]) -> None:
    table = hand_made({"jagged": [1.0, 2.0, math.nan], "nested": [math.nan] * 3}, budget=2.0)
    failed = (table["provider"] == "nested") & (table["op"] == "training_step")
    table = table.assign(status=table["status"].mask(failed, "error"))
    history_length.draw(table, HISTORY, Path("nowhere"))
    (figure,) = drawn.values()
    quality, times, _ = figure.axes
    for kind, marker, caps in (("jagged", "x", [1000]), ("nested", "1", [10, 100, 1000])):
        (marks,) = [line for line in times.lines if line.get_marker() == marker]
        assert list(marks.get_xdata()) == caps
        assert set(marks.get_ydata()) == {0.97}
        assert marks.get_transform() == times.get_xaxis_transform()
        assert marks.get_color() == style.look_of(kind).color
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"out of memory", "failed", "nested tensor + SDPA"} <= legend
    # Nothing of what never ran is on the curve of quality.
    assert {line.get_marker() for line in quality.lines} == {"None", ".", "o"}


def test_where_time_and_memory_afford_the_same_both_are_seen(drawn: dict[str, Any]) -> None:
    table = hand_made({"padded_flash": [1.0, 2.0, 3.0]}, budget=2.0)
    memory = table[table["metric"] == "latency"].assign(metric="peak_memory", unit="B")
    history_length.draw(pd.concat([table, memory]), HISTORY, Path("nowhere"))
    (figure,) = drawn.values()
    marks = [line for line in figure.axes[0].lines if line.get_marker() == "^"]
    filled, ring = marks
    assert list(filled.get_xdata()) == list(ring.get_xdata()) == [100]
    assert filled.get_markerfacecolor() == style.look_of("padded_flash").color
    assert ring.get_markerfacecolor() == "none"
    assert ring.get_markersize() > filled.get_markersize()


def test_what_the_host_takes_is_said_beside_the_device(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    assert set(longest_caps(measured)["host"]) == {HOST_MS}
    assert set(history_table(measured)["host (ms)"]) == {"15"}
    assert set(history_overview(measured)["host, ours (ms)"]) == {"15"}
    history_length.draw(measured, HISTORY, Path("nowhere"))
    (figure,) = drawn.values()
    times = figure.axes[len(HISTORY_CAPS) : 2 * len(HISTORY_CAPS)]
    for panel, caps in zip(times, HISTORY_CAPS.values(), strict=True):
        flat = [line for line in panel.lines if set(line.get_ydata()) == {HOST_MS}]
        assert [list(line.get_xdata()) for line in flat] == [list(caps)]
        assert panel.get_ylim()[1] > HOST_MS


def test_costs_on_a_cpu_are_marked_and_quality_may_be_missing(drawn: dict[str, Any]) -> None:
    costs = {"jagged": [1.0, 1.5, 2.0], "padded_flash": [1.0, 4.0, 64.0]}
    table = hand_made(costs, budget=4.0, device="CPU (some)")
    table = results.select(table, op=["training_step", "budget"])
    manifest = {**HISTORY, "device": "CPU (some)", "device_type": "cpu", "preset": "smoke"}
    history_length.draw(table, manifest, Path("nowhere"))
    said = "\n".join(
        text.get_text() for text in drawn[f"{HISTORY['id']}_transformer"].findobj(Text)
    )
    assert "costs on a CPU" in said
    assert history_length.HOST_LABEL not in said
    assert "not trained" in said
    assert "SMOKE RUN" in said


def test_a_part_that_says_neither_scores_nor_costs_is_not_drawn(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    steps = measured.loc[measured["op"] == history_length.STEP, :]
    history_length.draw(steps.assign(metric="peak_memory_minus_inputs"), HISTORY, Path("nowhere"))
    assert not drawn


def test_other_studies_draw_nothing_of_it_nor_it_of_them(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    quality.draw(measured, HISTORY, Path("nowhere"))
    speed.draw(measured, HISTORY, Path("nowhere"))
    assert not drawn
    ((caption, _),) = tables.summaries(measured)
    assert caption == tables.HISTORY


def with_gain(table: pd.DataFrame, **numbers: float) -> pd.DataFrame:
    """And a gain over the shortest cap at the longest one."""
    config = {"model": "transformer", "cap": 1000, "longest": 1000, **numbers}
    gain = results.row(
        op="ranking_by_cap", provider="transformer", workload="log", mode="test",
        metric="gauc_gain", unit="1", value=0.2, config=config,
    )  # fmt: skip
    return pd.concat([table, results.frame([gain])], ignore_index=True)


def test_a_gain_has_its_interval() -> None:
    table = with_gain(hand_made({"jagged": [1.0, 1.5, 2.0]}, budget=4.0), low=0.1, high=0.4)
    (row,) = history_table(table).to_dict("records")
    assert row["quality there"] == "gAUC 0.7000 at 1000 (+0.2000 [+0.1000, +0.4000])"


def test_the_host_is_the_median_over_caps_and_that_of_ours() -> None:
    table = hand_made({kind: [1.0, 1.5, 2.0] for kind in ("jagged", "nested")}, budget=4.0)
    steps = results.select(table, op="training_step")
    host = steps.assign(metric="host_time")
    for kind, times in (("jagged", [5.0, 7.0, 30.0]), ("nested", [1.0, 2.0, 3.0])):
        host.loc[host["provider"] == kind, "value"] = times
    table = pd.concat([table, host], ignore_index=True)
    shown = history_table(table).set_index("attention")["host (ms)"].to_dict()
    assert shown == {"jagged (ours)": "7", "nested tensor + SDPA": "2"}
    (row,) = history_overview(table).to_dict("records")
    assert row["host, ours (ms)"] == "7"


def test_marks_and_band_stand_on_the_curve_of_quality(drawn: dict[str, Any]) -> None:
    """Half way from 100 to 1,000 in logarithms the gain is half way from 0.1 to 0.2."""
    table = hand_made({"nested": [1.0, 2.0, 32.0]}, budget=8.0)
    table = with_gain(table, low=0.15, high=0.25)
    history_length.draw(table, HISTORY, Path("nowhere"))
    (figure,) = drawn.values()
    panel = figure.axes[0]
    assert panel.get_ylabel() == "gAUC, gain over cap 10\n(there 0.500)"
    (curve,) = [line for line in panel.lines if len(line.get_xdata()) == 3]
    assert list(curve.get_ydata()) == pytest.approx([0.0, 0.1, 0.2])
    (mark,) = [line for line in panel.lines if line.get_marker() == "P"]
    assert mark.get_xdata()[0] == pytest.approx(100 * 10**0.5)
    assert mark.get_ydata()[0] == pytest.approx(0.15)
    (band,) = panel.collections
    assert {y for x, y in band.get_paths()[0].vertices if x == 1000} == {0.15, 0.25}


def test_costs_and_budget_are_in_the_unit_of_their_axis(drawn: dict[str, Any]) -> None:
    table = hand_made({"nested": [2e9, 3e9, 4e9]}, budget=3e9)
    table = table.assign(metric=table["metric"].replace("latency", "peak_memory"))
    steps = table["op"] == "training_step"
    table.loc[steps, "q25"] = table["value"] - 1e8
    table.loc[steps, "q75"] = table["value"] + 5e8
    history_length.draw(table, HISTORY, Path("nowhere"))
    (figure,) = drawn.values()
    panel = figure.axes[2]
    assert panel.get_ylabel() == "peak memory of a step (GB)"
    (budget,) = [line for line in panel.lines if line.get_color() == style.PAPER_COLOR]
    assert set(budget.get_ydata()) == {3.0}
    (costs,) = [line for line in panel.lines if line.get_marker() == "P"]
    assert list(costs.get_ydata()) == pytest.approx([2.0, 3.0, 4.0])
    (bars,) = panel.containers[0][2]
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [pytest.approx([n - 0.1, n + 0.5]) for n in (2, 3, 4)]


def test_as_long_a_history_is_no_longer_one() -> None:
    costs = {"jagged": [1.0, 4.0, 64.0], "padded_flash": [2.0, 4.0, 64.0]}
    (claim,) = tables.claims(hand_made(costs, budget=4.0)).to_dict("records")
    assert (claim["this run"], claim["holds"]) == ("100 against 100 (log)", "no")
