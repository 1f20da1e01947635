"""What needs no model of a history, to be reported beside every model.

- counts: how often a user, an item, and a user within a category was positive so far, each counted
  over candidates strictly earlier than the request; where requests have no times, over those of the
  train split's other requests. Of an item in whose place others were drawn, clicks before the draw.
- popularity: how often anyone clicked the item so far, and lately, and how often it was shown.
- repeats: whether the user has met the item before, how often, and how long ago.

Each is a logistic regression on the numbers named, fitted to the train split, so that it gives
probabilities. How far it follows them is chosen on the validation split: counts grow with time,
and on logs of a few days a weight that fits the train period would extrapolate far beyond it. A
ranker that does not beat these has learned nothing from the order and the contents of histories.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from click_data.split import SPLITS
from jagged_ranking.data.matches import MATCHES, whole_matches
from jagged_ranking.evaluation.evaluate import Evaluation
from jagged_ranking.evaluation.metrics import log_loss

if TYPE_CHECKING:
    from click_data import ClickDataset, RequestColumns

PRIOR_EVENTS = {"user": 5.0, "item": 10.0, "user_category": 5.0}
POPULARITY = ("popularity", "trend", "shown")  # of the features that prepared data may have
# Inverse strengths of the L2 penalty, from hardly more than the train rate to hardly a penalty.
PENALTIES = tuple(10.0**power for power in range(-6, 2))

Features = dict[str, np.ndarray]  # by split, float64 [C, F]


def running_counts(
    key: np.ndarray, time: np.ndarray, label: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Candidates, and positive ones, of the same key at strictly earlier times; [N] each."""
    order = np.lexsort((time, key))
    by_key, by_time = key[order], time[order]
    positives = np.concatenate([[0], np.cumsum(label[order], dtype=np.int64)])
    place = np.arange(len(order))
    new_key = np.r_[True, by_key[1:] != by_key[:-1]][: len(order)]
    new_time = new_key | np.r_[True, by_time[1:] != by_time[:-1]][: len(order)]
    first_of_key = np.maximum.accumulate(np.where(new_key, place, 0))
    first_of_time = np.maximum.accumulate(np.where(new_time, place, 0))
    events = np.empty(len(order), np.int64)
    positive = np.empty(len(order), np.int64)
    events[order] = first_of_time - first_of_key
    positive[order] = positives[first_of_time] - positives[first_of_key]
    return events, positive


def train_counts(
    key: np.ndarray, request: np.ndarray, label: np.ndarray, train: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of the first `train` candidates, those of the same key in other requests than the candidate's
    own, and the positive ones of these; [N] each.

    The whole request is left out, and not the candidate alone: where each request has as many
    positive ones, what is left of the others would tell the candidate's own label.
    """
    _, key = np.unique(key, return_inverse=True)
    _, own = np.unique(key * (int(request.max(initial=0)) + 1) + request, return_inverse=True)

    def counted(group: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        groups = int(group.max(initial=-1)) + 1
        of_group = np.bincount(group[:train], weights, minlength=groups)
        return of_group.astype(np.int64)[group]

    positive = label[:train]
    return counted(key) - counted(own), counted(key, positive) - counted(own, positive)


def count_features(dataset: ClickDataset) -> Features:
    """The logit of the smoothed rate, and log(1 + candidates), of the user, the item, and, if items
    have categories, of the user within the item's first one.

    Counts are over the candidates of all splits, none of them later than or at the request's time.
    Where requests have no times, they are over the candidates of the train split alone: for those
    of the validation and test splits over all of them, for a train candidate over all but those of
    its own request, so that its label never is in its own feature.
    Of an item whose candidates are drawn from others' events there is its feature "popularity"
    alone, which is as of before that draw: of those drawn the event itself, mostly an earlier one,
    would count.
    """
    columns = {split: dataset.requests(split) for split in SPLITS}
    asked = {split: np.diff(c.offsets) for split, c in columns.items()}

    def of_candidates(name: str) -> np.ndarray:
        each = [np.repeat(getattr(c, name), asked[split]) for split, c in columns.items()]
        return np.concatenate(each).astype(np.int64)

    user = of_candidates("user")
    item = np.concatenate([c.item for c in columns.values()]).astype(np.int64)
    label = np.concatenate([_label(c) for c in columns.values()]).astype(np.int64)
    ends = np.cumsum([len(c.item) for c in columns.values()])
    if dataset.info["timed"] == "none":  # positions in a sequence say nothing of what came first
        lengths = np.concatenate(list(asked.values()))
        request = np.repeat(np.arange(len(lengths)), lengths)
        counted = partial(train_counts, request=request, label=label, train=int(ends[0]))
    else:
        counted = partial(running_counts, time=of_candidates("time"), label=label)
    rate = float(np.mean(label[: ends[0]]))
    drawn = dataset.info.get("candidates") == "drawn from others"
    keys = {"user": user} if drawn else {"user": user, "item": item}
    for codes in list(dataset.item_categories.values())[:1]:
        keys["user_category"] = user * (int(codes.max()) + 1) + codes[item]
    features = []
    for name, key in keys.items():
        events, positive = counted(key)
        prior = PRIOR_EVENTS[name]
        smoothed = (positive + prior * rate) / (events + prior)
        features += [np.log(smoothed / (1 - smoothed)), np.log1p(events)]
    if drawn:
        each = [c.features["popularity"] for c in columns.values()]
        features.append(np.concatenate(each).astype(np.float64))
    return dict(zip(SPLITS, np.split(np.stack(features, axis=1), ends[:-1]), strict=True))


def popularity_features(dataset: ClickDataset) -> Features:
    """Those of `POPULARITY` that the data set has."""
    return {
        split: np.stack(
            [columns.features[name] for name in POPULARITY if name in columns.features], axis=1
        ).astype(np.float64)
        for split, columns in ((split, dataset.requests(split)) for split in SPLITS)
    }


def repeat_features(dataset: ClickDataset) -> Features:
    """`MATCHES` in the whole history that a request may see."""
    found = {split: whole_matches(dataset, dataset.requests(split)) for split in SPLITS}
    return {
        split: np.stack([of[name] for name in MATCHES], axis=1).astype(np.float64)
        for split, of in found.items()
    }


FLOORS: dict[str, Callable[[ClickDataset], Features]] = {
    "counts": count_features,
    "popularity": popularity_features,
    "repeats": repeat_features,
}


def evaluate_floor(
    name: str, dataset: ClickDataset, *, splits: Sequence[str] = ("test",)
) -> list[Evaluation]:
    """Fits one of `FLOORS` on the train split, the penalty chosen by log loss on the validation
    split, and scores the splits; nothing is random."""
    # Processes that train need none of this, and it takes a second to import.
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    features, train = FLOORS[name](dataset), dataset.requests("train")
    label, valid = _label(train), _label(dataset.requests("valid"))
    fitted = [
        make_pipeline(StandardScaler(), LogisticRegression(C=penalty, max_iter=1000)).fit(
            features["train"], label
        )
        for penalty in PENALTIES
    ]
    losses = [log_loss(valid, model.predict_proba(features["valid"])[:, 1]) for model in fitted]
    best = fitted[int(np.argmin(losses))]
    rate = float(np.mean(label))
    return [
        Evaluation.of(
            split,
            dataset.requests(split),
            best.predict_proba(features[split])[:, 1],
            train_ctr=rate,
        )
        for split in splits
    ]


def _label(columns: RequestColumns) -> np.ndarray:
    """The labels of the first task."""
    return np.asarray(next(iter(columns.labels.values())))
