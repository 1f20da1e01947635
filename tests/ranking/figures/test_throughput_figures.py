"""Figures, tables and goals of whole training steps, from made-up results."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from kept_figures import goals_before_and_after
from made_up_rankers import throughput_results
from made_up_results import MANIFEST, hstu_results
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from jagged_ranking import results
from jagged_ranking.figures import scaling_figures, speed, style, tables, throughput_figures
from jagged_ranking.figures.throughput_goals import throughput_overview, throughput_rows

ID = "10_training_throughput"
MADE_BY = {**MANIFEST, "id": ID}
TITLE = "Whole training steps: time and memory"


@pytest.fixture(scope="module")
def measured() -> pd.DataFrame:
    return throughput_results()


def said_by(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def row_of(rows: list[dict[str, str]], batch: str, model: str, **wanted: str) -> dict[str, str]:
    wanted = {"batch": batch, "model": model, "layers": "4", "mode": "eager", **wanted}
    (found,) = [row for row in rows if wanted.items() <= row.items()]
    return found


def changed(table: pd.DataFrame, value: float, **where: str) -> pd.DataFrame:
    table = table.copy()
    at = results.select(table, **where).index
    assert len(at)
    table.loc[at, "value"] *= value
    return table


def without(table: pd.DataFrame, provider: str, status: str) -> pd.DataFrame:
    """Where the steps of a provider at 85% waste have this status, and no numbers."""
    table = table.copy()
    at = results.select(table, provider=provider, op="throughput", workload="waste 85%").index
    table.loc[at, ["value", "status"]] = [float("nan"), status]
    return table


def test_every_figure_is_drawn_and_says_who_and_where(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    throughput_figures.draw(measured, MADE_BY, Path("nowhere"))
    assert list(drawn) == [
        f"{ID}_{name}" for name in ("time", "memory", "energy", "parts", "modes")
    ]
    for name, figure in drawn.items():
        said = said_by(figure).replace(",\n", ", ")  # above bars a model's name is two lines
        assert "Imaginary GPU 80GB" in said
        for wanted in ("SASRec, 4 layers", "HSTU, 4 layers"):
            assert wanted in said, name
    assert "the paper's models: 1.10x" in said_by(drawn[f"{ID}_time"])
    assert "the paper's models: 1.22x" in said_by(drawn[f"{ID}_memory"])
    assert "out of memory" in said_by(drawn[f"{ID}_time"])
    assert "waiting for the host" in said_by(drawn[f"{ID}_parts"])


def test_a_bar_without_its_batch_is_the_step_by_the_wall(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    throughput_figures.draw(measured, MADE_BY, Path("nowhere"))
    panel = drawn[f"{ID}_parts"].axes[1]
    bars = [bar for bar in panel.patches if isinstance(bar, Rectangle)]
    first = [bar for bar in bars if bar.get_x() == bars[0].get_x()]
    ours = results.select(
        measured, op="throughput", metric="step_time", provider="jagged", workload="waste 85%"
    )
    models = results.with_config(ours, "model", "layers")
    (step,) = models.loc[(models["model"] == "sasrec") & (models["layers"] == 4), "value"][:1]
    batch, *others = (bar.get_height() for bar in first)
    assert batch > 0
    assert sum(others) == pytest.approx(step)
    red = throughput_figures._COLORS[throughput_figures.HOST]
    assert [to_hex(bar.get_facecolor()) for bar in first][-1] == red


@pytest.mark.parametrize(
    "colours", [throughput_figures._COLORS, scaling_figures._PART_COLORS], ids=["10", "12"]
)
def test_greys_of_a_bar_can_be_told_apart(colours: dict[str, str]) -> None:
    greys = sorted(
        {to_rgb(colour)[0] for colour in colours.values() if len({*to_rgb(colour)}) == 1}
    )
    assert len(greys) == 2
    assert greys[1] - greys[0] > 0.2  # were 0.12


def test_goals_are_held_against_padded_flash(measured: pd.DataFrame) -> None:
    rows = throughput_rows(measured)
    without = row_of(rows, "waste 0%", "SASRec")
    assert (without["times faster"], without["at least"]) == ("1.05", "1.00")
    assert (without["at most"], without["met"]) == ("", "yes")
    wasteful = row_of(rows, "waste 85%", "SASRec", layers="8")
    assert (wasteful["times faster"], wasteful["at least"]) == ("2.40", "1.50")
    assert (wasteful["memory / padded flash's"], wasteful["at most"]) == ("0.33", "0.50")
    assert (wasteful["host's share"], wasteful["below"], wasteful["met"]) == ("4.0%", "10%", "yes")
    hstu = row_of(rows, "waste 85%", "HSTU")
    assert (hstu["padded flash (samples/s)"], hstu["times faster"]) == ("n/a", "")
    assert (hstu["at least"], hstu["at most"], hstu["met"]) == ("", "", "yes")
    compiled = row_of(rows, "waste 85%", "SASRec", mode="torch.compile")
    assert (compiled["padded flash (samples/s)"], compiled["at least"]) == ("", "")


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.0978, ("9.8%", "yes")),
        (0.0996, ("10.0%", "**no**")),  # as it is shown, it is not below
        (0.1031, ("10.3%", "**no**")),
    ],
)
def test_a_share_is_shown_as_it_is_judged(
    measured: pd.DataFrame, share: float, said: tuple[str, str]
) -> None:
    table = measured.copy()
    where = {"provider": "jagged", "metric": "host_share", "workload": "waste 85%"}
    table.loc[results.select(table, **where).index, "value"] = share
    row = row_of(throughput_rows(table), "waste 85%", "SASRec")
    assert (row["host's share"], row["met"]) == said


@pytest.mark.parametrize(
    ("metric", "factor", "batch"),
    [
        ("samples_per_second", 0.5, "waste 85%"),
        ("samples_per_second", 0.9, "waste 0%"),
        ("peak_memory", 2.0, "waste 85%"),
        ("host_share", 3.0, "waste 0%"),
    ],
)
def test_each_goal_can_be_missed(
    measured: pd.DataFrame, metric: str, factor: float, batch: str
) -> None:
    where = {"provider": "jagged", "metric": metric, "workload": batch, "op": "throughput"}
    rows = throughput_rows(changed(measured, factor, **where))
    assert row_of(rows, batch, "SASRec")["met"] == "**no**"
    other = {"waste 0%": "waste 85%", "waste 85%": "waste 0%"}[batch]
    assert row_of(rows, other, "SASRec")["met"] == "yes"


def test_a_peer_that_does_not_fit_is_no_miss(measured: pd.DataFrame) -> None:
    table = without(measured, "padded_flash", "out_of_memory")
    row = row_of(throughput_rows(table), "waste 85%", "SASRec")
    assert (row["padded flash (samples/s)"], row["times faster"], row["met"]) == ("OOM", "", "yes")


def test_the_overview_says_the_least_and_the_most_and_where(measured: pd.DataFrame) -> None:
    much, none = throughput_overview(measured).to_dict("records")
    assert (much["padding waste"], much["mode"]) == ("85% to 97%", "eager")
    assert much["times faster"] == (
        "2.40 (waste 85%, SASRec, 4 layers) to 2.59 (globo_clicks, SASRec, 4 layers)"
    )
    assert much["memory / padded flash's"].startswith("0.31 (globo_clicks, SASRec")
    assert (none["padding waste"], none["mode"]) == ("0%", "eager")
    assert none["times faster"] == "1.05 (waste 0%, SASRec, 4 layers)"
    assert none["host's share"] == "4% (waste 0%, HSTU, 4 layers)"
    where = {"provider": "padded_flash", "op": "throughput", "workload": "globo_clicks"}
    lost = measured.copy()
    lost.loc[results.select(lost, **where).index, ["value", "status"]] = [None, "out_of_memory"]
    much = throughput_overview(lost).iloc[0]
    assert much["times faster"].endswith("; padded flash out of memory on 2 of 5")
    slow = changed(measured, 0.5, **{**where, "provider": "jagged", "metric": "samples_per_second"})
    much, none = throughput_overview(slow).to_dict("records")
    assert much["times faster"].startswith("1.30 (globo_clicks")
    assert (much["goal"], none["goal"]) == ("1.5x", "1x")
    assert much["missed"] == "1 of 4: SASRec, 4 layers"
    assert none["missed"] == "0 of 2"
    assert throughput_overview(hstu_results()).empty


def test_modes_are_those_that_a_model_has(measured: pd.DataFrame, drawn: dict[str, Any]) -> None:
    throughput_figures.draw(measured, MADE_BY, Path("nowhere"))
    panels = drawn[f"{ID}_modes"].axes
    assert [panel.get_title() for panel in panels] == ["SASRec, 4 layers", "HSTU, 4 layers"]
    for panel in panels:
        assert [label.get_text() for label in panel.get_xticklabels()] == [
            "eager", "torch.compile", "CUDA\ngraph"
        ]  # fmt: skip


def test_the_papers_numbers_are_lines_to_pass(measured: pd.DataFrame) -> None:
    claims = tables.claims(measured).to_dict("records")
    assert [(claim["paper"], claim["mode"]) for claim in claims] == [
        ("+10%", "eager"),
        ("-18%", "eager"),
    ]
    assert [claim["holds"] for claim in claims] == ["yes", "yes"]
    assert "at 97% waste (globo_clicks, SASRec)" in claims[0]["this run"]
    # 22% more memory than ours is 18% less of ours: as much as without padding, and not enough.
    assert "-17% at 0% waste" in claims[1]["this run"]
    where = {"provider": "jagged", "op": "throughput"}
    slow = changed(measured, 0.3, metric="samples_per_second", **where)
    assert tables.claims(slow).iloc[0]["holds"] == "no"
    config = measured["config"].str.replace("Imaginary GPU 80GB", "CPU (some)")
    assert set(tables.claims(measured.assign(config=config))["holds"]) == {"n/a: not on a GPU"}


def test_tables_have_no_row_without_a_number(measured: pd.DataFrame) -> None:
    """As of a model that cannot be captured in a CUDA graph."""
    (title, before), *_ = tables.throughput_tables(measured)
    cell = (measured["mode"] == "CUDA graph") & measured["config"].str.contains("sasrec")
    assert cell.any()
    failed = measured.assign(status=measured["status"].mask(cell, "unsupported"))
    found = dict(tables.throughput_tables(failed))[title]
    gone = (before["mode"] == "CUDA graph") & (before["model"] == "SASRec")
    assert gone.any()
    pd.testing.assert_frame_equal(found, before.loc[~gone, :].reset_index(drop=True))


def test_tables_have_a_column_a_kind(measured: pd.DataFrame) -> None:
    found = dict(tables.throughput_tables(measured))
    assert list(found) == [
        "Samples a second in training",
        "Peak memory of a training step, GB",
        "Energy of a training step, mJ a sample",
    ]
    without = measured.loc[measured["metric"] != "energy", :]
    assert len(tables.throughput_tables(without)) == 2
    memory = found["Peak memory of a training step, GB"]
    row = memory[(memory["batch"] == "waste 85%") & (memory["model"] == "HSTU")].iloc[0]
    assert (row["jagged (ours)"], row["padded dense"], row["padded flash (SDPA)"]) == (
        "4.00",
        "OOM",
        "n/a",
    )


def test_the_page_of_goals_has_it(measured: pd.DataFrame, tmp_path: Path) -> None:
    before, after = goals_before_and_after(measured, MADE_BY, TITLE, tmp_path)
    assert "\n\nNot measured." in before
    assert "| waste 85% | 85% | SASRec | 8 | eager |" in after


def test_other_studies_draw_nothing_of_it_nor_it_of_them(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    speed.draw(measured, MADE_BY, Path("nowhere"))
    throughput_figures.draw(hstu_results(), MADE_BY, Path("nowhere"))
    throughput_figures.draw(results.frame([]), MADE_BY, Path("nowhere"))
    assert not drawn
    assert throughput_rows(hstu_results()) == []


def test_a_step_that_ours_did_not_take_leaves_a_goal_open(measured: pd.DataFrame) -> None:
    table = without(measured, "jagged", "error")
    row = row_of(throughput_rows(table), "waste 85%", "SASRec")
    assert (row["ours (samples/s)"], row["at least"]) == ("error", "1.50")
    assert row["met"] == "not measured"


def test_overview_and_rows_judge_alike(measured: pd.DataFrame) -> None:
    """As many digits as are shown."""
    where = {"provider": "jagged", "op": "throughput", "metric": "samples_per_second"}
    table = changed(measured, 0.997 / 1.05, workload="waste 0%", **where)
    row = row_of(throughput_rows(table), "waste 0%", "SASRec")
    assert (row["times faster"], row["met"]) == ("1.00", "yes")
    _, none = throughput_overview(table).to_dict("records")
    assert none["missed"] == "0 of 2"


def test_energy_is_of_a_sample_and_its_own(measured: pd.DataFrame) -> None:
    """0.6 J each ms: SASRec of 4 layers at 85% waste takes ours 16 ms of 853 samples, and padded
    flash 2.4 times that."""
    row = row_of(throughput_rows(measured), "waste 85%", "SASRec")
    assert row["J a sample / padded flash's"] == "0.42"
    assert row["memory / padded flash's"] == "0.33"
    tables_of = dict(tables.throughput_tables(measured))
    energy = tables_of["Energy of a training step, mJ a sample"]
    there = (energy["batch"] == "waste 85%") & (energy["model"] == "SASRec")
    mine = energy.loc[there & (energy["layers"] == "4") & (energy["mode"] == "eager"), :].iloc[0]
    assert mine["jagged (ours)"] == "11.3"  # 0.6 * 16 / 853 J
    assert mine["padded flash (SDPA)"] == "27.0"


def test_a_claim_that_is_just_reached_is_reached(measured: pd.DataFrame) -> None:
    """Of two batches one with 1.10 times the samples is half, which is not most."""
    table = results.select(measured, workload=["waste 0%", "waste 85%"], op="throughput")
    sasrec = table["config"].str.contains('"layers": 4') & table["config"].str.contains("sasrec")
    table = results.select(table.loc[sasrec, :], mode="eager", metric="samples_per_second")

    def claim(least: float, most: float) -> dict[str, str]:
        changed_to = table.assign(value=100.0)
        for batch, value in (("waste 0%", least), ("waste 85%", most)):
            at = results.select(table, workload=batch, provider="jagged").index
            changed_to.loc[at, "value"] = value
        (found,) = tables.claims(changed_to).to_dict("records")
        return {str(name): str(said) for name, said in found.items()}

    half = claim(90.0, 110.0)
    assert (half["holds"], half["where"]) == (
        "in part",
        "+10% or better on 1 of 2 batches and models",
    )
    assert (
        half["this run"]
        == "+10% at 85% waste (waste 85%, SASRec), -10% at 0% waste (waste 0%, SASRec)"
    )
    assert claim(110.0, 111.0)["holds"] == "yes"
    assert claim(90.0, 109.0)["holds"] == "no"


def test_times_beside_ours_are_of_eager_steps(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    """Compiled ones take four fifths of that here."""
    throughput_figures.draw(measured, MADE_BY, Path("nowhere"))
    ours = style.look_of("jagged").color
    dots = [
        float(y)
        for panel in drawn[f"{ID}_time"].axes
        for line in panel.lines
        if line.get_color() == ours and line.get_marker() == "o"
        for y in line.get_ydata()
    ]
    assert dots == [1.0] * 12  # four layers on four batches, eight on two; two models


def test_a_bar_is_as_long_as_the_eager_step_whatever_was_measured_first(
    measured: pd.DataFrame, drawn: dict[str, Any]
) -> None:
    """16 ms of SASRec, 4 layers, at 85% waste; what is cut off says how long it is."""
    for table in (measured, measured.iloc[::-1]):
        throughput_figures.draw(table, MADE_BY, Path("nowhere"))
        (much,) = [p for p in drawn[f"{ID}_parts"].axes if p.get_title().startswith("waste 85%")]
        bars = [bar for bar in much.patches if bar.get_x() == much.patches[0].get_x()]
        batch = 0.05 * 0.96 * 16  # made beside the step before
        assert sum(bar.get_height() for bar in bars) == pytest.approx(16 + batch)
    none = drawn[f"{ID}_parts"].axes[-1]
    assert none.get_title().startswith("waste 0%")
    # Of 8 layers every score takes 9 times ours, 288 ms and its batch, and others 51 at most.
    assert "to 302" in [text.get_text() for text in none.texts]
