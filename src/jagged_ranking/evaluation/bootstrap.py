"""How far metrics would be from each other with other users and other seeds: the paired bootstrap.

Whole users are drawn, since the impressions of one share him: drawn alone they would give
intervals that are too narrow. All that is compared is drawn the same users. Users count as often
as they are drawn, so that nothing is sorted again (Efron and Tibshirani, An Introduction to the
Bootstrap, 1993, chapter 13, on percentile intervals).

Seeds are too few to be drawn anew among themselves: the mean of three that are would vary by a
fifth less than that of three others does. Means over seeds are off by as much as Student's t says
(Welch, Biometrika 1947, where each side has seeds of its own).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from jagged_ranking.evaluation.metrics import (
    LIST_METRICS,
    METRICS,
    entropy,
    request_metrics,
    user_auc,
)

CHUNK = 2**22  # counts of users held at a time


@dataclass(frozen=True)
class Difference:
    """`value` = one metric minus another, with the bounds of its interval."""

    value: float
    low: float
    high: float


def redrawn(
    metrics: Collection[str],
    user: np.ndarray,
    request: np.ndarray,
    label: np.ndarray,
    probability: np.ndarray,
    *,
    train_ctr: float | None = None,
    replicates: int = 2000,
    seed: int = 0,
) -> dict[str, np.ndarray]:
    """Each metric of each seed: of all users, and of users drawn anew, again and again.

    Args:
        metrics: of `METRICS` and `LIST_METRICS`.
        user, request, label: of each candidate, [C].
        probability: [seeds, C], or [C] of one seed.
        train_ctr: needed for "ne".
        replicates: how often users are drawn.
        seed: of the draws; of one seed and the same users they are the same.

    Returns:
        [1 + replicates, seeds] float64 by metric, the first row of all users.

    Raises:
        ValueError: a metric that there is not, or "ne" without `train_ctr`.
    """
    for metric in metrics:
        if metric not in (*METRICS, *LIST_METRICS):
            known = ", ".join((*METRICS, *LIST_METRICS))
            raise ValueError(f"metric must be one of {known}, got {metric!r}")
    if "ne" in metrics and train_ctr is None:
        raise ValueError('metric "ne" needs train_ctr')
    _, group = np.unique(user, return_inverse=True)
    users = int(group.max()) + 1
    scored = [_weighted(metrics, group, request, label, row) for row in np.atleast_2d(probability)]
    found: dict[str, list[np.ndarray]] = {metric: [] for metric in metrics}
    drawn = _drawn_users(users, replicates=replicates, rng=np.random.default_rng(seed))
    for times in itertools.chain([np.ones((1, users), np.int64)], drawn):
        for metric, parts in found.items():
            parts.append(np.stack([one[metric](times) for one in scored], axis=1))
    values = {metric: np.concatenate(parts) for metric, parts in found.items()}
    if train_ctr is not None and "ne" in values:
        values["ne"] /= entropy(train_ctr)
    return values


def difference(
    ours: np.ndarray,
    theirs: np.ndarray,
    *,
    paired: bool = False,
    level: float = 0.95,
    seed: int = 0,
) -> Difference:
    """The mean over seeds of ours minus that of theirs, and the percentile interval of it.

    A replicate has other users, and means that are off as those of other seeds would be: the
    interval says what other users and other seeds would do. With one seed on a side nothing is
    known of others, and the interval is without them.

    Args:
        ours, theirs: of `redrawn`, [1 + replicates, seeds] of one metric and the same draws.
        paired: a seed is one training on both sides, of which the difference alone varies.
        level: of the interval.
        seed: of the draws of what means over seeds are off by.
    """
    apart = [ours[0] - theirs[0]] if paired else [ours[0], theirs[0]]
    error, freedom = _error_of_means(apart)
    replicates = ours[1:].mean(axis=1) - theirs[1:].mean(axis=1)
    if error > 0:
        rng = np.random.default_rng(seed)
        replicates = replicates + error * rng.standard_t(freedom, size=len(replicates))
    tail = 100 * (1 - level) / 2
    low, high = np.nanpercentile(replicates, [tail, 100 - tail])
    return Difference(float(ours[0].mean() - theirs[0].mean()), float(low), float(high))


def _error_of_means(sides: Sequence[np.ndarray]) -> tuple[float, float]:
    """The standard error of the difference of means over seeds, each side [seeds], and its degrees
    of freedom; 0 where no side has two seeds that differ."""
    several = [side for side in sides if len(side) > 1]
    squares = np.array([side.var(ddof=1) / len(side) for side in several])
    if not (total := squares.sum()) > 0:
        return 0.0, math.inf
    freedom = np.array([len(side) - 1 for side in several])
    return math.sqrt(total), float(total**2 / (squares**2 / freedom).sum())


def _drawn_users(users: int, *, replicates: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """How often each user is drawn, [R', users] int64 a chunk, R' adding up to `replicates`."""
    step = max(1, CHUNK // users)
    for first in range(0, replicates, step):
        chunk = range(first, min(first + step, replicates))
        drawn = [np.bincount(rng.integers(users, size=users), minlength=users) for _ in chunk]
        yield np.stack(drawn)


_Weighted = Callable[[np.ndarray], np.ndarray]  # how often each user counts [R, U] -> metric [R]


def _weighted(
    metrics: Collection[str], group: np.ndarray, request: np.ndarray, label: np.ndarray,
    score: np.ndarray,
) -> dict[str, _Weighted]:  # fmt: skip
    """Each metric of one set of predictions, as a function of how often each user counts."""
    found: dict[str, _Weighted] = {}
    make = {"auc": _weighted_auc, "gauc": _weighted_gauc}
    for metric in (metric for metric in metrics if metric in METRICS):
        found[metric] = make.get(metric, _weighted_log_loss)(group, label, score)
    if len(found) < len(metrics):
        values = request_metrics(request, label, score)
        for metric in (metric for metric in metrics if metric in LIST_METRICS):
            found[metric] = _weighted_lists(group, request, values[metric])
    return found


def _weighted_auc(group: np.ndarray, label: np.ndarray, score: np.ndarray) -> _Weighted:
    positive, score = np.asarray(label) > 0, np.asarray(score)
    order = np.argsort(score, kind="stable")
    won, lost = order[positive[order]], order[~positive[order]]
    below = torch.from_numpy(np.searchsorted(score[lost], score[won]))
    up_to = torch.from_numpy(np.searchsorted(score[lost], score[won], side="right"))
    winner, loser = torch.from_numpy(group[won]), torch.from_numpy(group[lost])

    def metric(times: np.ndarray) -> np.ndarray:
        beaten = torch.zeros(len(lost) + 1, dtype=torch.int64)
        found = np.empty((2, len(times)), np.int64)
        # One replicate at a time: what it touches stays in the cache. Whole numbers: no rounding.
        # By torch, in which threads do not wait for each other as in NumPy's indexing.
        for place, of_user in enumerate(torch.from_numpy(times)):
            torch.cumsum(of_user.index_select(0, loser), 0, out=beaten[1:])
            wins = of_user.index_select(0, winner)
            twice = beaten.index_select(0, below) + beaten.index_select(0, up_to)
            found[:, place] = int((wins * twice).sum()), 2 * int(wins.sum()) * int(beaten[-1])
        return _ratio(*found)

    return metric


def _weighted_gauc(group: np.ndarray, label: np.ndarray, score: np.ndarray) -> _Weighted:
    value, impressions = user_auc(group, label, score)
    rated = np.where(np.isnan(value), 0, impressions)
    total = rated * np.nan_to_num(value)
    return lambda times: _ratio(times @ total, times @ rated)


def _weighted_log_loss(group: np.ndarray, label: np.ndarray, score: np.ndarray) -> _Weighted:
    smallest = np.finfo(np.float64).eps
    p = np.clip(np.asarray(score, np.float64), smallest, 1 - smallest)
    loss = np.bincount(group, -np.where(np.asarray(label) > 0, np.log(p), np.log1p(-p)))
    impressions = np.bincount(group)
    return lambda times: _ratio(times @ loss, times @ impressions)


def _weighted_lists(group: np.ndarray, request: np.ndarray, value: np.ndarray) -> _Weighted:
    """The mean over requests, of which each belongs to one user."""
    _, first = np.unique(request, return_index=True)
    rated, users = ~np.isnan(value), int(group.max()) + 1
    owner = group[first][rated]
    total = np.bincount(owner, value[rated], minlength=users)
    count = np.bincount(owner, minlength=users)
    return lambda times: _ratio(times @ total, times @ count)


def _ratio(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """NaN where nobody counts."""
    with np.errstate(invalid="ignore"):
        return total / count
