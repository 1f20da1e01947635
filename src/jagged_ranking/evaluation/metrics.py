"""Metrics of binary ranking, and the uncertainty of their differences.

AUC and log loss are scikit-learn's. gAUC is the AUC inside each user, weighted by the user's
impressions, over the users who have both labels (the others have no AUC and are left out, of the
weights too). NE is the log loss over the entropy of the *training* CTR: below 1 means better than
always answering that rate (He et al., ADKDD 2014, section 3; they divide by the CTR of the data
that is scored, we by the one that was known when the model was made).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

METRICS = ("auc", "gauc", "ne", "log_loss")
CHUNK = 2**22  # bootstrap weights held at a time


def auc(label: np.ndarray, score: np.ndarray) -> float:
    """Area under the ROC curve; NaN unless both labels occur."""
    if len(np.unique(label)) < 2:
        return float("nan")
    return float(roc_auc_score(label, score))


def log_loss(label: np.ndarray, probability: np.ndarray) -> float:
    """Mean negative log likelihood, in nats."""
    return float(sklearn_log_loss(label, np.asarray(probability, np.float64), labels=[0, 1]))


def entropy(rate: float) -> float:
    """Entropy of a yes/no variable with this rate of yes, in nats."""
    if not 0 < rate < 1:
        raise ValueError(f"the train CTR must lie strictly between 0 and 1, got {rate}")
    return float(-rate * np.log(rate) - (1 - rate) * np.log1p(-rate))


def normalized_entropy(label: np.ndarray, probability: np.ndarray, *, train_ctr: float) -> float:
    """Log loss over the entropy of the train CTR."""
    return log_loss(label, probability) / entropy(train_ctr)


def gauc(user: np.ndarray, label: np.ndarray, score: np.ndarray) -> float:
    """Impression-weighted mean of the users' AUC; NaN where no user has both labels."""
    value, impressions = user_auc(user, label, score)
    rated = ~np.isnan(value)
    if not rated.any():
        return float("nan")
    return float(np.average(value[rated], weights=impressions[rated]))


