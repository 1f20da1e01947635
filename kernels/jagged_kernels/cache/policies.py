"""`scissorhands`: a cache held to a budget, by which events are worth keeping."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from jagged_kernels.cache.history import HistoryCache
from jagged_kernels.cache.statistics import KeyStatistics
from jagged_kernels.core.contents import known_to_differ
from jagged_kernels.core.sizes import as_int
from jagged_kernels.tensors.offsets import cumulative

Policy = Literal["pivotal", "h2o", "newest", "random"]
_POLICIES = get_args(Policy)
# Of the newest events: below all numbers, and above what is no event.
_LAST_TO_GO = torch.finfo(torch.float32).min


def scissorhands(
    cache: HistoryCache,
    statistics: KeyStatistics | None = None,
    *,
    budget: int,
    recent: int = 10,
    drop: float = 0.5,
    policy: Policy = "pivotal",
    seed: int = 0,
) -> Tensor:
    """Drops events of users that have more than a budget, for each key head those that it needs
    least: the compression of Scissorhands (arXiv 2305.17118, algorithm 2).

    Args:
        cache: with pages of one event. Its lists are written anew; keys and values stay.
        statistics: of what the cache holds now, in its order: of all that was appended, or of
            `cache.gather()`. "newest" and "random" need none.
        budget: events of a user for each key head, at least 1.
        recent: the newest events of a user, which go last whatever the policy says.
        drop: of the budget. A user with more than `budget` events loses floor(drop * budget) of
            them for each key head, or more where that leaves more than the budget.
        policy: what goes first. "pivotal": keys that were below their share in most queries.
            "h2o": those of the least accumulated probability (H2O, arXiv 2306.14048; which keeps
            half of its budget for the newest events: recent=budget // 2). "newest": the oldest.
            "random": any, as `seed` draws them for each user and key head. All keep as many. Of
            equal ones the older goes first.

    Returns:
        [B] int32: how many events of each user went, of each key head.

    Raises:
        TypeError, ValueError: arguments of wrong kind or range, a cache with larger pages, or
            statistics of other lengths.

    On the device, without waiting.

    >>> cache = HistoryCache(1, 4, kv_heads=1, head_dim=1, page_size=1)
    >>> x = JaggedTensor(torch.tensor([3.0, 0.0, 2.0, 1.0]).view(4, 1, 1), torch.tensor([0, 4]))
    >>> cache.append(x, x)
    >>> _, lse = jagged_attention(x, x, x, causal=True, return_lse=True)
    >>> scissorhands(cache, key_statistics(x, x, lse), budget=3, recent=1).tolist()
    [1]
    >>> cache.gather()[0].values.flatten().tolist()
    [3.0, 2.0, 1.0]
    """
    if not isinstance(cache, HistoryCache):
        raise TypeError(f"cache must be a HistoryCache, got {type(cache).__name__}")
    budget, recent, seed = (
        as_int("budget", budget), as_int("recent", recent), as_int("seed", seed),
    )  # fmt: skip
    if policy not in _POLICIES:
        raise ValueError(f"policy must be one of {', '.join(_POLICIES)}; got {policy!r}")
    if budget < 1 or recent < 0 or not 0.0 <= drop <= 1.0:
        raise ValueError(
            "budget must be at least 1, recent at least 0 and drop in [0, 1], got "
            f"{budget}, {recent}, {drop}"
        )
    lengths = cache.lengths
    place = torch.arange(cache.pages.shape[2], device=cache.device)
    useless = _useless(cache, statistics, policy, seed)
    useless = useless.masked_fill(place >= lengths[:, None, None] - recent, _LAST_TO_GO)
    useless = useless.masked_fill(place >= lengths[:, None, None], -torch.inf)
    over = lengths > budget
    dropped = torch.where(over, (lengths - budget).clamp(min=int(drop * budget)), 0)
    # [B, G, P]: which event goes first, then which goes as how-manieth.
    order = torch.sort(useless, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(-1, order, place.expand_as(order))
    cache.keep(rank >= dropped[:, None, None])
    return dropped


def _useless(
    cache: HistoryCache, statistics: KeyStatistics | None, policy: Policy, seed: int
) -> Tensor:
    """[B, G, P] float32: the largest go first; places behind the length may be anything."""
    pages = cache.pages
    if policy == "newest":
        return torch.zeros(pages.shape, device=pages.device)
    if policy == "random":
        generator = torch.Generator(pages.device).manual_seed(seed)
        return torch.rand(pages.shape, generator=generator, device=pages.device)
    if not isinstance(statistics, KeyStatistics):
        raise TypeError(f"policy {policy!r} needs KeyStatistics, got {type(statistics).__name__}")
    x = statistics.unimportant if policy == "pivotal" else statistics.mass
    offsets = cumulative(cache.lengths)
    if x.values.shape[1:] != (cache.kv_heads,) or len(x) != len(cache):
        raise ValueError(
            f"statistics must be [T, {cache.kv_heads}] of {len(cache)} users, got "
            f"{tuple(x.values.shape)} of {len(x)}"
        )
    if known_to_differ(x.offsets, offsets):
        raise ValueError("statistics must be of what the cache holds: the lengths differ")
    if x.values.shape[0] == 0:
        return torch.zeros(pages.shape, device=pages.device)
    place = torch.arange(pages.shape[2], device=pages.device)
    token = (offsets[:-1, None] + place).clamp(max=x.values.shape[0] - 1)
    numbers = x.values[token].mT.float()
    return numbers if policy == "pivotal" else -numbers
