"""How long a training waits for its batches, seen by its device."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from jagged_ranking.data.batch import JaggedBatch


class BatchClock:
    """Batches go through it, and it notes when each was asked for and given.

    What lies between is waiting: on a GPU from the end of a step to where the next batch is there,
    by events of its stream; on a CPU the time that making the batch takes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._points: list[tuple[Any, Any, int]] = []

    def __call__(self, batches: Iterator[JaggedBatch]) -> Iterator[JaggedBatch]:
        """The same batches, each asked for when this one is."""
        while True:
            asked = self._now()
            if (batch := next(batches, None)) is None:
                return
            self._points.append((asked, self._now(), len(batch)))
            yield batch

    def steps(self, skip: int) -> tuple[list[float], list[float], list[int]]:
        """Of each step but the first `skip` and the last, whose end nobody saw: milliseconds from
        asking for its batch to asking for the next, those in which the batch was waited for, and
        its requests. Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seen = [*pairwise(self._points)][skip:]
        wholes = [self._between(one[0], other[0]) for one, other in seen]
        waits = [self._between(one[0], one[1]) for one, _ in seen]
        return wholes, waits, [one[2] for one, _ in seen]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        return torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(True))

    def _between(self, first: Any, last: Any) -> float:
        if self.device.type != "cuda":
            return 1000 * (last - first)
        return first.elapsed_time(last)
