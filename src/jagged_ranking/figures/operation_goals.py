"""The interaction operations against their goals, and the README's table of them."""

import math
from pathlib import Path

import pandas as pd

from jagged_ranking.figures import style
from jagged_ranking.figures.operation_figures import LIMIT_GOAL
from jagged_ranking.figures.operation_points import (
    NOTEBOOK,
    largest,
    main_dtype,
    operations,
    standing,
)
from jagged_ranking.figures.points import modes_of
from jagged_ranking.figures.result_folder import has_results, read_results
from jagged_ranking.figures.tables import number, to_markdown
from jagged_ranking.figures.verdicts import NOT_MEASURED, both, bound, met
from jagged_ranking.measure.interaction.catalogue import OPERATIONS

LIMIT_FROM_TOKENS = 1_000_000
PEER_GOAL = 1.0
NOTE = (
    f"Goals: at most {LIMIT_GOAL:g} of the limit (operands read once, results written once, or "
    f"the products' arithmetic) on the batch of {LIMIT_FROM_TOKENS:,} tokens or more, forward and "
    "forward+backward; and on no batch slower than any peer that was right: padded PyTorch "
    "(padding not timed), nested tensors, PyTorch on flat tokens, `segment_reduce`, "
    "`EmbeddingBag`, FBGEMM's Triton operators. A launch takes some 0.003 ms: where the limit is "
    "near that, it says little."
)


def interaction_rows(table: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each operation and dtype."""
    found = standing(table)
    big = largest(operations(table, "latency"))
    measured = big[big["tokens"] >= LIMIT_FROM_TOKENS]["workload"]
    rows = []
    for (name, dtype), mine in found.groupby(["op", "dtype"], sort=False):
        there = mine[mine["workload"].isin(measured)]
        shown = {mode: _value(there, mode, "over_limit") for mode in modes_of(mine)}
        compared = mine[mine["peer"] != ""]
        # where ours has no number beside a peer's, nobody knows the worst
        worst = compared["over_best"].max(skipna=False) if len(compared) else math.nan
        known = [value for value in shown.values() if not math.isnan(value)]
        over = max(known) if len(known) == len(shown) and known else math.nan
        rows.append(
            {
                "operation": str(name),
                "dtype": str(dtype),
                "limit (ms)": " / ".join(number(_value(there, mode, "limit")) for mode in shown),
                **{f"{mode}: ours / limit": _ratio(shown[mode]) for mode in shown},
                "at most": bound(LIMIT_GOAL),
                "slower than a peer on": _slower(compared),
                "worst: ours / peer": _worst(compared),
                "met": both(met(over, LIMIT_GOAL), met(worst, PEER_GOAL) if len(compared) else ""),
            }
        )
    return rows


def operations_table(figures_dir: Path | str) -> str:
    """Markdown: each operation, what it is for, what it has, and its ratio to the limit."""
    ratios, said = _committed(Path(figures_dir) / NOTEBOOK)
    rows = []
    for name, operation in OPERATIONS.items():
        title = f"`{operation.function}`"
        if name != operation.function:
            title += f" ({name.removeprefix(operation.function).strip('_')})"
        rows.append(
            {
                "operation": title,
                "what it is for": operation.purpose,
                "forward": "Triton",
                "backward": "Triton" if operation.backward else "no gradient",
                "CPU": "yes",
                "`torch.compile`": "yes" if operation.traced else "not as one graph",
                "time / limit, forward / forward+backward": ratios.get(name, NOT_MEASURED),
            }
        )
    return "\n\n".join([said, to_markdown(pd.DataFrame(rows))])


def _committed(folder: Path) -> tuple[dict[str, str], str]:
    """(operation -> ratios on the batch with most tokens, what was measured where)."""
    if not has_results(folder):
        return {}, f"*Time over the limit of the device: {NOT_MEASURED}.*"
    run = read_results(folder)
    table = run.table
    most = main_dtype(largest(operations(table, "latency")))
    found = standing(table).merge(most[["workload", "dtype"]].drop_duplicates())
    ratios = {
        str(name): " / ".join(_ratio(_value(mine, mode, "over_limit")) for mode in modes_of(mine))
        for name, mine in found.groupby("op", sort=False)
    }
    where = f"{style.footer(run.manifest, [str(most['dtype'].iloc[0])])}"
    said = f"*Time over the limit of the device at {int(most['tokens'].iloc[0]):,} tokens: {where}*"
    return ratios, said


def _value(mine: pd.DataFrame, mode: str, column: str) -> float:
    """Of an operation on one batch; NaN where it was not measured."""
    rows = mine[mine["mode"] == mode]
    return float(rows[column].iloc[0]) if len(rows) else math.nan


def _ratio(value: float) -> str:
    return NOT_MEASURED if math.isnan(value) else f"{value:.2f}"


def _slower(compared: pd.DataFrame) -> str:
    """Batches (and modes) where the best peer is ahead, of those where there is one."""
    if compared.empty:
        return "no peer"
    slower = compared[compared["over_best"].round(2) > PEER_GOAL]
    return f"{len(slower)} of {len(compared)}"


def _worst(compared: pd.DataFrame) -> str:
    if compared["over_best"].notna().sum() == 0:
        return ""
    row = compared.loc[compared["over_best"].idxmax()]
    peer = style.look_of(str(row["peer"])).label
    return f"{row['over_best']:.2f} ({peer}; {row['workload']}, {row['mode']})"
