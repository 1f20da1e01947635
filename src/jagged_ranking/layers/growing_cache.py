"""Attention of new events and candidates over keys and values kept from request to request."""

from __future__ import annotations

import copy

from torch import Tensor

from jagged_kernels import (
    CacheSchedule,
    HistoryCache,
    JaggedTensor,
    cache_schedule,
    cached_attention,
)
from jagged_ranking.layers.attention import with_sink


class GrowingCache:
    """The cache of one attention, for the users of one step.

    Args:
        cache: of all users; its stores are written, its own lengths are not.
        pages: [R, G, P], its pages of the users of the step.
        lengths: int32 [R], their events before it; those of the step are added.
        schedules: causal or not -> the schedule that the caches of one step share.
    """

    def __init__(
        self,
        cache: HistoryCache,
        pages: Tensor,
        lengths: Tensor,
        schedules: dict[bool, CacheSchedule],
    ) -> None:
        self._cache = copy.copy(cache)  # the same stores
        self._cache.pages, self._cache.lengths = pages, lengths
        self._schedules = schedules

    def attend(
        self,
        q: JaggedTensor,
        k: JaggedTensor,
        v: JaggedTensor,
        *,
        causal: bool = False,
        sink: Tensor | None = None,
    ) -> JaggedTensor:
        """As `attention.attend`, over the events kept and, behind them, those of k and v.

        Args:
            q: queries [Tq, H, D].
            k, v: of new events [T, H, D], which are appended.
            causal: q are the new events, and see each other and those before.
            sink: [H], see `attend`.

        Raises:
            TypeError, ValueError: see `HistoryCache.append`.
        """
        self._cache.append(k, v)
        if len(q.values) == 0:
            return q
        if causal not in self._schedules:
            self._schedules[causal] = cache_schedule(q, self._cache, causal=causal)
        schedule = self._schedules[causal]
        if sink is None:
            return cached_attention(q, self._cache, causal=causal, schedule=schedule)
        pooled, lse = cached_attention(
            q, self._cache, causal=causal, schedule=schedule, return_lse=True
        )
        return with_sink(pooled, lse, sink)
