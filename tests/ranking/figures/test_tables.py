"""Tables for people, from made-up results."""

from typing import Any

import pandas as pd
import pytest
from made_up_rankers import quality_results, quality_with_floor
from made_up_results import target_results

from jagged_ranking import results
from jagged_ranking.figures import tables
from jagged_ranking.figures.points import ratios


def test_ratios_count_the_schedule_and_keep_failures(measured: pd.DataFrame) -> None:
    table = ratios(measured, "latency", "dense_flash").set_index(["workload", "mode"])
    one = results.select(measured, op="attention", metric="latency", workload="A", mode="forward")
    ms = one.set_index("provider")["value"]
    expected = ms["dense_flash"] / (ms["jagged"] + 0.031)
    row = table.loc[("A", "forward")]
    assert row["ratio"] == pytest.approx(expected)
    assert row["ratio_low"] < row["ratio"] < row["ratio_high"]
    lost = ratios(measured, "latency", "dense_eager").set_index(["workload", "mode"])
    assert lost.loc[("C", "forward"), "baseline_status"] == "out_of_memory"
    assert pd.isna(lost.loc[("C", "forward"), "ratio"])


def test_the_table_says_which_model_counting_beats() -> None:
    ((_, table),) = tables.quality(quality_results())
    assert "below the floor" not in table
    ((_, table),) = tables.quality(quality_with_floor("auc", 0.76, 0.0))
    table = table.set_index("model")
    assert table["below the floor"].to_dict() == {
        "floor: counts": "",
        "mean-pool": "AUC",
        "target attention": "",
        "transformer": "",
    }


def test_tables_of_workloads(measured: pd.DataFrame) -> None:
    table = tables.speed(measured).set_index("workload")
    assert list(table.index) == ["A", "B", "C", "D", "E", "F", "G", "N"]
    assert table.loc["C", "dense, eager"] == "OOM"
    assert table.loc["A", "schedule"] == "0.0310"
    assert " / " in table.loc["A", "jagged (ours)"]
    assert "flash-attn 4" not in table.columns
    assert tables.memory(measured)["unit"].unique().tolist() == ["GB"]
    lines = tables.to_markdown(tables.speed(measured)).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert len(lines) == 10


def test_table_of_target_attention() -> None:
    table = tables.target(target_results()).set_index("workload")
    assert table.loc["T1", "B, queries, H, D, longest"] == "64, 8, 4, 64, 16384"
    assert table.loc["T1", "events"] == "96,285"
    assert table.loc["T1", tables.LIMIT] == "0.0330"
    assert "ours, stream-K" in table.columns
    assert [title for title, _ in tables.summaries(target_results())] == [
        "Target attention. Latency in ms, forward / forward+backward, medians"
    ]


def test_table_of_quality() -> None:
    ((said, table),) = tables.quality(quality_results())
    assert said.startswith("Single candidates: test split")
    table = table.set_index("model")
    assert table.loc["transformer", "seeds"] == "3"
    assert "±" in table.loc["target attention", "gAUC"]
    assert table.loc["floor: counts", "AUC"] == "0.7460"


def test_budgets_say_what_was_tried_and_chosen() -> None:
    def trial(model: str, rate: float, loss: float) -> dict[str, Any]:
        config = {"model": model, "learning_rate": rate, "dim": 32, "best_epoch": 1}
        return results.row(
            op="ranking", provider=model, workload="w", mode="trial", metric="log_loss",
            value=loss, unit="nats", config=config,
        )  # fmt: skip

    rows = [trial("din", 0.1, 0.5), trial("din", 0.2, 0.4), trial("mean_pool", 0.1, 0.3)]
    found = tables.budgets(results.frame([*rows, trial("mean_pool", 0.2, 0.6)]))
    assert found["best options"].tolist() == ["learning_rate 0.2", "learning_rate 0.1"]
    assert found["trials"].tolist() == ["2", "2"]
    assert found["validation log loss"].tolist() == ["0.4000", "0.3000"]
    assert tables.budgets(quality_results()).empty


