"""What gives a label away: told of a log, as a warning, when it is prepared."""

from collections.abc import Iterator

import numpy as np
import polars as pl
from numpy.typing import NDArray

from click_data.arrays import rows_of
from click_data.histories import Histories
from click_data.requests import Requests
from click_data.split import SPLITS

_LOOKED_AT = 2**17  # candidates of the training period at most, the first
_PERFECT = 0.9995  # rounds to 1.000
_FEWEST = 20  # labels of a kind: fewer are told apart by chance
_USES = 5  # requests a value, at least: ids of requests tell all of them apart


def leaks(asked: Requests, histories: Histories) -> list[str]:
    """A line for each thing that separates labels of the training period perfectly.

    asked: requests by split.
    Looked at are features and contexts that a log gives (its contexts `coded`), for each task, and
    whether the history holds the candidate, for the first one: where it holds whatever is clicked,
    it holds the clicks themselves.
    """
    train = int((asked.period == SPLITS.index("train")).sum())  # which come first
    within = int(np.searchsorted(asked.offsets, _LOOKED_AT, side="right")) - 1
    some = asked.take(np.arange(min(train, within)))
    told = []
    for task, label in some.labels.items():
        clicked = label == 1
        if min(clicked.sum(), (~clicked).sum()) < _FEWEST:
            continue
        for name, score in _scores(some, clicked):
            area = auc(score, clicked)
            if max(area, 1 - area) >= _PERFECT:
                told.append(
                    f"{name} separates the labels {task!r} perfectly (AUC {area:.3f} on train): "
                    f"a leak?"
                )
    clicked = next(iter(some.labels.values())) == 1
    if min(clicked.sum(), (~clicked).sum()) >= _FEWEST:
        held = in_history(some, histories)
        inside, other = held[clicked].mean(), held[~clicked].mean()
        if inside >= _PERFECT and other < 0.5:
            told.append(
                f"histories hold {inside:.1%} of the clicked candidates and {other:.1%} of the "
                f"others (train): the clicks themselves, a leak?"
            )
    return told


def auc(score: NDArray[np.floating], positive: NDArray[np.bool_]) -> float:
    """The share of pairs of a positive and another that a score orders, ties counting half."""
    rank = pl.Series(score).rank("average").to_numpy()
    number = int(positive.sum())
    above = rank[positive].sum() - number * (number + 1) / 2
    return float(above / (number * (len(score) - number)))


def in_history(asked: Requests, histories: Histories) -> NDArray[np.bool_]:
    """Whether each candidate is among the events that its request may see, [C]."""
    users = np.unique(asked.user)
    events = rows_of(histories.offsets, users)
    span = int(max(histories.item.max(initial=0), asked.item.max(initial=0))) + 1
    pairs, first = np.unique(
        histories.user[events].astype(np.int64) * span + histories.item[events], return_index=True
    )
    place = events[first] - histories.offsets[histories.user[events[first]]]
    wanted = np.repeat(asked.user.astype(np.int64), asked.lengths) * span + asked.item
    if len(pairs) == 0:
        return np.zeros(len(wanted), bool)
    found = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    return (pairs[found] == wanted) & (place[found] < np.repeat(asked.prefix, asked.lengths))


def _scores(asked: Requests, clicked: NDArray[np.bool_]) -> Iterator[tuple[str, NDArray]]:
    """What could tell labels apart, by its name, as a number for each candidate."""
    for name, values in asked.features.items():
        yield f"feature {name!r}", values
    for name, context in asked.context.items():
        values = np.repeat(context.to_numpy(), asked.lengths)
        if asked.context_codes[name] is not None:
            uses = np.bincount(values)
            if (uses > 0).sum() * _USES > len(asked.user):
                continue
            values = (np.bincount(values, weights=clicked) / np.maximum(uses, 1))[values]
        yield f"context {name!r}", values
