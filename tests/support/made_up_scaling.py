"""Results of training on several ranks that nobody measured."""

from __future__ import annotations

from typing import Any

import pandas as pd
from made_up_results import MANIFEST

from jagged_ranking import results
from jagged_ranking.reproduce.scaling_model import BALANCES

# Samples a second of 1, 2 and 4 ranks.
THROUGHPUT = {"by_tokens": (100.0, 194.0, 372.0), "by_users": (100.0, 170.0, 280.0)}
PARTS = {"batch": 0.5, "forward": 20.0, "backward": 40.0, "exchange": 3.0, "update": 2.0}


def scaling_results() -> pd.DataFrame:
    """1, 2 and 4 ranks; 8 are missing; 1, 8 and 1024 are simulated, at two skews of lengths."""
    rows = []
    for balance in BALANCES:
        for ranks, throughput in zip((1, 2, 4), THROUGHPUT[balance], strict=True):
            where = _where("scaling", balance, ranks)
            wait = (ranks - 1) * (0.3 if balance == "by_tokens" else 12.0)
            draws = [0.98 * throughput, throughput, 1.01 * throughput]
            rows.append(results.row(metric="throughput", unit="1/s", samples=draws, **where))
            for part, ms in {**PARTS, "waiting": wait}.items():
                rows.append(results.row(metric=part, unit="ms", samples=[ms] * 3, **where))
            rows.append(results.row(metric="imbalance", unit="1", value=1 + wait / 20, **where))
            rows.append(results.row(metric="peak_memory", unit="bytes", value=4e9, **where))
        gone: dict[str, Any] = {"status": "missing", "message": "GPUs that are here: 4"}
        rows.append(
            results.row(metric="throughput", unit="1/s", **_where("scaling", balance, 8), **gone)
        )
        for sigma in (None, 1.5):
            for ranks in (1, 8, 1024):
                rows += _simulated(balance, ranks, sigma)
    return results.frame(rows)


def _where(op: str, balance: str, ranks: int, **facts: Any) -> dict[str, Any]:
    config = {"ranks": ranks, "requests": 64, "model": "hstu", "tokens": 1000, **facts}
    return {
        "op": op,
        "provider": balance,
        "workload": f"{ranks} ranks",
        "mode": "train",
        "config": {**config, "device": MANIFEST["device"], "device_type": "cuda"},
    }


def _simulated(balance: str, ranks: int, sigma: float | None) -> list[dict[str, Any]]:
    waiting = (0.1 if balance == "by_tokens" else 8.0) * (ranks > 1)
    parts = {"compute": 60.0, "waiting": waiting, "dense": 1.0, "rows": 2.0, "update": 2.0}
    sizes = {"dense_bytes": 4e6, "rows_bytes": 9e6, "table_bytes": 5e11 / ranks}
    assumed = {"gpus_a_node": 8, "nvlink_gb_s": 200, "network_gb_s": 40, "latency_us": 10}
    facts = {**assumed, "table_rows": 10**9, "dim": 128, "error": 0.04, "sigma": sigma}
    where = _where("scaling_simulated", balance, ranks, **facts)
    rows = [results.row(metric=m, unit="ms", value=v, **where) for m, v in parts.items()]
    rows += [results.row(metric=m, unit="bytes", value=v, **where) for m, v in sizes.items()]
    step = sum(parts.values())
    rows.append(results.row(metric="step", unit="ms", value=step, **where))
    return [*rows, results.row(metric="efficiency", unit="1", value=65.0 / step, **where)]
