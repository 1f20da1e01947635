"""Several ways to answer the same requests, from the same weights: each kind of attention over
whole histories, and ours over histories that a cache holds but for their newest events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.prefetch import tensors_of
from jagged_ranking.figures.serving_points import CACHED
from jagged_ranking.figures.throughput_points import GRAPH
from jagged_ranking.measure import timing
from jagged_ranking.measure.peak_memory import Peak, allocated, peak_memory, storage_bytes
from jagged_ranking.models.cached_ranker import CachedRanker, check_cached, cut_histories
from jagged_ranking.models.captured_ranker import CapturedRanker
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.reproduce.graphed_step import STEPS_TO_A_REPLAY
from jagged_ranking.reproduce.step_contest import Entry, StepContest, longest_of
from jagged_ranking.reproduce.training_step import ranker_to_measure
from jagged_ranking.training.config import TrainConfig


class WholeHistories:
    """Answers that encode the history of each request.

    Args:
        model: with its weights.
        batches: of requests.
    """

    def __init__(self, model: Ranker, batches: Sequence[JaggedBatch]) -> None:
        self.model, self.batches = model, batches

    @torch.no_grad()
    def __call__(self, number: int) -> Tensor:
        """Logits of a batch."""
        return self.model(self.batches[number])

    def tensors(self) -> Iterator[Tensor]:
        """What exists before a call, the batches apart."""
        yield from self.model.parameters()
        yield from self.model.buffers()


class CapturedHistories(WholeHistories):
    """As above, through CUDA graphs, all of them captured here."""

    def __init__(self, model: Ranker, batches: Sequence[JaggedBatch]) -> None:
        super().__init__(model, batches)
        self.captured = CapturedRanker(model, longest=longest_of(batches))
        for _ in range(STEPS_TO_A_REPLAY):
            for number in range(len(batches)):
                self(number)

    def __call__(self, number: int) -> Tensor:
        """Logits of a batch."""
        return self.captured(self.batches[number])


class NewEvents:
    """Answers over histories that a cache holds, all but the newest events.

    These are seen by their request alone (`keep=False`), so that each call is like the one before:
    to keep them is to write a few numbers more of each user.

    Args:
        model, batches: as above, of different users each.
        new_events: of each request, if its history has so many.
        page_size: of the caches.
    """

    def __init__(
        self, model: Ranker, batches: Sequence[JaggedBatch], new_events: int, page_size: int
    ) -> None:
        users = np.arange(sum(map(len, batches)))
        self.users = np.split(users, np.cumsum([len(batch) for batch in batches])[:-1])
        self.times = [np.zeros(len(batch), np.int64) for batch in batches]  # the origin of ages
        capacity = max(1, *(batch.longest[1] for batch in batches))
        self.model = model
        self.server = CachedRanker(model, len(users), capacity=capacity, page_size=page_size)
        self.batches: list[JaggedBatch] = []
        for batch, mine, now in zip(batches, self.users, self.times, strict=True):
            known = np.maximum(batch.events - new_events, 0)
            self.server.append(cut_histories(batch, np.zeros_like(known), known), mine, now)
            self.batches.append(cut_histories(batch, known, batch.events))

    def __call__(self, number: int) -> Tensor:
        """Logits of a batch."""
        given = self.batches[number], self.users[number], self.times[number]
        return self.server.score(*given, keep=False)

    def tensors(self) -> Iterator[Tensor]:
        """What exists before a call, the batches apart."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from self.server.tensors()
        for batch in self.batches:
            yield from tensors_of(batch)


Answers = WholeHistories | NewEvents


class ServingContest(StepContest):
    """Requests of one model.

    Args:
        batches: of requests, of different users each.
        new_events: of a request, that no cache holds yet.
        page_size: of the caches.
        others: see `StepContest`.
    """

    def __init__(
        self,
        *,
        batches: Sequence[JaggedBatch],
        new_events: int,
        page_size: int,
        facts: dict[str, Any],
        **others: Any,
    ) -> None:
        longest = max(batches, key=lambda batch: batch.longest[1])
        facts = {**facts, "new_events": new_events, "page_size": page_size}
        super().__init__(batch=longest, facts=facts, **others)
        self.batches, self.new_events, self.page_size = batches, new_events, page_size
        self._bytes_of_a_user: dict[Entry, float] = {}
        for entry, config in self.configs.items():
            if entry.provider == CACHED:
                try:
                    check_cached(config)
                except ValueError as error:
                    self.failed[entry] = ("unsupported", str(error))

    def calls(self) -> dict[Entry, Answers]:
        """Of all who have not failed."""
        found: dict[Entry, Answers] = {}
        for entry in self.configs:
            if entry not in self.failed:
                call = self.tried(entry, lambda e=entry: self._call(e, self.batches))
                if call is not None:
                    found[entry] = call
        return found

    def say_caches(self) -> None:
        """A row of the bytes that a user takes in the cache, who may have as many events as the
        longest history."""
        for entry, each in self._bytes_of_a_user.items():
            if entry not in self.failed:
                self.row(entry, "cache_memory", "bytes", value=each)

    def _answers(self, entry: Entry, config: TrainConfig) -> tuple[Tensor, Tensor | None]:
        """Logits of all batches, which compiles whatever they need."""
        call = self._call(entry, self.batches, config)
        return torch.cat([call(number) for number in range(len(self.batches))]), None

    def _call(
        self, entry: Entry, batches: Sequence[JaggedBatch], config: TrainConfig | None = None
    ) -> Answers:
        config = config or self.configs[entry]
        model = ranker_to_measure(config, self.shape, self.device).eval()
        if entry.mode == GRAPH:
            return CapturedHistories(model, batches)
        if entry.provider != CACHED:
            return WholeHistories(model, batches)
        found = NewEvents(model, batches, self.new_events, self.page_size)
        self._bytes_of_a_user[entry] = found.server.nbytes / len(found.server)
        return found

    def _peak(self, entry: Entry) -> Peak:
        """That of the batch with the longest history."""
        timing.release(self.device)
        # the batch counts, the others do not
        floor = allocated(self.device) - storage_bytes(tensors_of(self.batch))
        call = self._call(entry, [self.batch])
        inputs = [*call.tensors(), *tensors_of(self.batch)]
        return peak_memory(lambda: call(0), inputs=inputs, device=self.device, floor=floor)
