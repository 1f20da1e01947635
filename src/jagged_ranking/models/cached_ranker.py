"""A ranker that keeps the keys and values of its users' histories between requests.

A request then costs its new events and its candidates, whatever lies behind them: the history is
read, and not encoded again. The logits are those of the ranker over the whole history. For that,
nothing that is computed of an event may change with what comes later: attention is causal, and
events are told from their arrival (`ModelConfig.event_time`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from jagged_kernels import CacheSchedule, HistoryCache, JaggedTensor, jagged_slice
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.embeddings import Arrivals
from jagged_ranking.layers.growing_cache import GrowingCache
from jagged_ranking.layers.head import RankingHead, features_of, positives
from jagged_ranking.models.model_config import MODEL_NAMES, ModelConfig, encoder_of
from jagged_ranking.models.ranker import Ranker, full_precision

Users = Sequence[int] | np.ndarray
Times = Sequence[int] | np.ndarray | Tensor


class CachedRanker:
    """A ranker with room for the histories of some users, who are known by numbers from 0 on.

    Args:
        ranker: as it was trained; what is kept is of its weights now. Its own `max_history` says
            how long a history was in training, not how long one may be here.
        users: that there is room for, U.
        capacity: events of a user, at most. Memory for them is taken now (`nbytes`).
        page_size: see `HistoryCache`.

    Raises:
        ValueError: a ranker that no cache can serve.
    """

    def __init__(self, ranker: Ranker, users: int, *, capacity: int, page_size: int = 16) -> None:
        config = ranker.config
        check_cached(config)
        self.ranker = ranker.eval()
        self.device = next(ranker.parameters()).device
        lower = ranker.lower_precision and self.device.type == "cuda"
        self.capacity = capacity
        self._caches = [
            HistoryCache(
                users,
                capacity,
                kv_heads=config.heads,
                head_dim=config.dim // config.heads,
                page_size=page_size,
                dtype=torch.bfloat16 if lower else torch.float32,
                device=self.device,
            )
            for _ in range(getattr(ranker.encoder, "cached_attentions", 0))
        ]
        # The host knows how long histories are, so that what is too long is refused unawaited.
        self._held = np.zeros(users, np.int64)
        self._seen = torch.zeros(users, dtype=torch.int32, device=self.device)
        self._last = torch.zeros(users, dtype=torch.int64, device=self.device)
        # Events that came before those that are kept, [U]; None as long as nobody spoke of any.
        self._before: Tensor | None = None
        self._positives = torch.zeros(users, device=self.device)

    def __len__(self) -> int:
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Of keys and values of all users, with their lists."""
        return sum(cache.nbytes for cache in self._caches)

    def tensors(self) -> Iterator[Tensor]:
        """All that is kept."""
        for cache in self._caches:
            yield from (cache.k_store, cache.v_store, cache.pages, cache.lengths)
        yield from (self._seen, self._last, self._positives)
        if self._before is not None:
            yield self._before

    def events(self, users: Users) -> np.ndarray:
        """int64 [R], how many events are kept of these users."""
        return self._held[np.asarray(users, np.int64)]

    def forget(self, users: Users) -> None:
        """All events of these users: their room is that of others, or of a history begun anew, such
        as that of a user's newest events: a batch that says what was cut off (`JaggedBatch.cut`)
        has them told as in training."""
        rows = self._checked(users)
        self._held[rows] = 0
        user = self._to_device(rows)
        self._seen.index_fill_(0, user, 0)
        if self._before is not None:
            self._before.index_fill_(0, user, 0)

    def append(self, batch: JaggedBatch, users: Users, time: Times) -> None:
        """Keep new events, and score nothing. See `score`."""
        nobody = torch.zeros(len(batch) + 1, dtype=torch.int64, device=self.device)
        self._step(batch, users, time, keep=True, nobody=nobody)

    def score(
        self,
        batch: JaggedBatch,
        users: Users,
        time: Times,
        *,
        keep: bool = True,
    ) -> Tensor:
        """The logits of a batch's candidates, over all events kept of their users and those of the
        batch.

        Args:
            batch: of R requests, whose histories are the events since the last one, often none; see
                `cut_histories`. Features of candidates, such as whether the user has met them, are
                of the whole history, as in training.
            users: [R], different ones, on the host.
            time: int64 [R], when each request is made, in the unit of the batch's ages and from one
                origin for all requests of a user; a tensor is one on the device.
            keep: whether the new events stay, or are seen by this request alone.

        Returns:
            float32 [C, tasks]. Nothing here waits for a GPU.

        Raises:
            ValueError: other users than the batch has requests, one twice, one there is no room
                for, or a history longer than `capacity`: then nothing has changed.
        """
        logits = self._step(batch, users, time, keep=keep)
        assert logits is not None
        return logits

    @torch.no_grad()
    def _step(
        self,
        batch: JaggedBatch,
        users: Users,
        time: Times,
        *,
        keep: bool,
        nobody: Tensor | None = None,
    ) -> Tensor | None:
        """Logits; None where `nobody` are the offsets of candidates, of whom there are none."""
        rows = self._checked(users, batch)
        user = self._to_device(rows)
        now = time if isinstance(time, Tensor) else self._to_device(np.asarray(time, np.int64))
        seen, ranker = self._seen[user], self.ranker
        pages = self._caches[0].pages[user]  # which those of all layers are
        schedules: dict[bool, CacheSchedule] = {}
        caches = [GrowingCache(one, pages, seen.clone(), schedules) for one in self._caches]
        elapsed = now - self._last[user]
        before = None if self._before is None else self._before[user]
        if batch.cut is not None and batch.cut_age is not None:
            new = seen == 0
            before = torch.where(new, batch.cut, 0 if before is None else before)
            elapsed = torch.where(new, batch.cut_age, elapsed)
        place = seen if before is None else seen + before
        with ranker.precision(batch.user.device):
            arrivals = Arrivals.of(batch, seen=place, elapsed=elapsed)
            history = ranker.embedding.history(batch, arrivals)
            if nobody is None:
                candidates = ranker.embedding.candidates(batch)
            else:
                none = history.values.new_zeros(0, history.values.shape[1])
                candidates = JaggedTensor(none, nobody, validate=False)
            answer = ranker.encoder(history, candidates, batch, caches=caches)
            if nobody is None:
                answer = ranker.checked(answer, candidates)
        length, positive = seen + batch.item.lengths, self._positives[user]
        signal = getattr(ranker.head, "label_signal", None)
        if signal is not None:
            positive = positive.masked_fill(seen == 0, 0) + positives(batch, signal)
        if keep:
            self._held[rows] += batch.events
            self._seen[user] = length.int()
            if before is not None:
                if self._before is None:
                    self._before = torch.zeros_like(self._last)
                self._before[user] = before
            self._positives[user] = positive
            if len(batch.age.values):
                newest = batch.age.values[(batch.offsets[1:] - 1).clamp(min=0)]
                came = torch.where(length > seen, now - newest, self._last[user])
                self._last[user] = came
        if nobody is not None:
            return None
        head, rate = ranker.head, ranker.positive_rate
        with full_precision(batch.user.device):
            given = answer.float(), candidates.values.float(), batch
            if not isinstance(head, RankingHead):
                return head(*given)
            told = None if signal is None else positive
            return head(*given, features_of(length, told, positive_rate=rate))

    def _checked(self, users: Users, batch: JaggedBatch | None = None) -> np.ndarray:
        """int64 [R], if they can be served."""
        rows = np.asarray(users, np.int64)
        if rows.ndim != 1 or (batch is not None and len(rows) != len(batch)):
            wanted = "a list" if batch is None else f"one for each of {len(batch)} requests"
            raise ValueError(f"users must be {wanted}, got an array of shape {rows.shape}")
        wrong = rows[(rows < 0) | (rows >= len(self))]
        if len(wrong):
            raise ValueError(f"there is room for users 0 to {len(self) - 1}, got {wrong[0]}")
        if len(np.unique(rows)) < len(rows):
            raise ValueError("users must be different ones: one is there twice")
        if batch is not None:
            longer = self._held[rows] + batch.events
            if (longer > self.capacity).any():
                user = int(longer.argmax())
                raise ValueError(
                    f"user {rows[user]} would have {longer[user]} events, and there is room for "
                    f"{self.capacity}: forget it, and append its newest events anew"
                )
        return rows

    def _to_device(self, numbers: np.ndarray) -> Tensor:
        """int64, without waiting."""
        found = torch.from_numpy(numbers)
        if self.device.type == "cuda":  # from other memory a copy would wait
            found = found.pin_memory()
        return found.to(self.device, non_blocking=True)


