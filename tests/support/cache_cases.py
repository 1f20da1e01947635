"""Caches for tests: their pages stand in an order of their own."""

from __future__ import annotations

import torch
from attention_cases import DEVICE, Inputs

from jagged_kernels import HistoryCache, JaggedTensor


def shuffle(cache: HistoryCache) -> None:
    """Users' pages in an order of their own, other for each list."""
    generator = torch.Generator().manual_seed(7)
    order = torch.rand(cache.pages.shape, generator=generator).argsort(-1).to(DEVICE)
    cache.pages.copy_(cache.pages.gather(-1, order))


def filled(inputs: Inputs, page_size: int = 16, *, capacity: int = 128) -> HistoryCache:
    """A cache of the keys and values of attention's inputs, which came in two appends."""
    users, (_, heads, dim) = inputs.k_offsets.shape[0] - 1, inputs.k.shape
    cache = HistoryCache(
        users, capacity, page_size=page_size, kv_heads=heads, head_dim=dim,
        head_dim_v=inputs.v.shape[2], dtype=inputs.k.dtype, device=DEVICE,
    )  # fmt: skip
    shuffle(cache)
    if users == 0:
        return cache
    k, v = (JaggedTensor(x, inputs.k_offsets) for x in (inputs.k, inputs.v))
    for part in (0, 1):
        halves = [[_half(user, part) for user in x.unbind()] for x in (k, v)]
        cache.append(*map(JaggedTensor.from_list, halves))
    return cache


def _half(user: torch.Tensor, part: int) -> torch.Tensor:
    middle = user.shape[0] // 2
    return user[middle:] if part else user[:middle]
