"""Metrics against scikit-learn's and against loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predictions import case, lists
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score

from jagged_ranking.evaluation import metrics


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


def looped_lists(label: np.ndarray, score: np.ndarray) -> dict[str, float]:
    """The metrics of one request, candidate by candidate."""
    rank = [1 + (score > s).sum() + ((score == s).sum() - 1) / 2 for s in score]
    mine = [r for r, positive in zip(rank, label, strict=True) if positive]
    gain = sum(1 / np.log2(1 + r) for r in mine if r <= 10)
    ideal = sum(1 / np.log2(1 + place) for place in range(1, min(len(mine), 10) + 1))
    both = 0 < len(mine) < len(label)
    return {
        "list_auc": float(roc_auc_score(label, score)) if both else np.nan,
        "mrr": 1 / min(mine) if mine else np.nan,
        "hr@10": float(min(mine) <= 10) if mine else np.nan,
        "ndcg@10": gain / ideal if mine else np.nan,
    }


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 200),
    st.integers(1, 12),
    st.sampled_from([None, 1, 3]),
)
def test_metrics_of_lists(seed: int, rows: int, requests: int, levels: int | None) -> None:
    request, label, score = case(seed, rows, requests, levels)
    found = metrics.request_metrics(request, label, score)
    assert tuple(found) == metrics.LIST_METRICS
    for place, one in enumerate(np.unique(request)):
        mine = request == one
        for name, value in looped_lists(label[mine], score[mine]).items():
            assert found[name][place] == pytest.approx(value, abs=1e-12, nan_ok=True), name


def test_what_is_a_list() -> None:
    assert metrics.are_lists(10, 2)
    assert not metrics.are_lists(9, 2)
    assert not metrics.are_lists(0, 0)
    user, label, score = case(7)
    short = metrics.evaluate_metrics(user, np.arange(len(user)), label, score, train_ctr=0.4)
    assert tuple(short) == metrics.METRICS == metrics.metric_names(len(user), len(user))
    long = metrics.evaluate_metrics(user, lists(user), label, score, train_ctr=0.4)
    assert tuple(long) == (*metrics.METRICS, *metrics.LIST_METRICS)
    requests = len(np.unique(lists(user)))
    assert tuple(long) == metrics.metric_names(len(user), requests)
