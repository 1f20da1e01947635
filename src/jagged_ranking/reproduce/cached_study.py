"""Cached and shared keys: the batches that are measured, and compressed histories of data sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from jagged_ranking.measure.cached.cached_measurement import measure_cached
from jagged_ranking.measure.cached.cases import (
    Case,
    decoding_sweeps,
    prefix_sweep,
    scoring_sweep,
)
from jagged_ranking.reproduce.attention_study import measured_in_parts, positive, precision
from jagged_ranking.reproduce.click_logs import describe_data
from jagged_ranking.reproduce.quality_study import with_own


def cache_cases(
    *,
    history_lengths: Sequence[int],
    users: Sequence[int],
    at_users: int,
    at_history: int,
    new_events: int,
    page_size: int,
    prefixes: Sequence[int],
    prefix_users: int,
    prefix_history: int,
    scored_histories: Sequence[int],
    scored_users: int,
    kept_share: float,
    recent: int,
    heads: int,
    head_dim: int,
    device: str,
    seed: int,
) -> list[Case]:
    """bf16 on a GPU, as models are served there; float32 on a CPU.

    Args:
        history_lengths: the longest history at each point of the first sweep of cached queries.
        users: at each point of the second.
        at_users, at_history: what the other sweep holds.
        new_events: of the user with most, each a query; the others have 1 or more.
        page_size: events that lie together in the cache.
        prefixes: tokens that all users share, at each point.
        prefix_users, prefix_history: the batch that they stand in front of.
        scored_histories: events of every user at each point where it is counted who is attended to.
        scored_users: users there.
        kept_share: of their events that are to be kept, 0 to 1.
        recent: queries of each of them that count, the last ones.
        heads, head_dim: of all.
        device: "cuda" or "cpu".
        seed: of all lengths and values.

    Raises:
        ValueError: a number below 1, a share that is none, or no batch at all.
    """
    positive(
        history_lengths=history_lengths,
        users=users,
        at_users=at_users,
        at_history=at_history,
        new_events=new_events,
        page_size=page_size,
        prefix_users=prefix_users,
        prefix_history=prefix_history,
        scored_histories=scored_histories,
        scored_users=scored_users,
        recent=recent,
        heads=heads,
        head_dim=head_dim,
    )
    if not 0 < kept_share <= 1:
        raise ValueError(f"kept_share must be above 0 and at most 1, got {kept_share:g}")
    shape = {**precision(device), "heads": heads, "head_dim": head_dim, "seed": seed}
    cases = decoding_sweeps(
        history_lengths,
        users,
        at_users=at_users,
        at_history=at_history,
        queries=new_events,
        page_size=page_size,
        **shape,
    )
    cases += prefix_sweep(prefixes, users=prefix_users, history=prefix_history, **shape)
    cases += scoring_sweep(
        scored_histories, users=scored_users, kept=kept_share, recent=recent, **shape
    )
    if not cases:
        raise ValueError(
            "no batch: nothing in any of history_lengths, users, prefixes, scored_histories"
        )
    return cases


def describe_cases(cases: Sequence[Case]) -> pd.DataFrame:
    """A table of what a list of cases holds, a row each."""
    columns = {
        "B": "users",
        "max_len": "longest history",
        "tokens": "events",
        "queries": "queries",
        "prefix": "prefix",
        "kept": "kept",
        "H": "heads",
        "D": "head_dim",
        "dtype": "dtype",
    }
    rows = []
    for case in cases:
        facts = case.facts()
        row = {title: facts[key] for key, title in columns.items()}
        rows.append({"operation": case.op, "batch": case.name, **row})
    return pd.DataFrame(rows).set_index(["operation", "batch"])


def measured_cached(cases: Sequence[Case], *, device: str, **options: Any) -> pd.DataFrame:
    """`measure_cached` a case at a time, see `measured_in_parts`."""
    parts = [(f"{case.op}, {case.name}", ([case],)) for case in cases]
    dtype = cases[0].dtype
    return measured_in_parts(measure_cached, parts, dtype=dtype, device=device, **options)


def quality_by_compression(
    folders: Sequence[Path],
    *,
    policies: Sequence[str],
    compressions: Sequence[float],
    seeds: Sequence[int],
    options: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]] | None = None,
    recent: int,
    replicates: int,
    device: str,
    workers: int | None = None,
    run_id: str = "",
) -> pd.DataFrame:
    """`compressed_quality` of the data sets, each training kept in `build/cache`.

    Args:
        folders: prepared data sets.
        policies, compressions, recent, replicates, device, workers, run_id: see
            `compressed_quality`.
        seeds: one training each.
        options: of `TrainConfig`, of all trainings.
        own: seeds and options that a data set has of its own, see `with_own`.

    Raises:
        ValueError: an unknown policy or option, no seed, a compression below 1, or what `with_own`
            does not take.
    """
    # What trains, and so scikit-learn, is imported where it is needed: every notebook imports this.
    from jagged_ranking.reproduce.compressed_quality import Plan, compressed_quality

    shared = {"seeds": seeds, "options": options}
    plans = [
        Plan(folder, **with_own(shared, own, describe_data(folder)["name"])) for folder in folders
    ]
    return compressed_quality(
        plans,
        policies=policies,
        compressions=compressions,
        recent=recent,
        replicates=replicates,
        device=device,
        workers=workers,
        run_id=run_id,
    )
