"""The floor: running counts and a logistic regression.

How often a user, an item, and a user within a category was positive so far, each counted over
events strictly earlier than the sample, says much of what there is to know. A ranker that does
not beat these counts has learned nothing from the order and the contents of histories. How far
the regression follows the counts is chosen on the validation split: counts grow with time, and on
logs of a few days a weight that fits the train period would extrapolate far beyond it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from click_data.split import SPLITS
from jagged_ranking.evaluation.evaluate import Evaluation, split_metrics
from jagged_ranking.evaluation.metrics import log_loss

if TYPE_CHECKING:
    from click_data import ClickDataset

PRIOR_EVENTS = {"user": 5.0, "item": 10.0, "user_category": 5.0}
# Inverse strengths of the L2 penalty, from hardly more than the train rate to hardly a penalty.
PENALTIES = tuple(10.0**power for power in range(-6, 2))


def running_counts(
    key: np.ndarray, time: np.ndarray, label: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Events, and positive ones, of the same key at strictly earlier times; [N] each."""
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


def count_features(dataset: ClickDataset) -> dict[str, np.ndarray]:
    """For each split, float64 [N, 6]: the logit of the smoothed rate, and log(1 + events), of the
    user, the item, and the user within the category.

    Counts are over the samples of all splits, none of them later than or at the sample's time.
    """
    columns = {split: dataset.samples(split) for split in SPLITS}
    user, item, category, label, time = (
        np.concatenate([np.asarray(getattr(c, name)) for c in columns.values()]).astype(np.int64)
        for name in ("user", "item", "category", "label", "time")
    )
    rate = float(np.mean(columns["train"].label))
    keys = {
        "user": user,
        "item": item,
        "user_category": user * dataset.num_categories + category,
    }
    features = []
    for name, key in keys.items():
        events, positive = running_counts(key, time, label)
        prior = PRIOR_EVENTS[name]
        smoothed = (positive + prior * rate) / (events + prior)
        features += [np.log(smoothed / (1 - smoothed)), np.log1p(events)]
    ends = np.cumsum([len(c.label) for c in columns.values()])[:-1]
    return dict(zip(SPLITS, np.split(np.stack(features, axis=1), ends), strict=True))


def evaluate_counts(
    dataset: ClickDataset, *, splits: Sequence[str] = ("test",)
) -> list[Evaluation]:
    """Fits on the train split, the penalty chosen by log loss on the validation split, and scores
    the splits; nothing is random."""
    features, train = count_features(dataset), dataset.samples("train")
    valid = np.asarray(dataset.samples("valid").label)
    fitted = [
        make_pipeline(StandardScaler(), LogisticRegression(C=penalty, max_iter=1000)).fit(
            features["train"], train.label
        )
        for penalty in PENALTIES
    ]
    losses = [log_loss(valid, model.predict_proba(features["valid"])[:, 1]) for model in fitted]
    best = fitted[int(np.argmin(losses))]
    rate = float(np.mean(train.label))
    found = []
    for split in splits:
        columns = dataset.samples(split)
        probability = best.predict_proba(features[split])[:, 1]
        found.append(
            Evaluation(
                split=split,
                probability=probability,
                user=np.asarray(columns.user),
                label=np.asarray(columns.label),
                metrics=split_metrics(columns, probability, train_ctr=rate),
            )
        )
    return found
