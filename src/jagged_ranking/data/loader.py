"""Batches of one split, one after another."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from jagged_ranking.data.batch import JaggedBatch, RequestTable, make_batch
from jagged_ranking.data.store import HistoryStore


class RequestLoader:
    """Batches of one split, in an order that depends on `(seed, epoch)` alone.

    There is no state to save: `batches(epoch, start=k)` goes on exactly where an interrupted
    epoch stopped. Batch size is in requests; the last batch may be smaller. `rows`: which requests
    (int64), all when None.
    """

    def __init__(
        self,
        store: HistoryStore,
        requests: RequestTable,
        *,
        batch_size: int,
        max_history: int,
        shuffle: bool = False,
        seed: int = 0,
        rows: np.ndarray | None = None,
    ) -> None:
        if batch_size < 1 or max_history < 1:
            raise ValueError(
                f"batch_size and max_history must be at least 1, got {batch_size}, {max_history}"
            )
        self.store, self.requests = store, requests
        self.batch_size, self.max_history = batch_size, max_history
        self.shuffle, self.seed = shuffle, seed
        self.rows = np.arange(len(requests)) if rows is None else rows

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.batch_size)

    def order(self, epoch: int) -> np.ndarray:
        """The requests in the order of `epoch`, int64."""
        if not self.shuffle:
            return self.rows
        return np.random.default_rng((self.seed, epoch)).permutation(self.rows)

    def batches(self, epoch: int = 0, *, start: int = 0) -> Iterator[JaggedBatch]:
        """Batches `start`, `start + 1`, ... of `epoch`."""
        order = self.order(epoch)
        for first in range(start * self.batch_size, len(order), self.batch_size):
            index = order[first : first + self.batch_size]
            yield make_batch(self.store, self.requests, index, max_history=self.max_history)
