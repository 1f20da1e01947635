"""Who is measured on attention to some of the keys: ours, ours on all keys, and peers.

Peers but DKernel see all keys, and are checked against exactly that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jagged_kernels import (
    AttentionSchedule,
    JaggedTensor,
    attention_schedule,
    block_means,
    jagged_attention,
)
from jagged_ranking.measure.lineup import DKERNEL, OURS, OURS_DENSE, OURS_PADDED
from jagged_ranking.measure.providers import PROVIDERS
from jagged_ranking.measure.providers.base import Prepared, Unavailable, leaves, need_cuda
from jagged_ranking.measure.providers.jagged import (
    as_is,
    like_queries,
    packed_bounds,
    packed_queries,
    tensors_of,
)
from jagged_ranking.measure.providers.optional import find
from jagged_ranking.measure.sparse.patterns import Pattern, RandomBlocks, Retrieved, Strided
from jagged_ranking.measure.workloads import Batch

# What is built besides q, k and v: a schedule with its lists; the same with what a backward needs,
# where lists are without that; and the mean keys of retrieval.
LISTS, TURNED_LISTS, MEANS = "lists", "lists_with_transpose", "block_means"


@dataclass(frozen=True, kw_only=True)
class SparseProvider:
    """One way to compute attention of a batch, or of the keys that a pattern shows.

    Args:
        name: as in the results.
        description: one sentence.
        prepare: (batch, pattern) -> Prepared; raises Unavailable.
        sees_all: it has no lists, and is compared with attention to all keys.
    """

    name: str
    description: str
    prepare: Callable[[Batch, Pattern], Prepared]
    sees_all: bool = False


def histories_of(batch: Batch, q: Tensor, k: Tensor) -> tuple[JaggedTensor, JaggedTensor]:
    """(packed queries, keys) of a batch; of self-attention they share their offsets."""
    histories = JaggedTensor(k, batch.offsets)
    if batch.workload.queries is None:
        return histories.with_values(q), histories
    return JaggedTensor(q, packed_bounds(batch)[0]), histories


def _prepare_listed(batch: Batch, pattern: Pattern) -> Prepared:
    q, k, v = leaves(packed_queries(batch, batch.q), batch.k, batch.v)
    queries, histories = histories_of(batch, q, k)
    values = histories.with_values(v)
    forward, held, builds = _listed(queries, histories, values, pattern, batch)
    if isinstance(pattern, Retrieved):
        builds[MEANS] = lambda: block_means(histories, pattern.block)
    return Prepared(
        forward=forward,
        inputs=(q, k, v),
        grad_output=packed_queries(batch, batch.dout),
        to_tokens=as_is,
        to_queries=like_queries,
        held=(batch.offsets, *held),
        builds=builds,
    )


def _listed(
    queries: JaggedTensor,
    histories: JaggedTensor,
    values: JaggedTensor,
    pattern: Pattern,
    batch: Batch,
) -> tuple[Callable[[], Tensor], list[Tensor], dict[str, Callable[[], object]]]:
    """(our attention, tensors of its schedule, op -> what builds that); users may be padded to the
    longest."""
    # Whoever makes batches knows the longest: nothing waits for the device to read it.
    longest = int(batch.lengths.max())
    options: dict[str, Any] = {"causal": batch.workload.causal}

    def build() -> AttentionSchedule:
        keys = pattern.keys(queries, histories, longest=longest, **options)
        return attention_schedule(queries, histories, keys=keys, longest=longest, **options)

    def build_for_a_backward() -> AttentionSchedule:
        schedule = build()
        assert schedule.lists is not None
        schedule.lists.transposed(len(queries.values), len(histories.values))
        return schedule

    schedule = build()
    built: dict[str, Any] = {"keys": schedule.keys, "schedule": schedule}
    builds: dict[str, Callable[[], object]] = {}
    # Random blocks are drawn on the host: what that takes says nothing.
    if not isinstance(pattern, RandomBlocks):
        builds[LISTS] = build
        if schedule.lists is not None and schedule.lists.row_ptr_t is None:
            builds[TURNED_LISTS] = build_for_a_backward

    def forward() -> Tensor:
        return jagged_attention(queries, histories, values, **options, **built).values

    return forward, tensors_of(schedule), builds


def _prepare_padded(batch: Batch, pattern: Pattern) -> Prepared:
    """All users at the longest one's length, as kernels for equal lengths have them."""
    w = batch.workload
    q, k, v, dout = (
        x.transpose(1, 2).reshape(-1, w.heads, w.head_dim).contiguous() for x in batch.padded()
    )
    q, k, v = leaves(q, k, v)
    users = torch.arange(w.users + 1, dtype=torch.int32, device=batch.device)
    histories = JaggedTensor(k, users * w.max_len)
    queries, values = histories.with_values(q), histories.with_values(v)
    forward, held, builds = _listed(queries, histories, values, pattern, batch)

    def to_tokens(batch: Batch, padded: Tensor) -> Tensor:
        user, position = batch.positions()
        return padded[user * w.max_len + position]

    return Prepared(
        forward=forward,
        inputs=(q, k, v),
        grad_output=dout,
        to_tokens=to_tokens,
        held=tuple(held),
        builds=builds,
    )


def _prepare_dkernel(batch: Batch, pattern: Pattern) -> Prepared:
    attention = find("SparseAttention", ("dkernel",), "dkernel")
    need_cuda(batch.device, "DKernel")
    w = batch.workload
    if not isinstance(pattern, Strided) or w.queries is not None:
        raise Unavailable("unsupported", "DKernel is measured on S2-Attention alone")
    count = -(-w.max_len // pattern.block)
    blocks = pattern.blocks_seen(torch.arange(count), count, w.heads)
    sparse = attention(pattern.block, blocks.to(torch.uint8), seq_dim=2).to(batch.device)
    padded = batch.padded()
    q, k, v = leaves(*padded[:3])

    def to_tokens(batch: Batch, padded: Tensor) -> Tensor:
        user, position = batch.positions()
        return padded.transpose(1, 2)[user, position]

    return Prepared(
        forward=lambda: sparse(q, k, v),
        inputs=(q, k, v),
        grad_output=padded[3],
        to_tokens=to_tokens,
    )


def _sees_all(name: str, prepared: str) -> SparseProvider:
    return SparseProvider(
        name=name,
        description=f"{PROVIDERS[prepared].description}; all keys",
        prepare=lambda batch, pattern: PROVIDERS[prepared].prepare(batch),
        sees_all=True,
    )


SPARSE_PROVIDERS: Mapping[str, SparseProvider] = {
    provider.name: provider
    for provider in (
        SparseProvider(
            name=OURS,
            description="ours: jagged_attention, the schedule of the batch and its lists handed "
            "along",
            prepare=_prepare_listed,
        ),
        SparseProvider(
            name=OURS_PADDED,
            description="ours, with the same rule, of users padded to the longest one",
            prepare=_prepare_padded,
        ),
        SparseProvider(
            name=DKERNEL,
            description="dkernel.SparseAttention, the kernels of S2-Attention's authors, of users "
            "padded to the longest one",
            prepare=_prepare_dkernel,
        ),
        _sees_all(OURS_DENSE, OURS),
        _sees_all("varlen_attn", "varlen_attn"),
        _sees_all("flash_attn_4", "flash_attn_4"),
    )
}
