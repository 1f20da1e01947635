"""The batches that attention to some of the keys is measured on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from jagged_ranking.measure.lineup import (
    BY_BLOCKS,
    BY_DENSITY,
    BY_LENGTH,
    JAGGED_LENGTHS,
    RETRIEVAL,
)
from jagged_ranking.measure.providers.base import MODES
from jagged_ranking.measure.sparse.patterns import (
    Pattern,
    RandomBlocks,
    Retrieved,
    SemiLocal,
    Strided,
    dense_blocks,
    facts_of,
)
from jagged_ranking.measure.workloads import Workload


@dataclass(frozen=True, kw_only=True)
class SparseWorkload:
    """A batch, and which keys its queries see.

    Args:
        batch: lengths and shapes; its group is one of `SPARSE_GROUPS`.
        pattern: which keys.
    """

    batch: Workload
    pattern: Pattern

    @property
    def name(self) -> str:
        return self.batch.name

    def density(self) -> float:
        """The blocks that are seen, as a share of those that dense attention has."""
        w = self.batch
        seen = everything = 0.0
        lengths, counts = w.draw_lengths().unique(return_counts=True)
        for length, users in zip(lengths.tolist(), counts.tolist(), strict=True):
            queries = w.queries or length
            options: dict[str, Any] = {"causal": w.causal}
            seen += users * self.pattern.blocks(queries, length, heads=w.heads, **options)
            block = self.pattern.block
            everything += users * dense_blocks(queries, length, block=block, **options)
        return seen / everything

    def facts(self) -> dict[str, Any]:
        """`Workload.facts` and what the pattern is. `flops_*` are those of the blocks that are
        seen; of retrieval, keys and values in `bytes_*` too, for the others see every key
        somewhere."""
        facts, density = self.batch.facts(), self.density()
        facts |= {**facts_of(self.pattern), "density": density}
        for mode in MODES:
            facts[f"flops_{mode}"] *= density
            if self.batch.queries is not None:
                queries, tokens = self.batch.queries * self.batch.users, facts["tokens"]
                facts[f"bytes_{mode}"] *= (queries + density * tokens) / (queries + tokens)
        return facts


def strided_by_length(
    lengths: Sequence[int] = tuple(1024 * 2**n for n in range(8)),
    *,
    tokens: int = 131_072,
    stride: int = 16,
    local: int = 4,
    block: int = 64,
    heads: int = 16,
    head_dim: int = 64,
    **options: Any,
) -> list[SparseWorkload]:
    """S2-Attention over longer and longer users, all alike, `tokens` in all at every point."""
    return [
        SparseWorkload(
            batch=_full(f"length {length}", length, tokens, BY_LENGTH, heads, head_dim, **options),
            pattern=Strided(stride=stride, local=local, block=block),
        )
        for length in lengths
    ]


def strided_by_density(
    strides: Sequence[int] = (64, 32, 16, 8, 4, 2, 1),
    locals_: Sequence[int] = (4, 16),
    *,
    length: int = 16_384,
    tokens: int = 131_072,
    block: int = 64,
    heads: int = 16,
    head_dim: int = 64,
    **options: Any,
) -> list[SparseWorkload]:
    """S2-Attention at one length, denser and denser; stride 1 is all that causal attention sees,
    with any number of local blocks, and is there once."""
    found = []
    for local in locals_:
        for stride in strides:
            if stride > 1 or local == locals_[0]:
                name = f"stride {stride}, {local} local"
                batch = _full(name, length, tokens, BY_DENSITY, heads, head_dim, **options)
                pattern = Strided(stride=stride, local=local, block=block)
                found.append(SparseWorkload(batch=batch, pattern=pattern))
    return found


def random_by_density(
    densities: Sequence[float] = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0),
    *,
    length: int = 8192,
    tokens: int = 131_072,
    block: int = 64,
    heads: int = 16,
    head_dim: int = 64,
    seed: int = 0,
    **options: Any,
) -> list[SparseWorkload]:
    """Random blocks, causal and not, denser and denser."""
    shape: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "seed": seed, **options}
    found = []
    for causal in (True, False):
        for density in densities:
            name = f"{'causal' if causal else 'full'}, density {density:g}"
            batch = _full(name, length, tokens, BY_BLOCKS, causal=causal, **shape)
            pattern = RandomBlocks(density=density, block=block, seed=seed)
            found.append(SparseWorkload(batch=batch, pattern=pattern))
    return found


def retrieval(
    candidates: Sequence[int] = (64, 256, 512),
    top_k: Sequence[int] = (4, 16, 64),
    *,
    length: int = 32_768,
    users: int = 16,
    newest: int = 4,
    block: int = 64,
    heads: int = 8,
    head_dim: int = 64,
    **options: Any,
) -> list[SparseWorkload]:
    """Candidates look at few of the blocks of long histories: lognormal ones around a quarter of
    the longest."""
    return [
        SparseWorkload(
            batch=Workload(
                name=f"{queries} candidates, {count} blocks",
                users=users,
                heads=heads,
                head_dim=head_dim,
                max_len=length,
                distribution="lognormal",
                median=length / 4,
                queries=queries,
                group=RETRIEVAL,
                **options,
            ),
            pattern=Retrieved(top_k=count, newest=newest, block=block),
        )
        for queries in candidates
        for count in top_k
    ]


def jagged_lengths(
    batches: Sequence[Workload],
    *,
    stride: int = 16,
    local: int = 4,
    window: int = 256,
    first: int = 64,
    block: int = 64,
) -> list[SparseWorkload]:
    """Each batch by S2-Attention and by semi-local attention, causal."""
    patterns = {
        "S2": Strided(stride=stride, local=local, block=block),
        "semi-local": SemiLocal(window=window, first=first, block=block),
    }
    return [
        SparseWorkload(
            batch=replace(
                batch,
                name=f"{batch.name} {name}",
                group=JAGGED_LENGTHS,
                causal=True,
            ),
            pattern=pattern,
        )
        for batch in batches
        for name, pattern in patterns.items()
    ]


def _full(
    name: str,
    length: int,
    tokens: int,
    group: str,
    heads: int,
    head_dim: int,
    *,
    causal: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Workload:
    """Users of one length, `tokens` in all (one user at least)."""
    return Workload(
        name=name,
        users=max(1, tokens // length),
        heads=heads,
        head_dim=head_dim,
        max_len=length,
        distribution="full",
        causal=causal,
        dtype=dtype,
        seed=seed,
        group=group,
    )
