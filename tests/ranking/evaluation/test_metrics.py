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


def lists(user: np.ndarray, seed: int = 0) -> np.ndarray:
    """A request for each row, some 8 rows a request, each of one user."""
    each = max(1, len(user) // len(np.unique(user)) // 8)
    return user * 100 + np.random.default_rng(seed).integers(0, each, len(user))


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


EVERY = (*metrics.METRICS, *metrics.LIST_METRICS)


@pytest.mark.parametrize("metric", EVERY)
@pytest.mark.parametrize("levels", [None, 4])
def test_a_bootstrap_replicate_is_the_metric_of_the_users_drawn(
    metric: str, levels: int | None
) -> None:
    user, label, score = case(2, levels=levels)
    request = lists(user)
    names, group = np.unique(user, return_inverse=True)
    weight = np.random.default_rng(0).integers(0, 4, len(names))
    # draw user i weight[i] times, each time as a user of its own, with requests of its own
    rows = [np.flatnonzero(group == i) for i, times in enumerate(weight) for _ in range(times)]
    owner = np.concatenate([np.full(len(r), i) for i, r in enumerate(rows)])
    drawn = np.concatenate(rows)
    expected = metrics.evaluate_metrics(
        owner, request[drawn] + 10**6 * owner, label[drawn], score[drawn], train_ctr=0.4
    )[metric]
    weighted = metrics._weighted(metric, group, request, label, score)
    value = weighted(weight[None].astype(float))[0]
    if metric == "ne":
        value /= metrics.entropy(0.4)
    assert value == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("metric", EVERY)
def test_paired_bootstrap(metric: str) -> None:
    rows = 12_000 if metric in metrics.LIST_METRICS else 2000
    user, label, good = case(3, rows=rows, users=rows // 33)
    request = lists(user)
    if metric in metrics.LIST_METRICS:  # some thirty candidates, of which one or two are positive
        request, label = user, label * (np.arange(len(label)) % 9 == 0)
    noisy = np.clip(good + np.random.default_rng(1).normal(0, 0.3, len(good)), 0.01, 0.99)

    def bootstrap(a: np.ndarray, b: np.ndarray, **more: int) -> metrics.Difference:
        options = {"train_ctr": 0.5, "replicates": 300, **more}
        return metrics.paired_bootstrap(metric, user, request, label, a, b, **options)

    found = bootstrap(good, noisy)
    a, b = (
        metrics.evaluate_metrics(user, request, label, s, train_ctr=0.5)[metric]
        for s in (good, noisy)
    )
    assert found.value == pytest.approx(a - b)
    assert found.low < found.value < found.high
    assert found.high < 0 if metric in ("ne", "log_loss") else found.low > 0
    assert bootstrap(good, noisy) == found
    assert bootstrap(good, noisy, seed=1) != found
    same = bootstrap(good, good)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    # seeds are averaged: the mean of (good, noisy) lies half way
    both = bootstrap(np.stack([good, noisy]), noisy[None])
    assert both.value == pytest.approx((a - b) / 2)


def test_seeds_that_disagree_widen_the_interval() -> None:
    """The same users and the same mean, but for what another training may give."""
    user, label, good = case(6, rows=2000, users=60)
    noisy = np.clip(good + np.random.default_rng(1).normal(0, 0.3, len(good)), 0.01, 0.99)
    agree, disagree = np.stack([good, good]), np.stack([good, noisy])
    widths = []
    for a in (agree, disagree):
        found = metrics.paired_bootstrap("auc", user, lists(user), label, a, noisy)
        widths.append(found.high - found.low)
    assert widths[1] > 2 * widths[0]


def test_bootstrap_resamples_users_not_rows() -> None:
    """Rows of a user that repeat must not narrow the interval."""
    user, label, good = case(4, rows=400, users=40)
    noisy = np.clip(good + np.random.default_rng(1).normal(0, 0.2, len(good)), 0.01, 0.99)
    of = (user, lists(user), label, good, noisy)
    once = metrics.paired_bootstrap("log_loss", *of)
    often = metrics.paired_bootstrap("log_loss", *(np.repeat(x, 10) for x in of))
    assert often.high - often.low == pytest.approx(once.high - once.low, rel=1e-6)


def test_bootstrap_arguments() -> None:
    user, label, score = case(5)
    with pytest.raises(ValueError, match="metric must be one of auc, gauc"):
        metrics.paired_bootstrap("recall", user, user, label, score, score)
    with pytest.raises(ValueError, match="needs train_ctr"):
        metrics.paired_bootstrap("ne", user, user, label, score, score)
