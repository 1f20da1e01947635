"""How far attention is from float64 on random batches, beside PyTorch's own mathematics."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from jagged_ranking import results
from jagged_ranking.figures.verdicts import bound, number
from jagged_ranking.measure.lineup import OURS

EXACTNESS = "exactness"  # the id and the op of what `tests/support/random_batches.py` finds
PYTORCH = "PyTorch"  # the provider beside ours
GOAL, BATCHES = 4.0, 10_000
ORDERS = 16  # of PyTorch's sums, beside its own, where ours are further off than the goal
NOTE = (
    f"{BATCHES:,} random batches (lengths, heads, head_dims, masks, scales, dtypes), drawn by "
    "`tests/support/random_batches.py`, against attention in float64. Errors are the largest of a "
    "batch, in roundings: one is half of the dtype's eps times the largest number of the result. "
    "*Times PyTorch's*: the error by that of PyTorch's mathematics in the same dtype, on the batch "
    "where it is the most; where PyTorch is exact by chance, or has no number, by one rounding. "
    "*By the tests' floor*: as tests judge, by at least a rounding to float32 (its eps), in every "
    "dtype, of the sums of absolute values that the result cancels from. "
    "In half precision lse says little: it is in float32 for both, but PyTorch's is of scores that "
    "were rounded before. *Wrong*: batches with a result further off than the goal, or than tests "
    "let pass, or without a number. Few sums can be close in one order and not in another: *lucky* "
    f"are those of the wrong ones where PyTorch, with queries' and keys' columns in {ORDERS} other "
    "orders, is in one of them as far off as the goal asks. Each batch is computed twice; *other "
    "bits*: batches whose second results differed from the first. Goal: at most "
    f"{GOAL:g} times PyTorch's, nothing wrong, and no other bits."
)
ALL = "all"


def exactness_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each dtype and result, and one for all, which has the goal."""
    found = results.select(table, op=EXACTNESS, status="ok")
    if found.empty:
        return []
    judged = ("batches", "times", "by_floor", "wrong", "lucky", "other_bits")
    errors, counted = (results.select(found, metric=metric) for metric in ("error", "wrong"))
    ours, peer = (results.select(errors, provider=name) for name in (OURS, PYTORCH))
    ours, peer = results.with_config(ours, *judged, "worst"), results.with_config(peer, "worst")
    pairs = ours.merge(peer, on=["workload", "mode"], suffixes=("", " of peer"))
    (of_all,) = results.with_config(counted, *judged).to_dict("records")
    return [
        *(
            _row(
                row,
                {
                    "ours, median": number(row["value"]),
                    "ours, worst": number(float(row["worst"])),
                    "PyTorch, median": number(row["value of peer"]),
                    "PyTorch, worst": number(float(row["worst of peer"])),
                },
            )
            for row in pairs.to_dict("records")
        ),
        _row(of_all, {"at most": bound(GOAL), "met": _met(of_all)}),
    ]


def _row(row: Mapping[Any, Any], own: Mapping[str, str]) -> dict[str, str]:
    """With `own`, what rows of results and the one of all do not share. inf is a word in JSON."""
    errors = ("ours, median", "ours, worst", "PyTorch, median", "PyTorch, worst")
    return {
        "dtype": str(row["workload"]),
        "result": str(row["mode"]),
        "batches": f"{row['batches']:,}",
        **{name: own.get(name, "") for name in errors},
        "times PyTorch's": number(float(row["times"]), 2),
        "at most": own.get("at most", ""),
        "by the tests' floor": number(float(row["by_floor"]), 2),
        "wrong": f"{row['wrong']}",
        "lucky": f"{row['lucky']}",
        "other bits": f"{row['other_bits']}",
        "met": own.get("met", ""),
    }


def _met(of_all: Mapping[Any, Any]) -> str:
    """Of fewer batches than the goal is of, what is true of those."""
    said = "**no**" if of_all["wrong"] or of_all["other_bits"] else "yes"
    return said if of_all["batches"] >= BATCHES else f"{said}, of those here"
