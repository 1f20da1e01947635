"""Made-up results of cached and shared keys, in the shape of a GPU run."""

from typing import Any

import pandas as pd
import torch
from made_up_results import MANIFEST

from jagged_ranking import results
from jagged_ranking.measure.cached.cached_ops import APPEND, DECODE, KEEP, PREFIX, SCHEDULE
from jagged_ranking.measure.cached.cases import (
    Case,
    decoding_sweeps,
    prefix_sweep,
    scoring_sweep,
)
from jagged_ranking.measure.ceilings import Ceilings

CACHED = {**MANIFEST, "id": "09_history_cache"}
POLICIES = {"pivotal": 0.01, "h2o": 0.012, "newest": 0.03, "random": 0.05}
_SHAPE: dict[str, Any] = {"heads": 4, "head_dim": 64, "dtype": torch.bfloat16}


def cached_results() -> pd.DataFrame:
    """Ours at 1.3 of the limit and a launch, pages of FA2 missing, a copy at 4 times the limit,
    padded keys out of memory at the longest; a prefix 3 times as fast as its copies, statistics 5
    times as fast as all scores, and four policies on one log."""
    cases = decoding_sweeps(
        [1024, 16384], [1, 64, 1024], at_users=64, at_history=4096, queries=64, **_SHAPE
    )
    cases += prefix_sweep([64, 4096], users=512, history=512, **_SHAPE)
    cases += scoring_sweep([1000, 4000], users=64, kept=0.2, recent=400, **_SHAPE)
    rows = [row for case in cases for row in _rows(case)]
    return results.frame([*rows, *_compressed("log_a"), *_compressed("log_b")])


def _rows(case: Case) -> list[dict[str, Any]]:
    ceilings = Ceilings(3.0e12, 740e12, "bfloat16")
    facts = case.facts()
    once = facts["tokens"] * case.heads * case.head_dim * 2.0
    rows: list[dict[str, Any]] = []
    for mode in ("forward", "forward+backward") if case.op == PREFIX else ("forward",):
        moved = once * (4 if mode == "forward+backward" else 2)
        limit = ceilings.limit_ms({f"bytes_{mode}": moved, f"flops_{mode}": 0.0}, mode)
        config = {**facts, "limit_ms": limit, "device": MANIFEST["device"]}
        one: dict[str, Any] = {"op": case.op, "workload": case.name, "mode": mode, "config": config}
        ours = 1.3 * limit + 0.002
        times = {"jagged": ours, **_peers(case, limit, ours)}
        for provider, ms in times.items():
            latency: dict[str, Any] = {"samples": [0.97 * ms, ms, 1.03 * ms]}
            if provider == "dense_sdpa" and case.history == 16384:
                latency = {"status": "out_of_memory", "message": "refused"}
            rows.append(
                results.row(provider=provider, metric="latency", unit="ms", **latency, **one)
            )
            rows.append(
                results.row(provider=provider, metric="max_abs_error", unit="1", value=1.0, **one)
            )
            if case.op == PREFIX:
                peak = once * (1 + case.prefix / 100 * (provider == "cat"))
                row = {"metric": "peak_memory_minus_inputs", "unit": "bytes", "value": peak}
                rows.append(results.row(provider=provider, **row, **one))
        if case.op == DECODE:
            missing = {"status": "missing", "message": "varlen_attn has no pages"}
            row = {"metric": "latency", "unit": "ms", "provider": "varlen_paged"}
            rows.append(results.row(**row, **missing, **one))
        built = {DECODE: SCHEDULE, "key_statistics": KEEP}.get(case.op)
        if built:
            row = {**one, "op": built, "provider": "jagged", "metric": "latency", "unit": "ms"}
            rows.append(results.row(samples=[0.03, 0.031, 0.032], **row))
    return rows


def _peers(case: Case, limit: float, ours: float) -> dict[str, float]:
    if case.op == DECODE:
        return {"varlen_gathered": 4 * limit + 0.01, "dense_sdpa": 9 * limit + 0.02}
    if case.op == APPEND:
        return {"padded": 0.8 * ours, "cat": 5 * ours + 0.1}
    return {"cat": 3 * ours} if case.op == PREFIX else {"dense_scores": 5 * ours}


def _compressed(dataset: str) -> list[dict[str, Any]]:
    rows = []
    for policy, lost in POLICIES.items():
        for compression in (1.0, 2.0, 5.0, 10.0):
            gone = lost * (compression - 1)
            config: dict[str, Any] = {"compression": compression, "kept": 200 / compression}
            config |= {"whole": 200.0}
            one: dict[str, Any] = {"op": "ranking_by_compression", "provider": policy}
            one |= {"workload": dataset, "mode": "test", "unit": "1"}
            for seed in range(2):
                value = 0.8 - gone + 0.001 * seed
                facts = {**config, "seed": seed}
                rows.append(results.row(metric="gauc", value=value, config=facts, **one))
            if compression > 1:
                facts = {**config, "low": -gone - 0.01, "high": -gone + 0.01}
                row = {"metric": "gauc_difference", "value": -gone}
                rows.append(results.row(config=facts, **row, **one))
    one = {"op": "persistence", "provider": "target_attention", "workload": dataset}
    one |= {"mode": "test", "unit": "1"}
    for metric, value in (("persistence_ratio", 0.9), ("pivotal_kept", 0.8), ("pivotal", 0.4)):
        rows.append(results.row(metric=metric, value=value, config={"seed": 0}, **one))
    return rows
