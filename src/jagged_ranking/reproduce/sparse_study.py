"""The batches of attention to some of the keys, and measuring them one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from jagged_ranking import results
from jagged_ranking.measure.sparse.patterns import Pattern, Retrieved, SemiLocal, Strided
from jagged_ranking.measure.sparse.seen import keys_seen
from jagged_ranking.measure.sparse.sparse_measurement import measure_sparse
from jagged_ranking.measure.sparse.sparse_workloads import (
    SparseWorkload,
    jagged_lengths,
    random_by_density,
    retrieval,
    strided_by_density,
    strided_by_length,
)
from jagged_ranking.reproduce.attention_study import (
    describe_batches,
    measured_in_parts,
    named_batches,
    positive,
    precision,
    real_batches,
    some,
)
from jagged_ranking.reproduce.cache import cached


def sparse_batches(
    *,
    lengths: Sequence[int],
    tokens: int,
    stride: int,
    local: int,
    block: int,
    density_length: int,
    strides: Sequence[int],
    locals_: Sequence[int],
    densities: Sequence[float],
    block_length: int,
    candidates: Sequence[int],
    top_k: Sequence[int],
    newest: int,
    retrieval_users: int,
    retrieval_length: int,
    names: Sequence[str],
    size: str,
    window: int,
    first: int,
    heads: int,
    head_dim: int,
    data: str | None,
    histories: Sequence[str],
    data_users: int,
    device: str,
    seed: int,
) -> list[SparseWorkload]:
    """Two sweeps of S2-Attention, random blocks, retrieval, and unequal lengths.

    bf16 on a GPU; float32 on a CPU.

    Args:
        lengths: tokens of all users, at each point of the first sweep.
        tokens: in each batch of the sweeps of equal lengths.
        stride, local: of S2-Attention, in blocks.
        block: tokens.
        density_length: tokens of the users of the sweep over strides and local blocks.
        strides, locals_: of it; every pair is a batch.
        densities: of random blocks, causal and not.
        block_length: tokens of their users.
        candidates, top_k: of retrieval; every pair is a batch.
        newest: blocks that candidates see besides those retrieved.
        retrieval_users, retrieval_length: users of those batches, and the longest.
        names: of the workloads A to G and N, for unequal lengths.
        size: "full", or "small" for a CPU.
        window, first: tokens of semi-local attention.
        heads, head_dim: of all but the named workloads.
        data: a prepared dataset, whose histories make one batch of unequal lengths more.
        histories: data sets whose histories make a batch each, see `find_histories`.
        data_users: users in each of those batches, drawn at random.
        device: "cuda" or "cpu".
        seed: of all lengths and blocks.

    Raises:
        ValueError: a name or size that there is not, a number below 1, or no batch at all.
    """
    positive(
        lengths=lengths,
        tokens=tokens,
        stride=stride,
        local=local,
        block=block,
        density_length=density_length,
        strides=strides,
        local_blocks=locals_,
        block_length=block_length,
        candidates=candidates,
        top_k=top_k,
        retrieval_users=retrieval_users,
        retrieval_length=retrieval_length,
        window=window,
        heads=heads,
        head_dim=head_dim,
    )
    shape = {**precision(device), "heads": heads, "head_dim": head_dim, "seed": seed}
    equal: dict[str, Any] = {"tokens": tokens, "block": block, **shape}
    chosen = strided_by_length(lengths, stride=stride, local=local, **equal)
    chosen += strided_by_density(strides, locals_, length=density_length, **equal)
    chosen += random_by_density(densities, length=block_length, **equal)
    chosen += retrieval(
        candidates,
        top_k,
        length=retrieval_length,
        users=retrieval_users,
        newest=newest,
        block=block,
        **shape,
    )
    unequal = named_batches(names, size, device=device, seed=seed)
    unequal += real_batches(data, histories, data_users, **shape)
    chosen += jagged_lengths(
        unequal, stride=stride, local=local, window=window, first=first, block=block
    )
    return some(chosen, "lengths, strides, densities, candidates, workloads, histories, data")


def describe_sparse(batches: Sequence[SparseWorkload]) -> pd.DataFrame:
    """A table of what a list of batches holds, a row a batch."""
    table = describe_batches([one.batch for one in batches])
    table.insert(0, "rule", [one.pattern.kind for one in batches])
    table["density"] = [f"{one.density():.1%}" for one in batches]
    return table


def patterns_of(
    *, stride: int, local: int, window: int, first: int, top_k: int, newest: int, block: int
) -> list[Pattern]:
    """S2-Attention, semi-local attention and retrieval, to be shown beside each other."""
    return [
        Strided(stride=stride, local=local, block=block),
        SemiLocal(window=window, first=first, block=block),
        Retrieved(top_k=top_k, newest=newest, block=block),
    ]


def measured_sparse(
    batches: Sequence[SparseWorkload],
    *,
    patterns: Sequence[Pattern],
    seen_lengths: Sequence[int],
    heads: int,
    head_dim: int,
    seed: int,
    device: str,
    run_id: str,
    **options: Any,
) -> pd.DataFrame:
    """`measure_sparse` a batch at a time, see `measured_in_parts`, and the keys that heads see.

    Args:
        batches: what is timed.
        patterns: whose newest query is looked at,
        seen_lengths: in users of these lengths, with so many
        heads, head_dim: heads of so many numbers.
        seed, device, run_id: of all.
        options: of `measure_sparse`.
    """
    common: dict[str, Any] = {"device": device, "run_id": run_id}
    shape: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "seed": seed}
    tables = [cached(keys_seen, patterns, seen_lengths, **shape, **common)]
    if batches:
        parts = [(one.name, ([one],)) for one in batches]
        dtype = batches[0].batch.dtype
        tables += [measured_in_parts(measure_sparse, parts, dtype=dtype, **common, **options)]
    return pd.concat(tables, ignore_index=True) if tables else results.frame([])
