"""Figures, table and goals of HSTU's attention, from made-up results."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from left_results import save_run
from made_up_results import MANIFEST, attention_results, hstu_results
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba, to_rgba_array
from matplotlib.text import Text

from jagged_ranking import results
from jagged_ranking.figures import (
    goals,
    hstu_figures,
    hstu_goals,
    panels,
    redraw,
    speed,
    style,
    tables,
)
from jagged_ranking.figures.hstu_points import WITHOUT_BIASES
from jagged_ranking.measure.lineup import HSTU_OPS, NOT_TRIED

ID = "07_hstu"
TITLE = "HSTU's attention: time against its authors' kernels"


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    return hstu_results()


def _text(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_every_figure_is_drawn_and_says_who_and_where(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    hstu_figures.draw(measured, {**MANIFEST, "id": ID}, Path("nowhere"))
    assert list(drawn) == [
        f"{ID}_{name}" for name in ("latency", "ratios", "waste", "waste_ratios", "memory")
    ]
    for figure in drawn.values():
        said = _text(figure)
        assert "Imaginary GPU 80GB · bfloat16" in said
        for name in ("jagged", "jagged_softmax", "hstu_triton"):
            assert style.look_of(name).label in said
    for name in ("latency", "waste"):
        assert "limit of the device" in _text(drawn[f"{ID}_{name}"])
        assert "dense PyTorch" in _text(drawn[f"{ID}_{name}"])
    for name in ("ratios", "waste_ratios"):
        said = _text(drawn[f"{ID}_{name}"])
        assert "1.3x" in said
        assert "dense PyTorch" not in said  # hundreds of times ours, where tenths matter
    assert "out of memory" in _text(drawn[f"{ID}_latency"])


def test_columns_are_side_by_side_by_batch(measured: pd.DataFrame, drawn: dict[str, Any]) -> None:
    hstu_figures.draw(measured, {**MANIFEST, "id": ID}, Path("nowhere"))
    figure = drawn[f"{ID}_ratios"]
    labels = [label.get_text().split("\n") for label in figure.axes[-1].get_xticklabels()]
    assert [label[0] for label in labels] == list("BBBBCCCCDDDD")
    assert labels[3][1:] == ["87% waste", "targets", "biases"]
    # The goal is drawn where it holds.
    pieces = [len(found.get_segments()) for found in figure.axes[0].collections if _goal(found)]
    assert pieces == [3 * len(WITHOUT_BIASES)]


def test_ratios_are_of_the_same_batch_and_kind(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    slow = measured.copy()
    mine = (slow["op"] == "hstu_targets") & (slow["workload"] == "C")
    slow.loc[mine & (slow["provider"] == "jagged"), ["value", "q25", "q75"]] *= 2
    hstu_figures.draw(slow, {**MANIFEST, "id": ID}, Path("nowhere"))
    panel = drawn[f"{ID}_ratios"].axes[0]
    look = style.look_of("hstu_triton")
    (line,) = [x for x in panel.lines if x.get_marker() == look.marker]
    heights = dict(zip((round(x) for x in line.get_xdata()), line.get_ydata(), strict=True))
    assert heights[5] == pytest.approx(2.9 / 4, abs=0.02)
    others = [y for x, y in heights.items() if x != 5]
    assert len(others) == 5
    assert min(others) > 1.4


@pytest.fixture
def broken(measured: pd.DataFrame) -> pd.DataFrame:
    """The authors' backward breaks the device on its first batch, B of the mask alone, and is not
    asked again; biases it has not got."""
    table = measured.copy()
    lost = (table["provider"] == "hstu_triton") & (table["mode"] == "forward+backward")
    lost &= table["op"].isin(WITHOUT_BIASES)
    first = lost & (table["workload"] == "B") & (table["op"] == "hstu")
    table.loc[lost, "status"] = "error"
    table.loc[lost, "message"] = f"{NOT_TRIED}on B, it broke the device"
    table.loc[first, "message"] = "on B, it broke the device"
    table.loc[lost, ["value", "q10", "q25", "q75", "q90"]] = np.nan
    return table


@pytest.mark.parametrize(
    ("name", "status", "columns"),
    [
        ("latency", "error", {0}),
        ("latency", "not_tried", {1, 4, 5, 8, 9}),
        ("waste", "error", set()),
        ("waste", "not_tried", {50, 85, 95}),
    ],
)
def test_who_failed_or_was_not_tried_is_marked_in_its_column(
    broken: pd.DataFrame, drawn: dict[str, Any], name: str, status: str, columns: set[int]
) -> None:
    hstu_figures.draw(broken, {**MANIFEST, "id": ID}, Path("nowhere"))
    figure = drawn[f"{ID}_{name}"]
    said, marker, _ = panels.LOST[status]
    assert (said in _text(figure)) == bool(columns)
    places = [_marked(panel, marker) for panel in figure.axes]
    forward, backward = places[: len(places) // 2], places[len(places) // 2 :]
    assert not any(forward)
    kinds = [True] if name == "latency" else [op in WITHOUT_BIASES for op in HSTU_OPS]
    assert backward == [columns if has else set() for has in kinds]


def _marked(panel: Any, marker: str) -> set[int]:
    color = to_rgba(style.look_of("hstu_triton").color)
    marks = [line for line in panel.lines if line.get_marker() == marker]
    assert all(to_rgba(line.get_color()) == color for line in marks)
    return {round(x) for line in marks for x in line.get_xdata()}


def test_who_has_no_biases_lacks_them_in_both_modes(broken: pd.DataFrame) -> None:
    table = tables.hstu(broken).set_index("workload")
    assert table.loc["B, biases", "HSTU's Triton"] == "n/a"


def test_tables_tell_what_failed_from_what_was_not_tried(broken: pd.DataFrame) -> None:
    cells = tables.hstu(broken).set_index("workload")["HSTU's Triton"]
    assert cells["B"].endswith(" / error")
    assert {cells[name].split(" / ")[1] for name in ("B, targets", "C", "D, targets")} == {
        "not tried"
    }
    found = _goals(broken)
    assert found["B", "forward+backward", ""]["authors' (ms)"] == "error"
    assert found["C", "forward+backward", "targets"]["authors' (ms)"] == "not tried"
    assert found["C", "forward+backward", "targets"]["met"] == "not measured"


@pytest.mark.parametrize("preset", ["paper", "smoke"])
def test_a_smoke_run_is_marked(measured: pd.DataFrame, drawn: dict[str, Any], preset: str) -> None:
    hstu_figures.draw(measured, {**MANIFEST, "id": ID, "preset": preset}, Path("nowhere"))
    assert {"smoke run" in _text(figure) for figure in drawn.values()} == {preset == "smoke"}


def test_other_studies_draw_nothing_of_it_nor_it_of_them(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    assert speed.draw(measured, MANIFEST, Path("nowhere")) == []
    other = results.select(attention_results(), workload="A")
    for table in (other, results.frame([])):
        assert hstu_figures.draw(table, MANIFEST, Path("nowhere")) == []
    assert not drawn


def test_the_table_has_a_row_for_each_batch_and_kind(measured: pd.DataFrame) -> None:
    table = tables.hstu(measured).set_index("workload")
    assert len(table) == 3 * len(HSTU_OPS)
    assert table.loc["C", "dense PyTorch"] == "OOM"
    assert table.loc["B, biases", "HSTU's Triton"] == "n/a"
    assert [table.loc[name, "schedule"] for name in ("B", "B, targets")] == ["0.0300", "0.0500"]
    assert [title for title, _ in tables.summaries(measured)] == [
        "HSTU's attention. Latency in ms, forward / forward+backward, medians"
    ]


def _goals(table: pd.DataFrame) -> dict[tuple[str, str, str], dict[str, str]]:
    rows = hstu_goals.hstu_rows(table)
    return {(row["workload"], row["mode"], row["with"]): row for row in rows}


def test_the_goal_is_against_the_authors(measured: pd.DataFrame) -> None:
    found = _goals(measured)
    c = found["C", "forward", ""]
    assert float(c["times faster"]) == pytest.approx(2.9 / 2.0, abs=0.02)
    assert (c["at least"], c["met"]) == ("1.30", "yes")
    assert found["waste 95%", "forward", ""]["met"] == "**no**"  # a launch is most of it
    assert found["waste 50%", "forward", "targets"]["at least"] == ""
    assert {kind for _, _, kind in found} == {"", "targets"}


@pytest.mark.parametrize(("waste", "goal"), [(0.8451, "1.30"), (0.8449, "")])
def test_the_goal_of_the_sweep_begins_where_waste_is_said_to_be_85(
    measured: pd.DataFrame, waste: float, goal: str
) -> None:
    table = results.select(measured, workload=["waste 85%", "B"])
    config = table["config"].str.replace(r'"waste": [0-9.]+', f'"waste": {waste}', regex=True)
    found = _goals(table.assign(config=config))
    assert found["waste 85%", "forward", ""]["waste"] == f"{waste:.0%}"
    assert found["waste 85%", "forward", ""]["at least"] == goal
    assert found["B", "forward", ""]["at least"] == "1.30"  # of any waste


def test_a_named_batch_is_judged_by_its_name(measured: pd.DataFrame) -> None:
    """Not by its waste, as those of the sweep are."""
    table = results.select(measured, workload="C").assign(workload="other")
    config = table["config"].str.replace(r'"waste": [0-9.]+', '"waste": 0.95', regex=True)
    other = _goals(table.assign(config=config))["other", "forward", ""]
    assert (other["waste"], other["at least"], other["met"]) == ("95%", "", "")


def test_a_limit_is_of_its_mode(measured: pd.DataFrame) -> None:
    """The backward moves and reckons more than the forward."""
    found = _goals(measured)
    ours = results.select(measured, provider="jagged", workload="C", op="hstu", metric="latency")
    facts = results.with_config(ours, "limit_ms").to_dict("records")
    limits = {one["mode"]: float(one["limit_ms"]) for one in facts}
    for mode, limit in limits.items():
        assert found["C", mode, ""]["limit (ms)"] == tables.number(limit)
    assert limits["forward+backward"] > limits["forward"]


def test_along_waste_all_is_over_ours_and_the_goal_begins_at_85(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    hstu_figures.draw(measured, {**MANIFEST, "id": ID}, Path("nowhere"))
    panel = drawn[f"{ID}_waste_ratios"].axes[0]
    (goal,) = [line for line in panel.lines if line.get_color() == style.PAPER_COLOR]
    assert [*goal.get_xdata(), *goal.get_ydata()] == [85, 100, 1.3, 1.3]
    color = style.look_of("jagged_softmax").color
    (bars,) = [one for box in panel.containers if box[0].get_color() == color for one in box[2]]
    for low, high in (segment[:, 1] for segment in bars.get_segments()):
        assert high / low == pytest.approx(1.015 / 0.99)  # the quartiles
    assert max(high for segment in bars.get_segments() for high in segment[:, 1]) < 1.2


def test_whom_nobody_has_met_is_not_measured(measured: pd.DataFrame) -> None:
    theirs = measured["provider"] == "hstu_triton"
    alone = measured.loc[~theirs & (measured["workload"] != "D"), :]
    found = _goals(alone)
    assert found["B", "forward", ""]["met"] == "not measured"
    assert found["D", "forward+backward", "targets"]["met"] == "not measured"
    assert found["D", "forward+backward", "targets"]["at least"] == "1.30"
    assert hstu_goals.hstu_rows(results.frame([])) == []


def test_goals_and_figures_come_from_a_folder(
    measured: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(style, "FORMATS", ("svg",))
    folder = tmp_path / "figures" / ID
    save_run(folder, results.select(measured, workload="B"), {**MANIFEST, "id": ID})
    assert [path.name for path in redraw.redraw(folder)] == [
        f"{ID}_{name}.svg" for name in ("latency", "ratios", "memory")
    ]
    block = goals.goal_tables(tmp_path / "figures").split(f"### {TITLE}")[1]
    assert "| B | forward | targets |" in block
    assert "HSTU's attention" in redraw.all_results(tmp_path / "figures")


def _goal(found: Any) -> bool:
    if not isinstance(found, LineCollection):
        return False
    return to_rgba_array(found.get_edgecolor()).tolist() == [list(to_rgba(style.PAPER_COLOR))]
