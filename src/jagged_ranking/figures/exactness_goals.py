"""How far attention is from float64 on random batches, beside PyTorch's own mathematics."""

import pandas as pd

from jagged_ranking import results
from jagged_ranking.figures.verdicts import bound, met, number

EXACTNESS = "exactness"  # the id and the op of what `tests/support/random_batches.py` finds
OURS, PYTORCH = "ours", "PyTorch"  # its providers
GOAL, BATCHES = 4.0, 10_000
NOTE = (
    f"{BATCHES:,} random batches (lengths, heads, head_dims, masks, scales, dtypes), drawn by "
    "`tests/support/random_batches.py`, against attention in float64. Errors are the largest of a "
    "batch, in roundings of the largest number of the result. *Times PyTorch's*: the error by that "
    "of PyTorch's mathematics in the same dtype, on the batch where it is the most; PyTorch is "
    "exact by chance on small batches, so a rounding counts at least (in float32 one of the sums "
    "of absolute values that the result cancels from). Each batch is computed twice; *other bits*: "
    f"batches whose second results differed from the first. Goal: at most {GOAL:g} times "
    "PyTorch's, and no other bits."
)
ALL = "all"


def exactness_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each dtype and result, and one for all, which has the goal."""
    found = results.select(table, op=EXACTNESS, status="ok")
    if found.empty:
        return []
    ours, peer = (results.select(found, provider=name) for name in (OURS, PYTORCH))
    ours = results.with_config(ours, "batches", "worst", "times", "other_bits")
    peer = results.with_config(peer, "worst")
    pairs = ours.merge(peer, on=["workload", "mode"], suffixes=("", " of peer"))
    rows = [
        {
            "dtype": str(row["workload"]),
            "result": str(row["mode"]),
            "batches": f"{row['batches']:,}",
            "ours, median": number(row["value"]),
            "ours, worst": number(row["worst"]),
            "PyTorch, median": number(row["value of peer"]),
            "PyTorch, worst": number(row["worst of peer"]),
            "times PyTorch's": f"{row['times']:.2f}",
            "at most": "",
            "other bits": f"{row['other_bits']}",
            "met": "",
        }
        for row in pairs.to_dict("records")
    ]
    # A batch has one dtype and all results.
    batches = int(pairs.groupby("mode")["batches"].sum().min())
    times, other_bits = float(pairs["times"].max()), int(pairs["other_bits"].sum())
    right = batches >= BATCHES and not other_bits
    return [
        *rows,
        {
            **dict.fromkeys(rows[0], ""),
            "dtype": ALL,
            "result": ALL,
            "batches": f"{batches:,}",
            "times PyTorch's": f"{times:.2f}",
            "at most": bound(GOAL),
            "other bits": f"{other_bits}",
            "met": met(times if right else float("inf"), GOAL),
        },
    ]
