"""What FP8 gives and costs, from made-up numbers."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from kept_figures import goals_before_and_after
from made_up_results import MANIFEST

from jagged_ranking import results
from jagged_ranking.figures.fp8_goals import (
    BF16,
    FP8_PAYS,
    FP8_QUALITY,
    KEPT,
    KERNEL,
    SERVED,
    TRAINED,
    WHOLE,
    fp8_quality_rows,
    fp8_speed_rows,
)

TOOK = {BF16: 2.8, KERNEL: 1.4, KEPT: 2.0, WHOLE: 4.0}
ERRORS = {BF16: 0.002, KERNEL: 0.05}


def _measured(kept: float, workload: str = "G") -> pd.DataFrame:
    where: dict[str, Any] = {"op": FP8_PAYS, "workload": workload, "mode": "forward"}
    took = {**TOOK, KEPT: kept}
    return results.frame(
        [
            *(
                results.row(provider=name, metric="latency", unit="ms", value=ms, **where)
                for name, ms in took.items()
            ),
            *(
                results.row(provider=name, metric="error", unit="", value=error, **where)
                for name, error in ERRORS.items()
            ),
        ]
    )


@pytest.mark.parametrize(("kept", "gained", "met"), [(2.0, "1.40", "yes"), (2.1, "1.33", "**no**")])
def test_the_goal_is_of_the_call_that_serves(kept: float, gained: str, met: str) -> None:
    (row,) = fp8_speed_rows(_measured(kept))
    assert (row["kept keys"], row["at least"], row["met"]) == (gained, "1.40", met)
    assert (row["kernel"], row["all rounded"]) == ("2.00", "0.70")
    assert (row["error, bf16"], row["error, FP8"]) == ("0.0020", "0.0500")
    row, _ = fp8_speed_rows(_measured(kept, "C"))
    assert (row["at least"], row["met"]) == ("", "")


def test_the_page_of_goals_has_it(tmp_path: Path) -> None:
    made_by = {**MANIFEST, "id": FP8_PAYS}
    before, after = goals_before_and_after(
        _measured(2.1), made_by, "Attention in FP8: time and error", tmp_path
    )
    assert "Not measured." in before.split("###")[0]
    assert "| G | 2.80 | 2.00 | 1.33 | 0.70 | 0.0020 | 0.0500 | 1.40 | **no** |" in after


def test_other_results_have_no_rows() -> None:
    assert fp8_speed_rows(results.frame([])) == []
    assert fp8_quality_rows(results.frame([])) == []


def test_a_goal_of_what_was_not_measured_is_open() -> None:
    *_, row = fp8_speed_rows(_measured(2.0, "C"))
    assert (row["workload"], row["at least"], row["met"]) == ("G", "1.40", "not measured")


def test_what_is_lost_is_of_its_metric_with_its_interval() -> None:
    where: dict[str, Any] = {"op": FP8_QUALITY, "workload": "log", "mode": "test", "unit": "1"}
    training = {"model": "sasrec", "seed": 1}
    lost = {"auc": (-0.002, -0.003, -0.001), "log_loss": (0.0004, -0.0001, 0.0009)}
    rows = []
    for metric, (value, low, high) in lost.items():
        before = {"auc": 0.8, "log_loss": 0.3}[metric]
        one = {"metric": metric, "config": training, **where}
        rows.append(results.row(provider=TRAINED, value=before, **one))
        one["config"] = {**training, "low": low, "high": high}
        one["metric"] = f"{metric}_difference"
        rows.append(results.row(provider=SERVED, value=value, **one))
    (row,) = fp8_quality_rows(results.frame(rows))
    assert row == {
        "data": "log",
        "model": "sasrec",
        "seed": "1",
        "auc, as trained": "0.8000",
        "auc, FP8's difference": "-0.00200 [-0.00300, -0.00100]",
        "log_loss, as trained": "0.3000",
        "log_loss, FP8's difference": "+0.00040 [-0.00010, +0.00090]",
    }