def cut_histories(batch: JaggedBatch, begin: np.ndarray, end: np.ndarray) -> JaggedBatch:
    """The batch with the events `begin` to `end` (int64 [R], on the host) of each history alone;
    its candidates and their features stay as they are. Where it says what was cut off, the events
    before `begin` are, too."""
    events = end - begin
    first, length = (
        torch.from_numpy(x).to(batch.user.device, non_blocking=True) for x in (begin, events)
    )
    names = ("item", "categories", "item_dense", "age", "recency", "signals")
    parts = {
        name: jagged_slice(getattr(batch, name), first, length, total=int(events.sum()))
        for name in names
    }
    item = parts["item"]
    histories = {name: item.with_values(part.values) for name, part in parts.items()}
    cut, cut_age = batch.cut, batch.cut_age
    if cut is not None and cut_age is not None and begin.any():
        newest = batch.age.values[(batch.offsets[:-1] + first - 1).clamp(min=0)]
        cut, cut_age = cut + first, torch.where(first > 0, newest, cut_age)
    return dataclasses.replace(batch, **histories, events=events, cut=cut, cut_age=cut_age)


def check_cached(config: ModelConfig) -> None:
    """Whether caches can serve such a ranker.

    Raises:
        ValueError: they cannot, and why.
    """
    if not hasattr(encoder_of(config.model), "cached_attentions"):
        able = [name for name in MODEL_NAMES if hasattr(encoder_of(name), "cached_attentions")]
        raise ValueError(
            f"model {config.model} does not take its history from caches; {' and '.join(able)} do"
        )
    if config.event_time != "arrival":
        raise ValueError(
            "a cached history needs a ranker that was trained with event_time 'arrival': told from "
            "the request, all events of a history change with each request"
        )
