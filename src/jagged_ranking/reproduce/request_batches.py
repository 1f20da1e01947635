"""Batches of requests whose histories have given lengths, and drawn items: what a step is measured
on where no log is needed but its lengths.

Every batch is cut out of one store of histories by `make_batch`, as in training: making it is part
of a step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from jagged_ranking.data.batch import JaggedBatch, RequestTable, make_batch
from jagged_ranking.data.data_shape import DataShape, Scale
from jagged_ranking.data.matches import MATCHES
from jagged_ranking.data.store import HistoryStore, ItemTable
from jagged_ranking.measure.length_distributions import lognormal, with_waste

CATEGORIES = 64  # codes of the one feature of items
POSITIVE = 0.3  # share of labels
_GAP = 3600  # seconds between two events, on average
# Users that say how long histories are on average, and the median of a lognormal one as a share of
# the cap: some 85% of a padded batch are padding then, as in the workload B of `01_speed`.
_DRAWN, _MEDIAN = 4096, 1 / 16


@dataclass(frozen=True, kw_only=True)
class BatchLengths:
    """Histories of a few batches.

    Args:
        name: of the workload.
        group: "waste", "cap" or "real": what the batches differ from others in.
        cap: the longest history that there may be.
        batches: the lengths of the histories of each.
    """

    name: str
    group: str
    cap: int
    batches: tuple[tuple[int, ...], ...]

    @property
    def waste(self) -> float:
        """Share of the padded batches that is padding."""
        padded = sum(len(lengths) * max(1, *lengths) for lengths in self.batches)
        return 1 - sum(map(sum, self.batches)) / padded


def of_waste(waste: float, *, cap: int, tokens: int, batches: int, seed: int) -> BatchLengths:
    """Lengths of exactly so much padding waste, of about `tokens` events a batch.

    Raises:
        ValueError: no lengths have this waste.
    """
    users = max(1, round(tokens / ((1 - waste) * cap))) if waste < 1 else 1
    drawn = _drawn(lambda generator: with_waste(users, cap, waste, generator), batches, seed)
    return BatchLengths(name=f"waste {waste:.0%}", group="waste", cap=cap, batches=drawn)


def of_cap(cap: int, *, tokens: int, batches: int, seed: int) -> BatchLengths:
    """Lognormal lengths, one of them the cap, of about `tokens` events a batch."""
    median = max(1.0, cap * _MEDIAN)
    mean = float(lognormal(_DRAWN, cap, median, _generator(seed)).double().mean())
    users = max(1, round(tokens / mean))
    drawn = _drawn(lambda generator: lognormal(users, cap, median, generator), batches, seed)
    return BatchLengths(name=f"lognormal {cap}", group="cap", cap=cap, batches=drawn)


def of_requests(cap: int, *, requests: int, batches: int, seed: int) -> BatchLengths:
    """Lognormal lengths of so many requests a batch, one of all of them the cap."""
    median = max(1.0, cap * _MEDIAN)
    drawn = lognormal(requests * batches, cap, median, _generator(seed)).view(batches, requests)
    every = tuple(tuple(lengths) for lengths in drawn.tolist())
    return BatchLengths(name=f"lognormal {cap}", group="cap", cap=cap, batches=every)


def of_log(
    name: str, lengths: np.ndarray, *, cap: int, tokens: int, batches: int, seed: int
) -> BatchLengths:
    """Histories of a log, cut at the cap: users drawn at random, of about `tokens` events a batch.

    Args:
        lengths: of all its users, [U] integers.
    """
    seen = np.minimum(lengths, cap)
    users = max(1, round(tokens / max(1.0, float(seen.mean()))))
    rng = np.random.default_rng(seed)
    drawn = tuple(tuple(rng.choice(seen, users).tolist()) for _ in range(batches))
    return BatchLengths(name=name, group="real", cap=cap, batches=drawn)


def _drawn(
    draw: Callable[[torch.Generator], torch.Tensor], batches: int, seed: int
) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(draw(_generator(seed + number)).tolist()) for number in range(batches))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class RequestBatches:
    """The requests of `BatchLengths`, a user each, on a device.

    Args:
        lengths: of their histories.
        items: that there are; drawn log-uniformly, so that a few are in most histories.
        candidates: of each request.
        device: where they live.
        seed: of items, times and labels.
    """

    def __init__(
        self,
        lengths: BatchLengths,
        *,
        items: int,
        candidates: int,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.cap, self.device = lengths.cap, device
        of_users = np.array([*itertools.chain.from_iterable(lengths.batches)], np.int64)
        ends = np.cumsum([len(batch) for batch in lengths.batches])
        self._rows = np.split(np.arange(len(of_users)), ends[:-1])
        self.shape = DataShape(
            num_items=items,
            categories={"category": CATEGORIES},
            positive_rates={"label": POSITIVE},
            signals={"label": Scale(POSITIVE, math.sqrt(POSITIVE * (1 - POSITIVE)))},
            features={name: Scale(0.0, 1.0) for name in MATCHES},
        )
        self._store = _store(of_users, items, device, rng)
        self._table = _table(of_users, items, candidates, device, rng)

    def each(self) -> list[JaggedBatch]:
        """Every batch once."""
        return [self._made(rows) for rows in self._rows]

    def endless(self) -> Iterator[JaggedBatch]:
        """One batch after another, each made when it is asked for."""
        for rows in itertools.cycle(self._rows):
            yield self._made(rows)

    def _made(self, rows: np.ndarray) -> JaggedBatch:
        return make_batch(self._store, self._table, rows, max_history=self.cap)


def _store(
    lengths: np.ndarray, items: int, device: torch.device, rng: np.random.Generator
) -> HistoryStore:
    tokens = int(lengths.sum())
    offsets = np.concatenate([[0], lengths.cumsum()])
    times = rng.exponential(_GAP, tokens).astype(np.int64).cumsum()
    codes = rng.integers(1, CATEGORIES, (items, 1))
    return HistoryStore(
        offsets=torch.from_numpy(offsets).to(device),
        item=torch.from_numpy(_items(tokens, items, rng)).to(device),
        time=torch.from_numpy(times).to(device),
        signals=torch.from_numpy(_labels(tokens, rng)).to(device),
        items=ItemTable(
            categories=torch.from_numpy(codes.astype(np.int32)).to(device),
            dense=torch.zeros(items, 0, device=device),
        ),
    )


def _table(
    lengths: np.ndarray,
    items: int,
    candidates: int,
    device: torch.device,
    rng: np.random.Generator,
) -> RequestTable:
    requests = len(lengths)
    asked = requests * candidates
    offsets = np.arange(requests + 1) * candidates
    # behind all events, so that whatever a history holds was earlier
    time = np.full(requests, 2 * _GAP * (int(lengths.sum()) + 1), np.int64)
    return RequestTable(
        user=torch.arange(requests, dtype=torch.int32, device=device),
        prefix=torch.from_numpy(lengths.astype(np.int32)).to(device),
        time=torch.from_numpy(time).to(device),
        offsets=torch.from_numpy(offsets).to(device),
        item=torch.from_numpy(_items(asked, items, rng)).to(device),
        label=torch.from_numpy(_labels(asked, rng)).to(device),
        features=torch.zeros(asked, 0, device=device),
        context=torch.zeros(requests, 0, dtype=torch.int32, device=device),
        context_dense=torch.zeros(requests, 0, device=device),
        host_prefix=lengths,
        host_offsets=offsets,
    )


def _items(count: int, items: int, rng: np.random.Generator) -> np.ndarray:
    """int32 [count] in [1, items), log-uniform: the share of an item is as one over its rank."""
    return np.minimum(np.exp(rng.random(count) * math.log(items)), items - 1).astype(np.int32)


def _labels(count: int, rng: np.random.Generator) -> np.ndarray:
    """float32 [count, 1]."""
    return (rng.random((count, 1)) < POSITIVE).astype(np.float32)


def described(found: Sequence[BatchLengths]) -> list[dict[str, object]]:
    """What they hold, for people."""
    return [
        {
            "batch": one.name,
            "history cap": one.cap,
            "requests": len(one.batches[0]),
            "events": sum(one.batches[0]),
            "longest": max(one.batches[0]),
            "padding waste": f"{one.waste:.0%}",
        }
        for one in found
    ]
