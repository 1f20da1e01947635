"""Label-0 samples for logs that hold only positive events."""

import os

import numpy as np
from numpy.typing import NDArray

from click_data.errors import DataError

_ROUNDS = 64
_LARGEST = 2**31 - 1  # samples
_BYTES = 70  # of memory at the peak for each sample, measured: they are drawn, joined and sorted


def refuse_draws(per_event: int, *, total: int, items: int) -> None:
    """Raise before memory is asked for that is not there, or that no draws are worth.

    total: samples with the drawn ones; items: of the training period, which are drawn from.
    """
    option = f"--negatives {per_event}"
    if per_event > items:
        raise DataError(f"{option}: the training period has only {items:,} items to draw from")
    if total > _LARGEST:
        raise DataError(f"{option}: {total:,} samples; more than {_LARGEST:,} are not supported")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if total * _BYTES > memory:
        raise DataError(
            f"{option}: {total:,} samples need about {total * _BYTES / 1e9:.1f} GB of memory, and "
            f"there are {memory / 1e9:.1f} GB"
        )


def sample_negatives(
    *,
    user: NDArray[np.int32],
    item: NDArray[np.int32],
    positive: NDArray[np.bool_],
    num_items: int,
    per_event: int,
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Draw `per_event` items for every positive event of a known item, uniformly from the train
    vocabulary.

    user, item: [T] indices and vocabulary ids of all events; an item is never drawn for a user who
    touches it anywhere in the log, later events included (or a later like could be called a
    dislike). num_items counts the unknown item 0, which is never drawn, and for whose events
    nothing is drawn: a ranker could tell them from any draw without looking at the history.
    Whoever draws leaves them out of the samples.

    Returns the event row each draw belongs to, ascending, and the item. Draws for users who
    touch (nearly) every item are given up after many tries, so a few may be missing.
    """
    touched = np.unique(user.astype(np.int64) * num_items + item)
    rows = np.repeat(np.flatnonzero(positive & (item != 0)), per_event)
    drawn = np.zeros(len(rows), np.int32)
    if num_items < 2:
        return rows[:0], drawn[:0]
    open_ = np.arange(len(rows))
    for _ in range(_ROUNDS):
        drawn[open_] = rng.integers(1, num_items, len(open_), dtype=np.int32)
        pair = user[rows[open_]].astype(np.int64) * num_items + drawn[open_]
        found = np.minimum(np.searchsorted(touched, pair), len(touched) - 1)
        open_ = open_[touched[found] == pair]
        if len(open_) == 0:
            break
    kept = np.ones(len(rows), bool)
    kept[open_] = False
    return rows[kept], drawn[kept]
