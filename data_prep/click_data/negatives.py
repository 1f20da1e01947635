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

from click_data.errors import DataError
from click_data.histories import Histories
from click_data.requests import Requests

POOL = 1000  # events
_ROUNDS = 32
_LARGEST = 2**31 - 1  # candidates
_BYTES = 140  # of memory at the peak for each candidate, measured: drawn, joined, given features


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

    user, item, time: int64 [T]; starts: int64 [N+1], where each block begins.
    """

    user: NDArray[np.int64]
    item: NDArray[np.int64]
    time: NDArray[np.int64]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, histories: Histories, bounds: tuple[int, int], pool: int) -> "Blocks":
        """Blocks of at least `pool` events each, or of a whole split that has fewer.

        None reaches over a bound of the splits (or training would see items of later), and none
        ends within an instant.
        """
        order = np.argsort(histories.time, kind="stable")
        time = histories.time[order]
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
        return cls(histories.user[order], histories.item[order], time, np.append(starts, len(time)))

    def at(self, time: NDArray[np.int64]) -> NDArray[np.int64]:
        """The block of each of some times of events."""
        return np.searchsorted(self.time[self.starts[:-1]], time, side="right") - 1

    def begin(self, time: NDArray[np.int64]) -> NDArray[np.int64]:
        """When the block of each of some times begins."""
        return self.time[self.starts[self.at(time)]]


def draw(
    asked: Requests, blocks: Blocks, task: str, per_event: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw `per_event` distinct items for every positive of a task, uniformly over the events of
    other users in its block: never an item of its own request.

    Returns the candidate row each draw belongs to, ascending, and the item. What a block does not
    have is missing.
    """
    request = np.repeat(np.arange(len(asked.user)), asked.lengths)
    positives = np.flatnonzero(asked.labels[task] == 1)
    rows = np.repeat(positives, per_event)
    mine = request[rows]
    user = asked.user[mine]
    block = blocks.at(asked.time)[mine]
    start, end = blocks.starts[block], blocks.starts[block + 1]
    span = int(max(blocks.item.max(), asked.item.max())) + 1
    own = np.sort(request * span + asked.item)

    drawn = np.full(len(rows), -1, np.int64)
    taken = np.empty(0, np.int64)  # (positive, item) that were drawn, ascending
    todo = np.arange(len(rows))
    for _ in range(_ROUNDS):
        if len(todo) == 0:
            break
        event = rng.integers(start[todo], end[todo])
        item = blocks.item[event]
        pair = rows[todo] * span + item
        good = (blocks.user[event] != user[todo]) & ~_among(mine[todo] * span + item, own)
        if per_event > 1:
            good &= ~_among(pair, taken)
            good[good] = _first_of_each(pair[good])
            taken = np.sort(np.concatenate([taken, pair[good]]))
        drawn[todo[good]] = item[good]
        todo = todo[~good]
    for left in np.split(todo, np.flatnonzero(np.diff(rows[todo])) + 1) if len(todo) else ():
        one = left[0]
        inside = slice(start[one], end[one])
        others = blocks.item[inside][blocks.user[inside] != user[one]]
        row = slice(asked.offsets[mine[one]], asked.offsets[mine[one] + 1])
        slots = slice(one - one % per_event, one - one % per_event + per_event)
        used = np.concatenate([asked.item[row], drawn[slots]])
        others = rng.permutation(others[~np.isin(others, used)])
        _, first = np.unique(others, return_index=True)
        rest = others[np.sort(first)][: len(left)]
        drawn[left[: len(rest)]] = rest
    kept = drawn >= 0
    return rows[kept], drawn[kept]


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
