"""The batches that the speed and memory notebooks measure: the same ones in both."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from click_data import open_dataset
from jagged_ranking.measure import (
    Workload,
    length_sweep,
    small_workloads,
    waste_sweep,
    with_options,
    workloads,
)

SIZES = ("full", "small")


def study_batches(
    *,
    names: Sequence[str],
    size: str,
    wastes: Sequence[float],
    waste_users: int,
    waste_max_len: int,
    max_lens: Sequence[int],
    padded_tokens: int,
    heads: int,
    head_dim: int,
    data: str | None,
    data_users: int,
    device: str,
    seed: int,
) -> list[Workload]:
    """Named workloads, the two sweeps, and a batch of real histories.

    bf16 on a GPU, as models are trained there; float32 on a CPU.

    Args:
        names: of the workloads A-G and N (see `jagged_ranking.measure.workloads`).
        size: "full", or "small" for the same distributions at a size for a CPU.
        wastes: padding waste at each point of the first sweep, 0 to 1.
        waste_users: users in each batch of the first sweep.
        waste_max_len: the longest history in each batch of the first sweep.
        max_lens: the longest history at each point of the second sweep.
        padded_tokens: users times longest history at each point of the second sweep.
        heads: heads in the sweeps and the real batch.
        head_dim: head_dim there.
        data: a prepared dataset, whose histories make one batch more; None for none.
        data_users: users in that batch, drawn at random.
        device: "cuda" or "cpu".
        seed: of all lengths.

    Raises:
        ValueError: a name or size that there is not.
    """
    if size not in SIZES:
        raise ValueError(f"size must be one of {', '.join(SIZES)}, not {size!r}")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    shape: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "dtype": dtype, "seed": seed}
    known = {w.name[0]: w for w in (workloads if size == "full" else small_workloads)(dtype=dtype)}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no workload {', '.join(unknown)}; there is {', '.join(known)}")
    chosen = with_options([known[name] for name in names], seed=seed)
    if wastes:
        chosen += waste_sweep(wastes, users=waste_users, max_len=waste_max_len, **shape)
    if max_lens:
        chosen += length_sweep(max_lens, padded_tokens=padded_tokens, **shape)
    if data is not None and data_users > 0:
        dataset = open_dataset(data)
        lengths = np.diff(dataset.histories.offsets)
        lengths = np.random.default_rng(seed).permutation(lengths[lengths > 0])[:data_users]
        chosen.append(Workload.from_lengths(dataset.name, lengths.tolist(), **shape))
    return chosen


def describe_batches(batches: Sequence[Workload]) -> pd.DataFrame:
    """A table of what a list of batches holds, a row a batch."""
    columns = {
        "B": "users",
        "H": "heads",
        "D": "head_dim",
        "max_len": "longest history",
        "distribution": "lengths",
        "tokens": "tokens",
        "dtype": "dtype",
    }
    rows = []
    for batch in batches:
        facts = batch.facts()
        row = {"batch": batch.name, **{title: facts[key] for key, title in columns.items()}}
        rows.append({**row, "padding waste": f"{facts['waste']:.0%}"})
    return pd.DataFrame(rows).set_index("batch")
