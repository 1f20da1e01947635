"""Metrics against scikit-learn's and against loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from jagged_ranking.evaluation import metrics


def case(seed: int, rows: int = 300, users: int = 20, levels: int | None = None):
    """Random users, labels and probabilities; `levels` makes ties."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, users, rows) * 7 - 3
    score = rng.uniform(0.01, 0.99, rows)
    if levels:
        score = np.round(score * levels) / (levels + 1) + 0.01
    return user, (rng.uniform(size=rows) < score).astype(np.int8), score


def looped_gauc(user: np.ndarray, label: np.ndarray, score: np.ndarray) -> float:
    total = weight = 0.0
    for one in set(user.tolist()):
        mine = user == one
        if label[mine].min() != label[mine].max():
            total += mine.sum() * float(roc_auc_score(label[mine], score[mine]))
            weight += mine.sum()
    return total / weight if weight else float("nan")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 120),
    st.integers(1, 30),
    st.sampled_from([None, 1, 3]),
)
def test_gauc_is_the_weighted_mean_of_user_aucs(
    seed: int, rows: int, users: int, levels: int | None
) -> None:
    user, label, score = case(seed, rows, users, levels)
    expected = looped_gauc(user, label, score)
    assert metrics.gauc(user, label, score) == pytest.approx(expected, abs=1e-12, nan_ok=True)


def test_gauc_leaves_out_users_of_one_label() -> None:
    user = np.array([0, 0, 1, 1, 1, 2])
    label = np.array([0, 1, 1, 1, 1, 0])
    assert metrics.gauc(user, label, np.array([0.1, 0.9, 0.2, 0.3, 0.4, 0.5])) == 1.0
    assert np.isnan(metrics.gauc(user[2:], label[2:], np.array([0.2, 0.3, 0.4, 0.5])))


def test_auc_and_log_loss_are_sklearns() -> None:
    _, label, score = case(1)
    assert metrics.auc(label, score) == roc_auc_score(label, score)
    assert metrics.log_loss(label, score) == pytest.approx(sklearn_log_loss(label, score))
    assert np.isnan(metrics.auc(np.ones(3), np.arange(3.0)))
    # one label only is no reason to fail, nor is a float32 probability of exactly one
    assert metrics.log_loss(np.ones(2), np.array([1.0, 0.5], np.float32)) < 0.35


def test_ne_is_one_for_the_train_rate_and_uses_the_train_rate() -> None:
    label = np.array([1, 0, 0, 0])
    constant = np.full(4, 0.25)
    assert metrics.normalized_entropy(label, constant, train_ctr=0.25) == pytest.approx(1.0)
    assert metrics.normalized_entropy(label, constant, train_ctr=0.5) == pytest.approx(
        metrics.log_loss(label, constant) / np.log(2)
    )
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        metrics.entropy(1.0)


@pytest.mark.parametrize("metric", metrics.METRICS)
@pytest.mark.parametrize("levels", [None, 4])
def test_a_bootstrap_replicate_is_the_metric_of_the_users_drawn(
    metric: str, levels: int | None
) -> None:
    user, label, score = case(2, levels=levels)
    names, group = np.unique(user, return_inverse=True)
    weight = np.random.default_rng(0).integers(0, 4, len(names))
    # draw user i weight[i] times, each time as a user of its own
    rows = [np.flatnonzero(group == i) for i, times in enumerate(weight) for _ in range(times)]
    owner = np.concatenate([np.full(len(r), i) for i, r in enumerate(rows)])
    drawn = np.concatenate(rows)
    expected = metrics.evaluate_metrics(owner, label[drawn], score[drawn], train_ctr=0.4)[metric]
    make = {"auc": metrics._weighted_auc, "gauc": metrics._weighted_gauc}.get(
        metric, metrics._weighted_log_loss
    )
    value = make(group, label, score)(weight[None].astype(float))[0]
    if metric == "ne":
        value /= metrics.entropy(0.4)
    assert value == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("metric", metrics.METRICS)
def test_paired_bootstrap(metric: str) -> None:
    user, label, good = case(3, rows=2000, users=60)
    noisy = np.clip(good + np.random.default_rng(1).normal(0, 0.3, len(good)), 0.01, 0.99)
    args = {"train_ctr": 0.5, "replicates": 300}
    found = metrics.paired_bootstrap(metric, user, label, good, noisy, **args)
    a, b = (metrics.evaluate_metrics(user, label, s, train_ctr=0.5)[metric] for s in (good, noisy))
    assert found.value == pytest.approx(a - b)
    assert found.low < found.value < found.high
    better = found.low > 0 if metric in ("auc", "gauc") else found.high < 0
    assert better
    assert metrics.paired_bootstrap(metric, user, label, good, noisy, **args) == found
    assert metrics.paired_bootstrap(metric, user, label, good, noisy, seed=1, **args) != found
    same = metrics.paired_bootstrap(metric, user, label, good, good, **args)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    # seeds are averaged: the mean of (good, noisy) lies half way
    both = metrics.paired_bootstrap(
        metric, user, label, np.stack([good, noisy]), noisy[None], **args
    )
    assert both.value == pytest.approx((a - b) / 2)


def test_bootstrap_resamples_users_not_rows() -> None:
    """Rows of a user that repeat must not narrow the interval."""
    user, label, good = case(4, rows=400, users=40)
    noisy = np.clip(good + np.random.default_rng(1).normal(0, 0.2, len(good)), 0.01, 0.99)
    once = metrics.paired_bootstrap("log_loss", user, label, good, noisy)
    often = metrics.paired_bootstrap(
        "log_loss", *(np.repeat(x, 10) for x in (user, label, good, noisy))
    )
    assert often.high - often.low == pytest.approx(once.high - once.low, rel=1e-6)


def test_bootstrap_arguments() -> None:
    user, label, score = case(5)
    with pytest.raises(ValueError, match="metric must be one of auc, gauc"):
        metrics.paired_bootstrap("recall", user, label, score, score)
    with pytest.raises(ValueError, match="needs train_ctr"):
        metrics.paired_bootstrap("ne", user, label, score, score)
