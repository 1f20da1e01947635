"""The batches that are measured, as lists of workloads.

Self-attention: `workloads()` are A-G and N; `waste_sweep`, `length_sweep` and `head_dim_sweep` the
sweeps. Target attention: `target_workloads()` are T1-T6, `skew_sweep` holds the tokens and changes
how unequally they are spread. Named ones have small versions for a CPU. Interaction operations:
`token_sweep`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from jagged_ranking.measure.length_distributions import SKEWS, skewed
from jagged_ranking.measure.workloads import Workload


def workloads(*, dtype: torch.dtype = torch.bfloat16) -> list[Workload]:
    """A-G, and N, the shape of the production-like workload in Meta's GDPA post."""
    table = [
        ("A", "uniform", 256, 4, 64, 512),
        ("B", "lognormal", 1024, 4, 64, 1024),
        ("C", "lognormal", 512, 8, 64, 4096),
        ("D", "lognormal", 512, 4, 128, 4096),
        ("E", "lognormal", 2048, 4, 32, 512),
        ("F", "full", 64, 8, 64, 2048),
        ("G", "full", 32, 8, 128, 4096),
        ("N", "uniform", 1152, 4, 128, 2048),
    ]
    return [_from_row(*row, dtype=dtype) for row in table]


def small_workloads(*, dtype: torch.dtype = torch.float32) -> list[Workload]:
    """A-G and N at a size that a CPU measures in seconds: same distributions, fewer users,
    shorter histories, fewer heads. Names end in "-small", since times do not compare."""
    table = [
        ("A-small", "uniform", 32, 2, 32, 128),
        ("B-small", "lognormal", 64, 2, 32, 256),
        ("C-small", "lognormal", 32, 2, 32, 512),
        ("D-small", "lognormal", 32, 1, 64, 512),
        ("E-small", "lognormal", 128, 2, 16, 128),
        ("F-small", "full", 8, 2, 32, 256),
        ("G-small", "full", 4, 2, 64, 512),
        ("N-small", "uniform", 32, 2, 64, 256),
    ]
    return [_from_row(*row, dtype=dtype) for row in table]


def waste_sweep(
    wastes: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 0.85, 0.9, 0.95),
    *,
    users: int = 128,
    heads: int = 4,
    head_dim: int = 64,
    max_len: int = 2048,
    **options: Any,
) -> list[Workload]:
    """Batches of one padded shape with more and more padding in it.

    A padded batch costs the same at every point; only the useful part shrinks. One user always
    has the longest history, so `waste` can be at most (B - 1) / B (1 - 1 / Lmax).
    """
    return [
        Workload(
            name=f"waste {waste:.0%}",
            users=users,
            heads=heads,
            head_dim=head_dim,
            max_len=max_len,
            distribution="waste",
            waste=waste,
            group="waste",
            **options,
        )
        for waste in wastes
    ]


