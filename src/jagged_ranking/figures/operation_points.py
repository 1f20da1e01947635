"""From results rows of the interaction operations to what figures and tables show."""

import pandas as pd

from jagged_ranking.figures.points import EXTRA, FACTS
from jagged_ranking.measure.interaction.catalogue import OPERATIONS
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.results import select, with_config

NOTEBOOK = "05_interaction_kernels"
KEYS = ["op", "dtype", "workload", "mode"]


def operations(results: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Rows of the interaction operations and one metric, facts of the batch as columns."""
    rows = select(results, op=list(OPERATIONS), metric=metric)
    return with_config(rows, *FACTS, *EXTRA)


def main_dtype(table: pd.DataFrame) -> pd.DataFrame:
    """The rows in the dtype that all batches were measured in: the first."""
    return table.loc[table["dtype"] == table["dtype"].iloc[0], :] if len(table) else table


def largest(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the batch with most tokens, of the sweep over tokens."""
    swept = table.loc[table["group"] == "tokens", :]
    return swept.loc[swept["tokens"] == swept["tokens"].max(), :]


def against_limit(table: pd.DataFrame) -> pd.DataFrame:
    """Times as multiples of the limit of the device."""
    scaled = {c: table[c] / table["limit_ms"].astype(float) for c in ("value", "q25", "q75")}
    return table.assign(**scaled)


def standing(results: pd.DataFrame) -> pd.DataFrame:
    """Where ours stands: a row for each operation, dtype, batch and mode that ours was tried on.

    Columns: op, dtype, workload, mode, tokens, status (of ours), ours and limit (ms), over_limit,
    peer (the fastest; "" for none), best (its ms), over_best (ours / best). NaN for what is not
    known.
    """
    table = operations(results, "latency")
    own = table[table["provider"] == OURS]
    own = own[[*KEYS, "tokens", "status", "value", "limit_ms"]]
    own = own.rename(columns={"value": "ours", "limit_ms": "limit"})
    peers = table[(table["provider"] != OURS) & (table["status"] == "ok")]
    fastest = peers.sort_values("value", kind="stable").drop_duplicates(KEYS)
    fastest = fastest[[*KEYS, "provider", "value"]]
    fastest = fastest.rename(columns={"provider": "peer", "value": "best"})
    both = own.merge(fastest, on=KEYS, how="left")
    both["peer"] = both["peer"].fillna("")
    both["limit"] = both["limit"].astype(float)
    both["over_limit"] = both["ours"] / both["limit"]
    both["over_best"] = both["ours"] / both["best"]
    return both