def user_auc(
    user: np.ndarray, label: np.ndarray, score: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """AUC and impressions of each user, in ascending order of the user ids.

    NaN for a user of one label. By rank sums for all users at once (ties count half): what a loop
    over `roc_auc_score` gives, without the loop.
    """
    _, group = np.unique(user, return_inverse=True)
    impressions = np.bincount(group)
    positive = np.asarray(label) > 0
    order = np.lexsort((score, group))
    by_user, by_score = group[order], np.asarray(score)[order]
    fresh = (np.diff(by_user, prepend=-1) != 0) | np.r_[True, by_score[1:] != by_score[:-1]]
    tie = np.cumsum(fresh) - 1
    place = np.arange(1, len(order) + 1, dtype=np.float64)
    rank = (np.bincount(tie, place) / np.bincount(tie))[tie]
    rank -= (np.cumsum(impressions) - impressions)[by_user]
    positives = np.bincount(group, positive)
    rank_sum = np.bincount(by_user, rank * positive[order])
    pairs = positives * (impressions - positives)
    with np.errstate(invalid="ignore"):
        return (rank_sum - positives * (positives + 1) / 2) / np.where(
            pairs > 0, pairs, np.nan
        ), impressions


def evaluate_metrics(
    user: np.ndarray, label: np.ndarray, probability: np.ndarray, *, train_ctr: float
) -> dict[str, float]:
    """All of `METRICS` of one set of predictions [N]."""
    return {
        "auc": auc(label, probability),
        "gauc": gauc(user, label, probability),
        "ne": normalized_entropy(label, probability, train_ctr=train_ctr),
        "log_loss": log_loss(label, probability),
    }


@dataclass(frozen=True)
class Difference:
    """`value` = metric(a) - metric(b), with the bounds of its interval."""

    value: float
    low: float
    high: float


def paired_bootstrap(
    metric: str,
    user: np.ndarray,
    label: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    *,
    train_ctr: float | None = None,
    replicates: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Difference:
    """Percentile interval of metric(a) - metric(b), resampling whole users.

    a, b: probabilities [N], or [seeds, N]: then the mean of the metric over seeds is compared, and
    the interval says what other users would do to it, not what other seeds would. A replicate
    draws the same users for a and b. `train_ctr` is needed for "ne".

    The impressions of a user share the user, so that resampling single rows would give intervals
    that are too narrow.
    """
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    if metric == "ne" and train_ctr is None:
        raise ValueError('metric "ne" needs train_ctr')
    divisor = entropy(train_ctr) if metric == "ne" and train_ctr is not None else 1.0
    _, group = np.unique(user, return_inverse=True)
    users = int(group.max()) + 1
    make = {"auc": _weighted_auc, "gauc": _weighted_gauc}.get(metric, _weighted_log_loss)
    scores_a = [make(group, label, row) for row in np.atleast_2d(a)]
    scores_b = [make(group, label, row) for row in np.atleast_2d(b)]

    def difference(weight: np.ndarray) -> np.ndarray:
        mean_a = np.mean([score(weight) for score in scores_a], axis=0)
        return (mean_a - np.mean([score(weight) for score in scores_b], axis=0)) / divisor

    value = difference(np.ones((1, users)))[0]
    drawn = np.concatenate(
        [difference(w) for w in _resampled(users, len(group), replicates=replicates, seed=seed)]
    )
    tail = 100 * (1 - level) / 2
    low, high = np.nanpercentile(drawn, [tail, 100 - tail])
    return Difference(float(value), float(low), float(high))


def _resampled(users: int, rows: int, *, replicates: int, seed: int) -> Iterator[np.ndarray]:
    """How often each user is drawn, [R', users] a chunk, R' adding up to `replicates`."""
    rng = np.random.default_rng(seed)
    step = max(1, CHUNK // max(rows, users))
    for first in range(0, replicates, step):
        size = min(step, replicates - first)
        yield rng.multinomial(users, np.full(users, 1 / users), size=size).astype(np.float64)


_Weighted = Callable[[np.ndarray], np.ndarray]  # user weights [R, U] -> metric [R]


def _weighted_auc(group: np.ndarray, label: np.ndarray, score: np.ndarray) -> _Weighted:
    order = np.argsort(score, kind="stable")
    tie = rankdata(score, method="dense")[order] - 1
    first, last = np.searchsorted(tie, tie), np.searchsorted(tie, tie, side="right")
    by_score, positive = group[order], (np.asarray(label) > 0)[order]

    def metric(weight: np.ndarray) -> np.ndarray:
        w = weight[:, by_score]
        negatives = np.zeros((len(w), len(tie) + 1))
        np.cumsum(w * ~positive, axis=1, out=negatives[:, 1:])
        beaten = (negatives[:, first] + negatives[:, last]) / 2
        w_positive = w * positive
        return (w_positive * beaten).sum(1) / (w_positive.sum(1) * negatives[:, -1])

    return metric


def _weighted_gauc(group: np.ndarray, label: np.ndarray, score: np.ndarray) -> _Weighted:
    value, impressions = user_auc(group, label, score)
    rated = ~np.isnan(value)
    return lambda weight: (
        (weight[:, rated] @ (value * impressions)[rated]) / (weight[:, rated] @ impressions[rated])
    )


def _weighted_log_loss(group: np.ndarray, label: np.ndarray, score: np.ndarray) -> _Weighted:
    smallest = np.finfo(np.float64).eps
    p = np.clip(np.asarray(score, np.float64), smallest, 1 - smallest)
    loss = np.bincount(group, -np.where(np.asarray(label) > 0, np.log(p), np.log1p(-p)))
    impressions = np.bincount(group)
    return lambda weight: (weight @ loss) / (weight @ impressions)
