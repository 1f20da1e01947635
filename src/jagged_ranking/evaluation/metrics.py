"""Metrics of ranking.

AUC and log loss are scikit-learn's. gAUC is the AUC inside each user, weighted by the user's
impressions, over the users who have both labels (the others have no AUC and are left out, of the
weights too). NE is the log loss over the entropy of the *training* CTR: below 1 means better than
always answering that rate (He et al., ADKDD 2014, section 3; they divide by the CTR of the data
that is scored, we by the one that was known when the model was made).

Metrics of lists look at one request at a time, and are means over the requests that have a
positive candidate (for their AUC: and another). They are taken where requests have `LIST` or more
candidates on average. Candidates of equal score share the mean of their ranks.
"""

from __future__ import annotations

import numpy as np

METRICS = ("auc", "gauc", "ne", "log_loss")
OF_PROBABILITIES = ("ne", "log_loss")  # all others are of order
LIST_METRICS = ("list_auc", "mrr", "hr@10", "ndcg@10")
LIST = 5  # candidates a request, from which on the requests are called lists
TOP = 10


def auc(label: np.ndarray, score: np.ndarray) -> float:
    """Area under the ROC curve; NaN unless both labels occur."""
    if len(np.unique(label)) < 2:
        return float("nan")
    from sklearn.metrics import roc_auc_score  # slow to import

    return float(roc_auc_score(label, score))


def log_loss(label: np.ndarray, probability: np.ndarray) -> float:
    """Mean negative log likelihood, in nats."""
    from sklearn.metrics import log_loss as sklearn_log_loss  # slow to import

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


def request_metrics(
    request: np.ndarray, label: np.ndarray, score: np.ndarray
) -> dict[str, np.ndarray]:
    """Each of `LIST_METRICS` of each request, [R] in ascending order of the request numbers.

    NaN for a request without a positive candidate, or, of its AUC, without both labels. mrr: one
    over the rank of the best positive; hr@10: whether one is among the first ten; ndcg@10: their
    discounted gain over that of the best order.
    """
    value, _ = user_auc(request, label, score)
    _, group = np.unique(request, return_inverse=True)
    positive = np.asarray(label) > 0
    by_group, rank = group[positive], _ranks(group, score)[positive]
    positives = np.bincount(group, positive).astype(np.int64)
    best = np.full(len(positives), np.inf)
    np.minimum.at(best, by_group, rank)
    gain = np.bincount(by_group, (rank <= TOP) / np.log2(1 + rank), minlength=len(positives))
    ideal = np.cumsum(1 / np.log2(np.arange(2, TOP + 2)))
    with np.errstate(invalid="ignore"):
        asked = np.where(positives > 0, 1.0, np.nan)
    return {
        "list_auc": value,
        "mrr": asked / best,
        "hr@10": asked * (best <= TOP),
        "ndcg@10": asked * gain / ideal[np.clip(positives, 1, TOP) - 1],
    }


def _ranks(group: np.ndarray, score: np.ndarray) -> np.ndarray:
    """Rank of each score in its group, the highest 1; equal ones share their mean rank."""
    order = np.lexsort((-np.asarray(score), group))
    by_group, by_score = group[order], np.asarray(score)[order]
    fresh = (np.diff(by_group, prepend=-1) != 0) | np.r_[True, by_score[1:] != by_score[:-1]]
    tie = np.cumsum(fresh) - 1
    place = np.arange(len(order)) - np.flatnonzero(np.diff(by_group, prepend=-1) != 0)[by_group]
    rank = np.empty(len(order))
    rank[order] = 1 + (np.bincount(tie, place) / np.bincount(tie))[tie]
    return rank


def are_lists(candidates: int, requests: int) -> bool:
    """Whether so many requests that have candidates have `LIST` or more on average."""
    return candidates >= LIST * requests > 0


def metric_names(candidates: int, requests: int) -> tuple[str, ...]:
    """What `evaluate_metrics` has of so many candidates of so many requests."""
    return METRICS + (LIST_METRICS if are_lists(candidates, requests) else ())


def evaluate_metrics(
    user: np.ndarray,
    request: np.ndarray,
    label: np.ndarray,
    probability: np.ndarray,
    *,
    train_ctr: float,
) -> dict[str, float]:
    """All of `METRICS`, and of `LIST_METRICS` for lists, of one set of predictions [C]."""
    found = {
        "auc": auc(label, probability),
        "gauc": gauc(user, label, probability),
        "ne": normalized_entropy(label, probability, train_ctr=train_ctr),
        "log_loss": log_loss(label, probability),
    }
    if are_lists(len(request), len(np.unique(request))):
        for name, values in request_metrics(request, label, probability).items():
            rated = values[~np.isnan(values)]
            found[name] = float(rated.mean()) if len(rated) else float("nan")
    return found
