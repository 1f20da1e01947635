"""Errors of attention on random batches as a table with its goal, from made-up errors."""

from pathlib import Path

import pandas as pd
import pytest
from kept_figures import goals_before_and_after
from made_up_results import MANIFEST

from jagged_ranking import results
from jagged_ranking.figures.exactness_goals import (
    BATCHES,
    EXACTNESS,
    OURS,
    PYTORCH,
    exactness_rows,
)

TITLE = "Attention: errors on random batches"
DTYPES = {"float32": 4_000, "bfloat16": BATCHES - 4_000}  # batches


def _found(times: float = 3.99, other_bits: int = 0, fewer: int = 0) -> pd.DataFrame:
    """Two results of each dtype; `times` and `other_bits` are those of the last."""
    last = ("bfloat16", "dv")
    return results.frame(
        results.row(
            op=EXACTNESS,
            provider=provider,
            workload=dtype,
            mode=result,
            metric="error",
            unit="roundings",
            value=0.5 if provider == OURS else 0.625,
            config={
                "batches": batches - fewer,
                "worst": float("inf") if provider == OURS and dtype == "bfloat16" else 1.25,
                "worst_of": 7,
                **({"times": times if (dtype, result) == last else 1.0,
                    "times_of": 9,
                    "other_bits": other_bits if (dtype, result) == last else 0}
                   if provider == OURS else {}),
            },
        )
        for dtype, batches in DTYPES.items()
        for result in ("o", "dv")
        for provider in (OURS, PYTORCH)
    )  # fmt: skip


def test_each_dtype_and_result_has_a_row() -> None:
    *rows, _ = exactness_rows(_found())
    assert [(row["dtype"], row["result"]) for row in rows] == [
        (dtype, result) for dtype in DTYPES for result in ("o", "dv")
    ]
    assert rows[0]["batches"] == "4,000"
    assert (rows[0]["ours, median"], rows[0]["PyTorch, median"]) == ("0.500", "0.625")
    assert (rows[0]["ours, worst"], rows[0]["times PyTorch's"]) == ("1.25", "1.00")
    assert {row["met"] for row in rows} == {""}
    assert (rows[-1]["ours, worst"], rows[-1]["PyTorch, worst"]) == ("inf", "1.25")


@pytest.mark.parametrize(
    ("found", "met"),
    [
        (_found(), "yes"),
        (_found(times=4.01), "**no**"),
        (_found(times=float("inf")), "**no**"),
        (_found(other_bits=1), "**no**"),
        (_found(fewer=1), "**no**"),
    ],
    ids=["met", "further", "no number", "other bits", "fewer batches"],
)
def test_the_goal_is_of_all(found: pd.DataFrame, met: str) -> None:
    *rows, of_all = exactness_rows(found)
    assert of_all["met"] == met
    assert of_all["times PyTorch's"] == rows[-1]["times PyTorch's"]
    assert of_all["other bits"] == rows[-1]["other bits"]
    assert of_all["batches"] == f"{found_batches(found):,}"


def found_batches(found: pd.DataFrame) -> int:
    ours = results.with_config(results.select(found, provider=OURS, mode="o"), "batches")
    return sum(ours["batches"].tolist())


def test_the_page_of_goals_has_it(tmp_path: Path) -> None:
    made_by = {**MANIFEST, "id": EXACTNESS}
    before, after = goals_before_and_after(_found(), made_by, TITLE, tmp_path)
    assert "Not measured." in before.split("###")[0]
    assert "| all | all | 10,000 |" in after
    assert "| 3.99 | 4.00 | 0 | yes |" in after


def test_other_results_have_no_errors() -> None:
    assert exactness_rows(results.frame([])) == []
