"""Batches of one split, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from click_data.pieces import pieces
from jagged_ranking.data.batch import JaggedBatch, RequestTable, make_batch
from jagged_ranking.data.columns import PIECE
from jagged_ranking.data.prefetch import beside_the_step
from jagged_ranking.data.store import HistoryStore


class RequestLoader:
    """Batches of one split, in an order that depends on `(seed, epoch)` alone.

    There is no state to save: `batches(epoch, start=k)` goes on exactly where an interrupted
    epoch stopped. Batches hold `batch_size` requests, or, where `batch_tokens` is given, the
    requests that begin within so many tokens: events that they see and candidates, at most one
    request more than `batch_tokens`. The last batch may be smaller. `rows`: which requests (int64),
    all when None. `share`: where several processes share each batch, which of its requests this
    one makes, by what it is told of each: its tokens, int64 [R]. There may be none. `arrivals`: see
    `make_batch`.

    Of a log in files no memory is held but the order of one epoch: 4 bytes a request.
    """

    def __init__(
        self,
        store: HistoryStore,
        requests: RequestTable,
        *,
        batch_size: int,
        max_history: int,
        batch_tokens: int = 0,
        shuffle: bool = False,
        seed: int = 0,
        rows: np.ndarray | None = None,
        share: Callable[[np.ndarray], np.ndarray] | None = None,
        arrivals: bool = False,
    ) -> None:
        if batch_size < 1 or max_history < 1:
            raise ValueError(
                f"batch_size and max_history must be at least 1, got {batch_size}, {max_history}"
            )
        if batch_tokens < 0:
            raise ValueError(f"batch_tokens must not be negative, got {batch_tokens}")
        self.store, self.requests = store, requests
        self.batch_size, self.batch_tokens, self.max_history = batch_size, batch_tokens, max_history
        self.shuffle, self.seed, self.share = shuffle, seed, share
        self.rows, self.arrivals = rows, arrivals
        self._latest: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """How many requests an epoch has."""
        return len(self.requests) if self.rows is None else len(self.rows)

    def order(self, epoch: int) -> np.ndarray:
        """The requests in the order of `epoch`, int32 (int64 of more than that has numbers); the
        latest is kept."""
        if self._latest is None or self._latest[0] != epoch:
            self._latest = None
            self._latest = epoch, self._ordered(epoch)
        return self._latest[1]

    def _ordered(self, epoch: int) -> np.ndarray:
        least = np.int32 if len(self.requests) <= np.iinfo(np.int32).max else np.int64
        order = np.arange(len(self), dtype=least) if self.rows is None else self.rows.astype(least)
        if self.shuffle:
            # the same whatever the dtype
            np.random.default_rng((self.seed, epoch)).shuffle(order)
        order.flags.writeable = False
        return order

    def cuts(self, order: np.ndarray) -> np.ndarray:
        """Where the batches of an order begin, and where the last one ends: int64 [batches + 1]."""
        if not self.batch_tokens:
            return np.append(np.arange(0, len(order), self.batch_size), len(order))
        cuts, total, last = [], 0, -1
        for some in pieces(len(order), PIECE):
            tokens = self.tokens(order[some])
            ends = total + np.cumsum(tokens)
            batch = (ends - tokens) // self.batch_tokens
            cuts.append(np.flatnonzero(np.diff(batch, prepend=last)) + some.start)
            total, last = int(ends[-1]), int(batch[-1])
        return np.concatenate([*cuts, [len(order)]])

    def tokens(self, rows: np.ndarray) -> np.ndarray:
        """Events that requests see and their candidates, int64 [R]."""
        offsets = self.requests.host_offsets
        seen = np.minimum(self.requests.host_prefix[rows], self.max_history)
        return seen + offsets[rows + 1] - offsets[rows]

    def batches(self, epoch: int = 0, *, start: int = 0) -> Iterator[JaggedBatch]:
        """Batches `start`, `start + 1`, ... of `epoch`."""
        order = self.order(epoch)
        cuts = self.cuts(order)
        made = (
            make_batch(
                self.store,
                self.requests,
                self._shared(order[first:end].astype(np.int64)),
                max_history=self.max_history,
                arrivals=self.arrivals,
            )
            for first, end in zip(cuts[start:-1], cuts[start + 1 :], strict=True)
        )
        return beside_the_step(made, self.store.device)

    def _shared(self, rows: np.ndarray) -> np.ndarray:
        return rows if self.share is None else rows[self.share(self.tokens(rows))]
