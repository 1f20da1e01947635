"""From results rows of training on several ranks to what figures and tables show."""

import math

import pandas as pd

from jagged_ranking.results import select, with_config

NOTEBOOK = "12_scaling"
MEASURED, SIMULATED = "scaling", "scaling_simulated"
BY_TOKENS, BY_USERS = "by_tokens", "by_users"
# What this project set itself: of so many ranks, with batches balanced by tokens.
EFFICIENCY_GOAL, GOAL_RANKS = 0.9, 4
# What a step is made of, in its order.
PARTS = ("batch", "forward", "backward", "waiting", "exchange", "update")
SIMULATED_PARTS = ("compute", "waiting", "dense", "rows", "update")
ASSUMED = ("gpus_a_node", "nvlink_gb_s", "network_gb_s", "latency_us", "table_rows", "dim")


def measured(results: pd.DataFrame, *metrics: str) -> pd.DataFrame:
    """Rows of these metrics on real ranks; `ranks` and facts of the step as columns."""
    rows = select(results, op=MEASURED, mode="train", metric=metrics)
    return with_config(rows, "ranks", "requests", "model", "tokens", "device_type")


def efficiency(results: pd.DataFrame) -> pd.DataFrame:
    """Samples a second of each number of ranks over as many times those of one rank (the better of
    its two rows, which are the same work), in the columns value, q25, q75; NaN where there is
    none."""
    rows = measured(results, "throughput")
    alone = rows.loc[(rows["ranks"] == 1) & (rows["status"] == "ok"), "value"]
    unit = rows["ranks"] * (float(alone.max()) if len(alone) else math.nan)
    return rows.assign(**{name: rows[name] / unit for name in ("value", "q25", "q75")})


def simulated(results: pd.DataFrame, *metrics: str) -> pd.DataFrame:
    """Rows of these metrics on simulated ranks; what was assumed as columns."""
    rows = select(results, op=SIMULATED, metric=metrics, status="ok")
    return with_config(rows, "ranks", "sigma", "requests", "model", "error", *ASSUMED)


def skew(sigma: float | None) -> str:
    """What lengths are called."""
    return "lengths as logged" if sigma is None or math.isnan(sigma) else f"lognormal, σ {sigma:g}"


def assumptions(table: pd.DataFrame) -> str:
    """Of a simulation, in one line."""
    facts = table.iloc[0]
    return (
        f"assumed: {facts['gpus_a_node']:g} GPUs a node at {facts['nvlink_gb_s']:g} GB/s, "
        f"{facts['network_gb_s']:g} GB/s a GPU between nodes, {facts['latency_us']:g} µs a "
        f"message, {facts['table_rows'] / 1e6:,.0f}M rows of {facts['dim']:g}; no overlap; "
        f"compute fitted to {facts['error']:.0%}"
    )