def length_sweep(
    max_lens: Sequence[int] = (128, 256, 512, 1024, 2048, 4096, 8192),
    *,
    padded_tokens: int = 262_144,
    heads: int = 4,
    head_dim: int = 64,
    distribution: str = "lognormal",
    **options: Any,
) -> list[Workload]:
    """Batches of longer and longer histories, B Lmax = `padded_tokens` at every point."""
    return [
        Workload(
            name=f"length {max_len}",
            users=max(1, padded_tokens // max_len),
            heads=heads,
            head_dim=head_dim,
            max_len=max_len,
            distribution=distribution,
            group="length",
            **options,
        )
        for max_len in max_lens
    ]


def head_dim_sweep(
    head_dims: Sequence[int] = (32, 64, 96, 128, 256),
    *,
    users: int = 128,
    heads: int = 4,
    max_len: int = 2048,
    distribution: str = "lognormal",
    **options: Any,
) -> list[Workload]:
    """The same histories with wider and wider heads: tokens and heads stay, work grows with D."""
    return [
        Workload(
            name=f"head_dim {head_dim}",
            users=users,
            heads=heads,
            head_dim=head_dim,
            max_len=max_len,
            distribution=distribution,
            group="head_dim",
            **options,
        )
        for head_dim in head_dims
    ]


def token_sweep(
    users: Sequence[int] = (128, 1024, 4096, 8192),
    *,
    max_len: int = 1024,
    columns: int = 64,
    **options: Any,
) -> list[Workload]:
    """More and more tokens at about the same waste: lognormal histories of more and more users.

    The default has from 17 thousand to 1.1 million tokens; 1024 users have those of workload B.
    """
    return [
        Workload(
            name=f"users {count}",
            users=count,
            heads=1,
            head_dim=columns,
            max_len=max_len,
            distribution="lognormal",
            group="tokens",
            **options,
        )
        for count in users
    ]


def target_workloads(*, dtype: torch.dtype = torch.bfloat16) -> list[Workload]:
    """T1-T6: few candidates a user over long, skewed histories, the shape of serving.

    Lengths are lognormal (sigma 1.2, seed 0) around the given median with user 0 at the longest,
    which makes 96,285, 96,285, 589,110, 16,384, 502,625 and 319,703 tokens.
    """
    table = [
        ("T1", 64, 8, 16384, 512, 4, 64),
        ("T2", 64, 64, 16384, 512, 4, 64),
        ("T3", 512, 8, 16384, 512, 4, 64),
        ("T4", 1, 16, 16384, 512, 4, 64),
        ("T5", 4096, 1, 1024, 64, 4, 64),
        ("T6", 64, 1, 32768, 2048, 4, 128),
    ]
    return [_target_from_row(*row, dtype=dtype) for row in table]


def small_target_workloads(*, dtype: torch.dtype = torch.float32) -> list[Workload]:
    """T1-T6 at a size for a CPU."""
    table = [
        ("T1-small", 16, 4, 512, 32, 2, 32),
        ("T2-small", 16, 16, 512, 32, 2, 32),
        ("T3-small", 64, 4, 512, 32, 2, 32),
        ("T4-small", 1, 8, 1024, 32, 2, 32),
        ("T5-small", 256, 1, 64, 8, 2, 32),
        ("T6-small", 16, 1, 1024, 64, 2, 64),
    ]
    return [_target_from_row(*row, dtype=dtype) for row in table]


def skew_sweep(
    users: Sequence[int] = (16, 64, 256),
    *,
    tokens: int = 131_072,
    queries: int = 8,
    heads: int = 4,
    head_dim: int = 64,
    seed: int = 0,
    **options: Any,
) -> list[Workload]:
    """Target attention over `tokens` events in all, spread over `users` ever more unequally."""
    batches = []
    for count in users:
        for skew in SKEWS:
            generator = torch.Generator().manual_seed(seed)
            batches.append(
                Workload.from_lengths(
                    f"{skew}, {count} users",
                    skewed(skew, count, tokens, generator).tolist(),
                    heads=heads,
                    head_dim=head_dim,
                    distribution=skew,
                    queries=queries,
                    group="skew",
                    seed=seed,
                    **options,
                )
            )
    return batches


def with_options(chosen: Sequence[Workload], **changes: Any) -> list[Workload]:
    """The same workloads with other options, e.g. `causal=True` or another dtype."""
    return [replace(workload, **changes) for workload in chosen]


def _from_row(
    name: str,
    distribution: str,
    users: int,
    heads: int,
    head_dim: int,
    max_len: int,
    **options: Any,
) -> Workload:
    return Workload(
        name=name,
        users=users,
        heads=heads,
        head_dim=head_dim,
        max_len=max_len,
        distribution=distribution,
        **options,
    )


def _target_from_row(
    name: str,
    users: int,
    queries: int,
    max_len: int,
    median: float,
    heads: int,
    head_dim: int,
    **options: Any,
) -> Workload:
    return Workload(
        name=name,
        users=users,
        heads=heads,
        head_dim=head_dim,
        max_len=max_len,
        distribution="lognormal",
        median=median,
        queries=queries,
        group="target",
        **options,
    )
