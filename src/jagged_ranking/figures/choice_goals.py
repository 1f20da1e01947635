"""Of random calls of attention, what is picked against the fastest kernels that could take them."""

import pandas as pd

from jagged_ranking import results
from jagged_ranking.figures.verdicts import number

CHOICE = "choice_regret"  # the id and the op of what `tests/support/choice_regret.py` measures
NEAR, GOAL = 1.03, 0.95
NOTE = (
    "Random calls: lengths, heads, head_dims, masks, lists of keys, scores and dtypes, drawn by "
    "`tests/support/choice_regret.py`. Each pass is timed, turn by turn, by every family of "
    "kernels that can take it, over tiles of each size that there is; the *pick* is what a caller "
    f"gets. Goal: of {GOAL:.0%} of all passes the pick is at most {NEAR - 1:.0%} slower than the "
    "fastest."
)
SLOW = (
    f"Random calls of attention whose pick is more than {NEAR - 1:.0%} slower than the fastest "
    "kernels that could take them"
)
ALL = "both"


def picks(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each pass of each call: batch, pass, call, pick, ms, fastest, its ms, slower."""
    measured = results.with_config(results.select(table, op=CHOICE, status="ok"), "batch", "picked")
    found = []
    for (batch, of_pass), timed in measured.groupby(["batch", "mode"], sort=False):
        own = timed.loc[timed["picked"].astype(bool), :]
        if own.empty:  # of a part of the results
            continue
        picked = own.iloc[0]
        fastest = timed.loc[timed["value"].idxmin(), :]
        found.append(
            {
                "batch": int(batch),
                "pass": of_pass,
                "call": picked["workload"],
                "pick": picked["provider"],
                "ms": picked["value"],
                "fastest": fastest["provider"],
                "its ms": fastest["value"],
                "slower": picked["value"] / fastest["value"],
            }
        )
    return pd.DataFrame(found)


def near_share(found: pd.DataFrame) -> float:
    """Of `picks`, how many are near the fastest; at least GOAL is wanted of all."""
    return float((found["slower"] <= NEAR).mean())


def choice_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each pass, and one for both, which has the goal."""
    found = picks(table)
    if found.empty:
        return []
    passes = {str(name): rows for name, rows in found.groupby("pass", sort=False)}
    rows = []
    for name, of_pass in {**passes, ALL: found}.items():
        near = near_share(of_pass)
        worst = of_pass.loc[of_pass["slower"].idxmax(), :]
        rows.append(
            {
                "pass": name,
                "timed": f"{len(of_pass)}",
                f"at most {NEAR - 1:.0%} slower": f"{near:.1%}",
                "at least": f"{GOAL:.0%}" if name == ALL else "",
                "the slowest pick": f"{worst['slower']:.2f}x",
                "on": str(worst["call"]),
                "met": ("yes" if round(near, 3) >= GOAL else "**no**") if name == ALL else "",
            }
        )
    return rows


def slow_picks(table: pd.DataFrame) -> pd.DataFrame:
    """The passes that the goal does not allow, the slowest first, for reading."""
    found = picks(table)
    if found.empty:
        return found
    slow = found[found["slower"] > NEAR].sort_values("slower", ascending=False)
    return slow.drop(columns=["batch"]).assign(
        **{name: slow[name].map(number) for name in ("ms", "its ms")},
        slower=slow["slower"].map("{:.2f}x".format),
    )
