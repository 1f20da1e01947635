"""Label-0 candidates for logs that hold only positive events: what others did at that time.

A draw is an event of another user in the same block of the log. So a draw and its positive are
items of one time, each as popular as it is then, new or not, and either may be in the user's
history. Draws of what a user never touches would give the label away: whoever returns to an item
would only have to look for it in the history.
"""

import os
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from click_data.arrays import gather, rows_of, stable_order
from click_data.errors import DataError
from click_data.histories import Histories
from click_data.pieces import pieces
from click_data.requests import Requests

POOL = 1000  # events
_ROUNDS = 32
_LARGEST = 2**31 - 1  # candidates
_BYTES = 80  # of memory at the peak for each candidate, measured: drawn, joined, given features


def refuse_draws(per_event: int, *, pool: int, total: int, items: int) -> None:
    """Raise before memory is asked for that is not there, or that no draws are worth.

    pool: events of a block; total: candidates with the drawn ones; items: of the log.
    """
    option = f"--negatives {per_event}"
    if per_event >= items:
        raise DataError(f"{option}: the log has only {items:,} items, one of them the positive")
    if per_event >= pool:
        raise DataError(f"{option}: more than one of {pool:,} events can give; see --pool")
    if total > _LARGEST:
        raise DataError(f"{option}: {total:,} candidates; more than {_LARGEST:,} are not supported")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if total * _BYTES > memory:
        raise DataError(
            f"{option}: {total:,} candidates need about {total * _BYTES / 1e9:.1f} GB of memory, "
            f"and there are {memory / 1e9:.1f} GB"
        )


@dataclass(frozen=True)
class Blocks:
    """Events in time order, cut into blocks.

    user, item int32, time int64 [T]; starts: int64 [N+1], where each block begins.
    """

    user: NDArray[np.int32]
    item: NDArray[np.int32]
    time: NDArray[np.int64]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, histories: Histories, bounds: tuple[int, int], pool: int) -> "Blocks":
        """Blocks of at least `pool` events each, or of a whole split that has fewer.

        None reaches over a bound of the splits (or training would see items of later), and none
        ends within an instant.
        """
        order = stable_order(histories.time)
        time = gather(histories.time, order)
        cuts = [0, *np.searchsorted(time, bounds).tolist(), len(time)]
        starts = []
        for begin, end in pairwise(cuts):
            start = begin
            while start < end:
                starts.append(start)
                start = start + pool
                if end - start >= pool:
                    start = int(np.searchsorted(time, time[start - 1], side="right"))
                if end - start < pool:
                    start = end
        user, item = (gather(values, order) for values in (histories.user, histories.item))
        return cls(user, item, time, np.append(starts, len(time)))

    def at(self, time: NDArray[np.int64]) -> NDArray[np.int64]:
        """The block of each of some times of events."""
        return np.searchsorted(self.time[self.starts[:-1]], time, side="right") - 1

    def begin(self, time: NDArray[np.int64]) -> NDArray[np.int64]:
        """When the block of each of some times begins."""
        return self.time[self.starts[self.at(time)]]


def draw(
    asked: Requests, blocks: Blocks, task: str, per_event: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Draw `per_event` distinct items for every positive of a task, uniformly over the events of
    other users in its block: never an item of its own request.

    Returns the candidate row each draw belongs to, ascending, and the item. What a block does not
    have is missing.
    """
    positives = np.flatnonzero(asked.labels[task] == 1)
    drawn = np.full(len(positives) * per_event, -1, np.int32)
    todo = np.arange(len(drawn))
    for _ in range(_ROUNDS):
        left = [
            _draw_some(asked, blocks, positives, drawn, todo[some], per_event, rng)
            for some in pieces(len(todo))
        ]
        todo = np.concatenate([todo[:0], *left])
    for first in todo[np.r_[True, np.diff(todo // per_event) != 0]] if len(todo) else ():
        slots = slice(first - first % per_event, first - first % per_event + per_event)
        row = positives[first // per_event]
        request = np.searchsorted(asked.offsets, row, side="right") - 1
        block = blocks.at(asked.time[request])
        inside = slice(blocks.starts[block], blocks.starts[block + 1])
        others = blocks.item[inside][blocks.user[inside] != asked.user[request]]
        own = asked.item[asked.offsets[request] : asked.offsets[request + 1]]
        others = rng.permutation(others[~np.isin(others, [*own, *drawn[slots]])])
        _, place = np.unique(others, return_index=True)
        empty = np.flatnonzero(drawn[slots] < 0) + slots.start
        rest = others[np.sort(place)][: len(empty)]
        drawn[empty[: len(rest)]] = rest
    kept = np.flatnonzero(drawn >= 0)
    return positives[kept // per_event], drawn[kept]


def _draw_some(
    asked: Requests,
    blocks: Blocks,
    positives: NDArray[np.int64],
    drawn: NDArray[np.int32],
    slots: NDArray[np.int64],
    per_event: int,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Fill some of the `drawn` slots, of which each positive has `per_event`; those that are left.

    An item that is no candidate leaves its slot as it is.
    """
    positive = slots // per_event
    request = np.searchsorted(asked.offsets, positives[positive], side="right") - 1
    user, block = asked.user[request], blocks.at(asked.time[request])
    event = rng.integers(blocks.starts[block], blocks.starts[block + 1])
    item = blocks.item[event]
    span = 2**31
    mine = request[np.append(True, request[1:] != request[:-1])]
    rows = rows_of(asked.offsets, mine)
    lengths = asked.offsets[mine + 1] - asked.offsets[mine]
    own = np.sort(np.repeat(mine, lengths) * span + asked.item[rows])
    good = (blocks.user[event] != user) & ~_among(request * span + item, own)
    if per_event > 1:
        others = drawn.reshape(-1, per_event)[positive]
        good &= ~(others == item[:, None]).any(axis=1)
        good[good] = _first_of_each(positive[good] * span + item[good])
    drawn[slots[good]] = item[good]
    return slots[~good]


def _among(values: NDArray[np.int64], known: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each value is one of the `known`, which ascend."""
    if len(known) == 0:
        return np.zeros(len(values), bool)
    found = np.minimum(np.searchsorted(known, values), len(known) - 1)
    return known[found] == values


def _first_of_each(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether a value is the first of its like."""
    first = np.zeros(len(values), bool)
    first[np.unique(values, return_index=True)[1]] = True
    return first
