"""Which events of a history were attended to: the problem, and PyTorch on all scores at once."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jagged_kernels import (
    HistoryCache,
    JaggedTensor,
    attention_schedule,
    jagged_attention,
    key_statistics,
    scissorhands,
)
from jagged_kernels.cache.statistics import BELOW
from jagged_ranking.measure.cached.cached_ops import KEEP
from jagged_ranking.measure.cached.cases import Case
from jagged_ranking.measure.interaction.problem import Peer, Problem


def scoring(case: Case, device: torch.device) -> Problem:
    """`key_statistics` of the last `case.recent` queries of every user; lse is there already, from
    the attention that the queries had."""
    tokens = case.users * case.history
    offsets = torch.arange(0, tokens + 1, case.history, device=device)
    generator = torch.Generator(device).manual_seed(case.seed + 2)
    values = (
        torch.randn(tokens, case.heads, case.head_dim, generator=generator, device=device)
        for _ in range(2)
    )
    q, k = (JaggedTensor(x.to(case.dtype), offsets, validate=False) for x in values)
    schedule = attention_schedule(q, causal=True)
    with torch.no_grad():
        _, lse = jagged_attention(q, k, k, causal=True, schedule=schedule, return_lse=True)

    def call(backend: Any, q_values: Tensor, k_values: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        options: dict[str, Any] = {"schedule": schedule} if backend == "auto" else {}
        asked, keys = q.with_values(q_values), q.with_values(k_values)
        found = key_statistics(asked, keys, lse, recent=case.recent, backend=backend, **options)
        return found.unimportant.values, found.mass.values

    counted, width = min(case.recent, case.history), case.heads * case.head_dim
    pairs = case.users * counted * (case.history - (counted - 1) / 2)
    moved = (tokens + case.users * counted) * width * case.dtype.itemsize
    moved += 4 * case.heads * (case.users * counted + 2 * tokens)
    scores = 4 * case.users * case.heads * counted * case.history
    return Problem(
        call=call,
        inputs=(q.values, k.values, lse),
        bytes=(float(moved), 0.0),
        flops=(2.0 * width * pairs, 0.0),
        peers={"dense_scores": Peer(_dense(case, counted, device), needs=2 * scores)},
        builds={KEEP: _keeping(case, q, k, lse)},
    )


def _keeping(case: Case, q: JaggedTensor, k: JaggedTensor, lse: Tensor) -> Callable[[], object]:
    """`scissorhands` by what was counted. The cache then has all again, in the time of a copy of
    its lists."""
    cache = HistoryCache(
        case.users, case.history, kv_heads=case.heads, head_dim=case.head_dim,
        page_size=1, dtype=case.dtype, device=k.device,
    )  # fmt: skip
    with torch.no_grad():
        cache.append(k, k)
    statistics = key_statistics(q, k, lse, recent=case.recent)
    pages, lengths = cache.pages.clone(), cache.lengths.clone()

    def keep() -> None:
        cache.pages.copy_(pages)
        cache.lengths.copy_(lengths)
        scissorhands(cache, statistics, budget=case.kept, drop=0.0)

    return keep


def _dense(case: Case, counted: int, device: torch.device) -> Callable[..., tuple[Tensor, Tensor]]:
    """Probabilities of all queries that count, a softmax of its own; no user is padded, and what
    can be done to queries or shares is not done to all scores."""
    key = torch.arange(case.history, device=device)
    seen = key[case.history - counted :, None] + 1  # keys that each query sees
    hidden, least = key >= seen, BELOW / seen
    scale = 1 / math.sqrt(case.head_dim)

    def forward(q: Tensor, k: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        queries, keys = (x.unflatten(0, (case.users, -1)).transpose(1, 2) for x in (q, k))
        scores = ((queries[:, :, -counted:] * scale) @ keys.mT).float()
        probabilities = scores.masked_fill_(hidden, -math.inf).softmax(-1)
        below = (probabilities < least).logical_and_(~hidden)
        found = (below.sum(2).int(), probabilities.sum(2))
        counts, mass = (x.transpose(1, 2).flatten(0, 1) for x in found)
        return counts, mass

    return forward
