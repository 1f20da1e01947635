"""Errors of attention on random batches as a table with its goal, from made-up errors."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from kept_figures import goals_before_and_after
from made_up_results import MANIFEST

from jagged_ranking import results
from jagged_ranking.figures.exactness_goals import (
    ALL,
    BATCHES,
    EXACTNESS,
    OURS,
    PYTORCH,
    exactness_rows,
)

TITLE = "Attention: errors on random batches"
DTYPES = {"float32": 4_000, "bfloat16": BATCHES - 4_000}  # batches


def _error(dtype: str, result: str, provider: str) -> dict[str, Any]:
    """Ours in bfloat16 has no number on the worst batch."""
    config: dict[str, Any] = {"batches": DTYPES[dtype], "worst": 1.25, "worst_of": 7}
    if provider == OURS:
        config |= {"times": 1.0, "times_of": 9, "by_floor": 0.5, "by_floor_of": 9,
                   "wrong": 0, "other_bits": 0, "lucky": 3}  # fmt: skip
        if dtype == "bfloat16":
            config |= {"worst": "inf", "times": "inf", "by_floor": "inf", "wrong": 2}
    return results.row(
        op=EXACTNESS, provider=provider, workload=dtype, mode=result, metric="error",
        unit="roundings", value=0.5 if provider == OURS else 0.625, config=config,
    )  # fmt: skip


def _found(
    times: float | str = 3.99, wrong: int = 0, other_bits: int = 0, batches: int = BATCHES
) -> pd.DataFrame:
    """Two results of each dtype; the arguments are those of all."""
    config = {"batches": batches, "times": times, "by_floor": 1.5, "wrong": wrong,
              "other_bits": other_bits, "lucky": 5}  # fmt: skip
    of_all = results.row(
        op=EXACTNESS, provider=OURS, workload=ALL, mode=ALL, metric="wrong", unit="batches",
        value=wrong, config=config,
    )  # fmt: skip
    errors = [
        _error(dtype, result, provider)
        for dtype in DTYPES
        for result in ("o", "dv")
        for provider in (OURS, PYTORCH)
    ]
    return results.frame([*errors, of_all])


def test_each_dtype_and_result_has_a_row() -> None:
    *rows, of_all = exactness_rows(_found())
    assert [(row["dtype"], row["result"]) for row in rows] == [
        (dtype, result) for dtype in DTYPES for result in ("o", "dv")
    ]
    assert rows[0]["batches"] == "4,000"
    assert (rows[0]["ours, median"], rows[0]["PyTorch, median"]) == ("0.500", "0.625")
    assert (rows[0]["ours, worst"], rows[0]["times PyTorch's"]) == ("1.25", "1.00")
    assert (rows[0]["by the tests' floor"], rows[0]["wrong"]) == ("0.50", "0")
    assert (rows[0]["lucky"], of_all["lucky"]) == ("3", "5")
    assert {row["met"] for row in rows} == {row["at most"] for row in rows} == {""}


def test_what_has_no_number_is_inf() -> None:
    *_, row, _ = exactness_rows(_found())
    assert (row["ours, worst"], row["PyTorch, worst"]) == ("inf", "1.25")
    assert (row["times PyTorch's"], row["by the tests' floor"], row["wrong"]) == ("inf", "inf", "2")


@pytest.mark.parametrize(
    ("found", "met"),
    [
        (_found(), "yes"),
        (_found(times=4.01, wrong=1), "**no**"),
        (_found(times="inf", wrong=1), "**no**"),
        (_found(other_bits=1), "**no**"),
        (_found(batches=BATCHES - 1), "yes, of those here"),
        (_found(batches=BATCHES - 1, wrong=1), "**no**, of those here"),
        (_found(batches=20, other_bits=1), "**no**, of those here"),
    ],
    ids=["met", "further", "no number", "other bits", "fewer", "fewer, further", "few, bits"],
)
def test_the_goal_is_of_all(found: pd.DataFrame, met: str) -> None:
    *_, of_all = exactness_rows(found)
    config = json.loads(found["config"].iloc[-1])
    assert of_all["met"] == met
    assert float(of_all["times PyTorch's"]) == float(config["times"])
    assert (of_all["wrong"], of_all["other bits"]) == (
        str(config["wrong"]), str(config["other_bits"])
    )  # fmt: skip
    assert of_all["batches"] == f"{config['batches']:,}"


def test_the_page_of_goals_has_it(tmp_path: Path) -> None:
    made_by = {**MANIFEST, "id": EXACTNESS}
    before, after = goals_before_and_after(_found(), made_by, TITLE, tmp_path)
    assert "Not measured." in before.split("###")[0]
    assert "| all | all | 10,000 |" in after
    assert "| 3.99 | 4.00 | 1.50 | 0 | 5 | 0 | yes |" in after


def test_other_results_have_no_errors() -> None:
    assert exactness_rows(results.frame([])) == []
