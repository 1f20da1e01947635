"""From results rows of cached and shared keys to what figures and tables show."""

import math

import pandas as pd

from jagged_ranking.figures.affordability import judged_by
from jagged_ranking.figures.points import EXTRA, FACTS, FAILED
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.results import select, with_config

COMPRESSION, PERSISTENCE = "ranking_by_compression", "persistence"
_CACHED = ("most_queries", "prefix", "kept", "recent", "page_size")


def cached(results: pd.DataFrame, op: str, metric: str) -> pd.DataFrame:
    """Rows of an operation and a metric, facts of the batch as columns."""
    return with_config(select(results, op=op, metric=metric), *FACTS, *EXTRA, *_CACHED)


def times_of(results: pd.DataFrame, op: str) -> dict[str, float]:
    """workload -> median ms of what ours does once a batch."""
    rows = select(results, op=op, provider=OURS, metric="latency", status="ok")
    return dict(zip(rows["workload"], rows["value"], strict=True))


def against(table: pd.DataFrame) -> pd.DataFrame:
    """A row for each batch and mode that ours was tried on: its facts, `value` (ours; NaN where it
    ran out of memory or failed), `peer` (the best; "" for none), `best` (its value) and `ratio`
    (best / ours)."""
    good = table[table["status"] == "ok"]
    own = select(table, provider=OURS, status=["ok", *FAILED])
    others = good[good["provider"] != OURS].sort_values("value", kind="stable")
    keys = ["workload", "mode"]
    fastest = others.drop_duplicates(keys)[[*keys, "provider", "value"]]
    fastest = fastest.rename(columns={"provider": "peer", "value": "best"})
    both = own.merge(fastest, on=keys, how="left")
    both["peer"] = both["peer"].fillna("")
    both["ratio"] = both["best"] / both["value"]
    return both


def by_compression(results: pd.DataFrame) -> pd.DataFrame:
    """Test scores of compressed histories: a row a data set, policy and compression, with the mean
    over seeds (`mean`), and what is lost to the whole history (`loss`, `low`, `high`; NaN where
    nothing is compressed), in the metric that the data set is judged by (`metric`)."""
    rows = select(results, op=COMPRESSION, mode="test", status="ok")
    rows = with_config(rows, "compression", "low", "high", "kept", "whole")
    found = []
    for (dataset, policy), mine in rows.groupby(["workload", "provider"], sort=False):
        judged = judged_by(set(mine["metric"]))
        if judged is None:
            continue
        differences = mine[mine["metric"] == f"{judged}_difference"].set_index("compression")
        for compression, scored in mine[mine["metric"] == judged].groupby("compression"):
            known = compression in differences.index
            lost = differences.loc[compression] if known else None
            found.append(
                {
                    "workload": dataset,
                    "policy": policy,
                    "metric": judged,
                    "compression": float(str(compression)),
                    "kept": float(scored["kept"].iloc[0]),
                    "mean": float(scored["value"].mean()),
                    **{
                        name: math.nan if lost is None else float(lost[column])
                        for name, column in (("loss", "value"), ("low", "low"), ("high", "high"))
                    },
                }
            )
    columns = ("workload", "policy", "metric", "compression", "kept", "mean", "loss", "low", "high")
    return pd.DataFrame(found, columns=list(columns))
