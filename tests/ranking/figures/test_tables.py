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
