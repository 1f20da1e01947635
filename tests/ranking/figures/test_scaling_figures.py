"""Figures, table and goals of training on several ranks, from made-up results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from made_up_results import MANIFEST, attention_results
from made_up_scaling import scaling_results
from matplotlib.text import Text

from jagged_ranking.figures import scaling_figures, scaling_goals, tables
from jagged_ranking.figures.scaling_points import efficiency

ID = "12_scaling"


def _text(figure: Any) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_every_figure_is_drawn_and_says_what_it_assumes(drawn: dict[str, Any]) -> None:
    scaling_figures.draw(scaling_results(), {**MANIFEST, "id": ID}, Path("nowhere"))
    assert list(drawn) == [f"{ID}_{name}" for name in scaling_figures.TITLES]
    for name in ("efficiency", "step", "simulated"):
        said = _text(drawn[f"{ID}_{name}"])
        assert "balanced by tokens" in said
        assert "balanced by users" in said
    assert "goal at 4: 90%" in _text(drawn[f"{ID}_efficiency"])
    assert "HSTU, 64 requests a rank and step" in _text(drawn[f"{ID}_efficiency"])
    assert "balanced by tokens, lengths as logged" in _text(drawn[f"{ID}_volume"])
    for name in ("simulated", "volume"):
        said = _text(drawn[f"{ID}_{name}"])
        assert "assumed: 8 GPUs a node at 200 GB/s, 40 GB/s a GPU between nodes" in said
        assert "fitted to 4%" in said
    assert "lognormal, σ 1.5" in _text(drawn[f"{ID}_simulated"])


def test_what_was_not_simulated_is_not_drawn(drawn: dict[str, Any]) -> None:
    table = scaling_results()
    scaling_figures.draw(
        table.loc[table["op"] == "scaling", :], {**MANIFEST, "id": ID}, Path("nowhere")
    )
    assert list(drawn) == [f"{ID}_efficiency", f"{ID}_step"]
    drawn.clear()
    scaling_figures.draw(attention_results(), MANIFEST, Path("nowhere"))
    assert not drawn


def test_one_way_to_balance_alone_is_drawn(drawn: dict[str, Any]) -> None:
    table = scaling_results()
    by_users = table.loc[table["provider"] != "by_tokens", :]
    scaling_figures.draw(by_users, {**MANIFEST, "id": ID}, Path("nowhere"))
    assert list(drawn) == [f"{ID}_{name}" for name in ("efficiency", "step", "simulated")]
    assert "balanced by tokens" not in _text(drawn[f"{ID}_efficiency"])


def test_parts_stand_one_above_the_other(drawn: dict[str, Any]) -> None:
    scaling_figures.draw(scaling_results(), {**MANIFEST, "id": ID}, Path("nowhere"))
    panel = drawn[f"{ID}_step"].axes[1]  # by users
    tops = [bar.get_y() + bar.get_height() for bar in panel.containers[-1]]
    assert tops == pytest.approx([65.5, 77.5, 101.5])


def test_efficiency_is_of_as_many_times_one_rank() -> None:
    table = efficiency(scaling_results()).set_index(["provider", "ranks"])["value"]
    assert table["by_tokens", 4] == pytest.approx(0.93)
    assert table["by_users", 4] == pytest.approx(0.70)
    assert pd.isna(table["by_tokens", 8])


def test_the_goal_is_for_four_balanced_by_tokens() -> None:
    rows = scaling_goals.scaling_rows(scaling_results())
    judged = {(row["ranks"], row["batches"]): row["met"] for row in rows if row["met"]}
    assert judged == {("4", "balanced by tokens"): "yes"}
    table = scaling_results()
    four = table["workload"] == "4 ranks"
    rows = scaling_goals.scaling_rows(table.loc[~four, :])
    assert rows[-1]["met"] == "not measured"
    worse = table.assign(value=table["value"].where(~four, 0.9 * table["value"]))
    assert "**no**" in [row["met"] for row in scaling_goals.scaling_rows(worse)]
    assert scaling_goals.scaling_rows(attention_results()) == []
    assert tables.scaling(attention_results()).empty


def _changed(table: pd.DataFrame, factor: float, keep: Any) -> pd.DataFrame:
    numbers = ["value", "q25", "q75"]
    table = table.copy()
    table.loc[keep, numbers] *= factor
    return table


def test_one_rank_is_the_better_of_its_two_rows() -> None:
    table = scaling_results()
    one = (table["workload"] == "1 ranks") & (table["op"] == "scaling")
    slower = _changed(table, 0.5, one & (table["provider"] == "by_users"))
    found = efficiency(slower).set_index(["provider", "ranks"])["value"]
    assert found["by_tokens", 4] == pytest.approx(0.93)
    assert found["by_users", 1] == pytest.approx(0.5)
    assert efficiency(table.loc[~one, :])["value"].isna().all()


def test_rows_are_of_their_ranks_and_their_balance() -> None:
    rows = {
        (row["ranks"], row["batches"]): row for row in scaling_goals.scaling_rows(scaling_results())
    }
    tokens, users = (rows["4", f"balanced by {name}"] for name in ("tokens", "users"))
    # Who waits 0.9 and 36 ms of 20.
    assert (tokens["imbalance"], users["imbalance"]) == ("1.04", "2.80")
    assert (tokens["waiting (ms)"], users["waiting (ms)"]) == ("0.900", "36.0")
    assert (tokens["samples / s"], users["samples / s"]) == ("372", "280")
    assert (tokens["efficiency"], users["efficiency"]) == ("0.93", "0.70")
    assert tokens["memory (GB)"] == "4.00"


def test_each_panel_of_a_simulation_is_of_its_lengths(drawn: dict[str, Any]) -> None:
    table = scaling_results()
    skewed = (table["metric"] == "efficiency") & table["config"].str.contains('"sigma": 1.5')
    scaling_figures.draw(_changed(table, 0.5, skewed), {**MANIFEST, "id": ID}, Path("nowhere"))
    by_tokens = [panel.lines[0].get_ydata()[-1] for panel in drawn[f"{ID}_simulated"].axes]
    assert by_tokens == pytest.approx([65 / 65.1, 0.5 * 65 / 65.1])


def test_what_a_rank_sends_is_in_megabytes_and_balanced_by_tokens(drawn: dict[str, Any]) -> None:
    table = scaling_results()
    others = (table["op"] == "scaling_simulated") & (table["provider"] == "by_users")
    scaling_figures.draw(_changed(table, 2.0, others), {**MANIFEST, "id": ID}, Path("nowhere"))
    sent, kept, _ = drawn[f"{ID}_volume"].axes
    assert [line.get_ydata().tolist() for line in sent.lines] == [[4, 4], [9, 9]]
    assert [line.get_xdata().tolist() for line in sent.lines] == [[8, 1024]] * 2
    assert kept.lines[0].get_ydata() == pytest.approx([500, 500 / 8, 500 / 1024])