def test_peaks_of_target_attention_are_in_megabytes_of_both_modes() -> None:
    table = results.select(target_results(), workload="T1")
    for mode, peak in (("forward", 3e6), ("forward+backward", 9e6)):
        where = {"mode": mode, "metric": "peak_memory_minus_inputs", "provider": "jagged"}
        table.loc[results.select(table, **where).index, "value"] = peak
    (row,) = tables.target(table).to_dict("records")
    assert row["peak (MB)"] == "3.00 / 9.00"


def test_one_word_stands_for_both_modes_and_numbers_never_do(measured: pd.DataFrame) -> None:
    table = results.select(measured, workload=["A", "C"]).copy()
    ours = results.select(table, op="attention", metric="latency", provider="jagged").index
    table.loc[ours, "value"] = 2.0
    shown = tables.speed(table).set_index("workload")
    assert shown.loc["A", "jagged (ours)"] == "2.00 / 2.00"
    assert shown.loc["C", "dense, eager"] == "OOM"
    lost = results.select(table, op="attention", metric="latency", provider="flex", workload="A")
    table.loc[lost.index[:1], ["value", "status"]] = [float("nan"), "error"]
    shown = tables.speed(table).set_index("workload").loc["A", "FlexAttention"]
    assert str(shown).startswith("error / ")


def test_the_limit_of_a_row_is_that_of_the_forward(measured: pd.DataFrame) -> None:
    table = results.select(measured, workload="A")
    ours = results.select(table, op="attention", metric="latency", provider="jagged")
    facts = results.with_config(ours, "limit_ms")
    limits = {one["mode"]: float(one["limit_ms"]) for one in facts.to_dict("records")}
    assert limits["forward"] < limits["forward+backward"]
    (row,) = tables.speed(table).to_dict("records")
    assert row[tables.LIMIT] == tables.number(limits["forward"])


@pytest.mark.parametrize(("most", "unit", "shown"), [(1e8, "GB", "0.100"), (0.99e8, "MB", "99.0")])
def test_memory_is_in_gigabytes_from_a_tenth_of_one(
    measured: pd.DataFrame, most: float, unit: str, shown: str
) -> None:
    table = results.select(measured, workload="A", provider="jagged").copy()
    table.loc[table["metric"] == "peak_memory_minus_inputs", "value"] = most
    (row,) = tables.memory(table).to_dict("records")
    assert row["unit"] == unit
    assert row["jagged (ours)"] == f"{shown} / {shown}"


@pytest.mark.parametrize(("value", "below"), [(0.31, "NE"), (0.29, "")])
def test_more_of_a_loss_is_below_the_floor(value: float, below: str) -> None:
    rows = [
        results.row(
            op="ranking", provider=model, workload="w", mode="test", metric="ne", value=one,
            unit="1", config={"seed": 0},
        )
        for model, one in (("counts", 0.3), ("din", value), ("din", value))
    ]  # fmt: skip
    ((_, table),) = tables.quality(results.frame(rows))
    din = table.set_index("model").loc["DIN"]
    assert din.get("below the floor", "") == below
    assert din["NE"] == f"{value:.4f} ± 0.0000"


def test_who_ran_out_of_memory_everywhere_has_a_column(measured: pd.DataFrame) -> None:
    """And who was not there, or has no kernel for it, has none."""
    table = results.select(measured, workload=["A", "B"]).copy()
    for provider, status in (("flex", "out_of_memory"), ("njt_sdpa", "unsupported")):
        at = results.select(table, provider=provider).index
        table.loc[at, "value"] = float("nan")
        table.loc[at, "status"] = status
    shown = tables.speed(table)
    assert shown["FlexAttention"].tolist() == ["OOM", "OOM"]
    assert "nested tensor + SDPA" not in shown
