"""The tables that the README alone has: of the paper's claims, attention and rankers; and some
columns of others."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import pandas as pd

from jagged_ranking.figures import style
from jagged_ranking.figures.affordability import judged_by
from jagged_ranking.figures.cached_goals import compression_table
from jagged_ranking.figures.claims import claims
from jagged_ranking.figures.points import (
    Pair,
    against_best,
    attention,
    modes_of,
    of_group,
    ours_failed,
)
from jagged_ranking.figures.published import PUBLISHED
from jagged_ranking.figures.quality import FLOORS, NAMES, differences, shown_metrics, summary
from jagged_ranking.figures.tables import number

BASELINE = "dense_flash"
# Of an interval above 0, on both sides, below.
SIGNS = {1: " ▲", 0: "", -1: " ▼"}
# Logs whose names begin so are no clicks of anyone, and stand behind those that are.
MADE_UP = "synthetic"
# Those that see no item of the test split.
HONEST_FLOORS = tuple(name for name in FLOORS if not name.endswith("_leak"))
# Up to which, as the abstract of Scissorhands (arXiv 2305.17118) has it, quality does not suffer.
COMPRESSION = "5x"


def paper_claims(results: pd.DataFrame) -> pd.DataFrame:
    """The claims that the paper has a number for."""
    found = claims(results)
    return found.loc[found["paper"] != "", ["claim", "paper", "mode", "this run", "holds"]]


def self_attention(results: pd.DataFrame) -> pd.DataFrame:
    """Named workloads and real histories: ours, and the best peer's and dense flash attention's
    time over ours; forward / forward+backward."""
    table = of_group(attention(results, "latency"), "workloads")
    dense = against_best(table, peer=BASELINE)
    rows = []
    for workload, facts, pairs, ours in _by_workload(table):
        shape = ", ".join(f"{facts[name]:g}" for name in ("B", "H", "D", "max_len"))
        slower = (1 / pair.ratio for pair in dense if pair.workload == workload)
        rows.append(
            {
                "workload": workload,
                "users, heads, head_dim, longest": f"{shape}, {facts['distribution']}",
                "waste": f"{facts['waste']:.0%}",
                "jagged (ours), ms": ours,
                **_best_peer(pairs),
                "dense flash takes": _said(slower, "x", 1),
            }
        )
    return pd.DataFrame(rows)


def target_attention(results: pd.DataFrame) -> pd.DataFrame:
    """The same of few queries over long histories, and ours over the limit of the device."""
    table = of_group(attention(results, "latency"), "target")
    return pd.DataFrame(
        [
            {
                "workload": workload,
                "users x candidates": f"{facts['B']:g} x {facts['queries']:g}",
                "events, longest": f"{facts['tokens']:,}, {facts['max_len']:,}",
                "jagged (ours), ms": ours,
                "over the limit": _said((pair.ours / pair.limit for pair in pairs), "x", 2),
                **_best_peer(pairs),
            }
            for workload, facts, pairs, ours in _by_workload(table)
        ]
    )


def rankers(results: pd.DataFrame) -> pd.DataFrame:
    """A row a model, a column a data set: the mean over seeds of what it is judged by; whether the
    interval of the difference to mean-pooling excludes 0; below, the best floor and what others
    published."""
    found = summary(results)
    if found.empty:
        return pd.DataFrame()
    signs = {
        (row.workload, row.provider, row.metric): SIGNS[int(str(row.side))]
        for row in differences(results).itertuples()
    }
    columns: dict[str, dict[str, str]] = {}
    of_sets = found.groupby("workload", sort=False)
    for dataset, mine in sorted(of_sets, key=lambda named: str(named[0]).startswith(MADE_UP)):
        shown = shown_metrics(mine)
        metric = judged_by(shown) or shown[0]
        means = mine[mine["metric"] == metric].set_index("provider")["mean"]
        cells = {
            style.look_of(model).label: f"{value:.4f}{signs.get((dataset, model, metric), '')}"
            for model, value in means.items()
            if model not in FLOORS
        }
        floors = means[means.index.isin(HONEST_FLOORS)]
        if len(floors):
            best = str(floors.idxmax())
            cells["best floor"] = f"{floors[best]:.4f} ({best})"
        if published := PUBLISHED.get(str(dataset)):
            of_metric = {m: v for (m, name), v in published.scores.items() if name == metric}
            known = [f"{v:.4f} ({style.look_of(m).label})" for m, v in of_metric.items()]
            cells["published"] = ", ".join(known)
        columns[f"{dataset}: {NAMES[metric]}"] = cells
    models = style.ordered(list(dict.fromkeys(found["provider"])))
    labels = [style.look_of(name).label for name in models if name not in FLOORS]
    table = pd.DataFrame(columns, index=pd.Index([*labels, "best floor", "published"])).fillna("")
    table = table[(table != "").any(axis=1)]
    return table.rename_axis("model").reset_index()


def compressed(results: pd.DataFrame) -> pd.DataFrame:
    """What ranking scores on whole histories, and what it loses, by policy, on shorter ones."""
    table = compression_table(results)
    return table if table.empty else table.loc[table["compression"].isin(["1x", COMPRESSION]), :]


def some_columns(
    rows_of: Callable[[pd.DataFrame], list[dict[str, str]]],
    *columns: str,
    by_mode: Sequence[str] = (),
) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """A table of goals, and where we stand, by some of its columns; where `by_mode` says which
    more differ between modes, these stand behind, and the rows of all modes are one."""

    def table(results: pd.DataFrame) -> pd.DataFrame:
        rows = pd.DataFrame(rows_of(results))
        if rows.empty:
            return rows
        if by_mode:
            cells = rows.fillna("").replace("", "–").groupby([*columns], sort=False)[[*by_mode]]
            rows = cells.agg(" / ".join).reset_index()
        return rows.loc[:, [*columns, *by_mode]]

    return table


def _by_workload(table: pd.DataFrame) -> Iterator[tuple[str, pd.Series, list[Pair], str]]:
    """(its name, facts, ours against the best peer in each mode, ours in ms) of each workload;
    where ours ran out of memory or failed, that is said in place of its time."""
    failed = ours_failed(table)
    pairs = {(pair.workload, pair.mode): pair for pair in against_best(table)}
    pairs |= {call: Pair(*call, math.nan, "", math.nan, math.nan) for call in failed}
    modes = modes_of(table)
    for workload, mine in table.groupby("workload", sort=False):
        calls = [call for mode in modes if (call := (str(workload), mode)) in pairs]
        if calls:
            ours = " / ".join(failed.get(call) or number(pairs[call].ours) for call in calls)
            yield calls[0][0], mine.iloc[0], [pairs[call] for call in calls], ours


def _best_peer(pairs: Sequence[Pair]) -> dict[str, str]:
    labels = dict.fromkeys(style.look_of(pair.peer).label for pair in pairs if pair.peer)
    takes = _said((1 / pair.ratio for pair in pairs), "x", 2)
    return {"best peer": " / ".join(labels) or "–", "it takes": takes}


def _said(values: Iterable[float], unit: str = "", digits: int | None = None) -> str:
    """One number a mode, a dash for none."""
    shown = (number(value, digits) + ("" if math.isnan(value) else unit) for value in values)
    return " / ".join(shown) or "–"
