"""Intervals of differences between metrics, over users and seeds."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from predictions import case, lists
from scipy import stats

from jagged_ranking.evaluation import metrics
from jagged_ranking.evaluation.bootstrap import Difference, difference, redrawn

EVERY = (*metrics.METRICS, *metrics.LIST_METRICS)


def compared(
    metric: str,
    user: np.ndarray,
    request: np.ndarray,
    label: np.ndarray,
    a: np.ndarray,
    b: np.ndarray,
    **options: int,
) -> Difference:
    """metric(a) - metric(b)."""
    options = {"replicates": 300, "seed": 0, **options}
    ours, theirs = (
        redrawn([metric], user, request, label, of, train_ctr=0.5, **options)[metric]
        for of in (a, b)
    )
    return difference(ours, theirs, seed=options["seed"])


@pytest.mark.parametrize("levels", [None, 4])
def test_a_replicate_is_the_metric_of_the_users_drawn(
    levels: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, label, score = case(2, levels=levels)
    request = lists(user)
    names, group = np.unique(user, return_inverse=True)
    times = np.random.default_rng(0).integers(0, 4, len(names))
    monkeypatch.setattr(
        "jagged_ranking.evaluation.bootstrap._drawn_users", lambda *_, **__: [times[None]]
    )
    # user i times[i] times, each time as a user of its own, with requests of its own
    rows = [np.flatnonzero(group == i) for i, often in enumerate(times) for _ in range(often)]
    owner = np.concatenate([np.full(len(r), i) for i, r in enumerate(rows)])
    drawn = np.concatenate(rows)
    expected = [
        metrics.evaluate_metrics(user, request, label, score, train_ctr=0.4),
        metrics.evaluate_metrics(
            owner, request[drawn] + 10**6 * owner, label[drawn], score[drawn], train_ctr=0.4
        ),
    ]
    found = redrawn(EVERY, user, request, label, score, train_ctr=0.4)
    assert tuple(found) == EVERY
    for metric in EVERY:
        each = [of[metric] for of in expected]
        assert found[metric][:, 0] == pytest.approx(each, abs=1e-12), metric


@pytest.mark.parametrize("metric", EVERY)
def test_an_interval(metric: str) -> None:
    rows = 12_000 if metric in metrics.LIST_METRICS else 2000
    user, label, good = case(3, rows=rows, users=rows // 33)
    request = lists(user)
    if metric in metrics.LIST_METRICS:  # some thirty candidates, of which one or two are positive
        request, label = user, label * (np.arange(len(label)) % 9 == 0)
    noisy = np.clip(good + np.random.default_rng(1).normal(0, 0.3, len(good)), 0.01, 0.99)
    of = (metric, user, request, label)
    found = compared(*of, good, noisy)
    a, b = (
        metrics.evaluate_metrics(user, request, label, s, train_ctr=0.5)[metric]
        for s in (good, noisy)
    )
    assert found.value == pytest.approx(a - b)
    assert found.low < found.value < found.high
    assert found.high < 0 if metric in ("ne", "log_loss") else found.low > 0
    assert compared(*of, good, noisy) == found
    assert compared(*of, good, noisy, seed=1) != found
    same = compared(*of, good, good)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    # seeds are averaged: the mean of (good, noisy) lies half way
    both = compared(*of, np.stack([good, noisy]), noisy[None])
    assert both.value == pytest.approx((a - b) / 2)


def test_seeds_that_disagree_widen_the_interval() -> None:
    """The same users and the same mean, but for what another training may give."""
    user, label, good = case(6, rows=2000, users=60)
    noisy = np.clip(good + np.random.default_rng(1).normal(0, 0.3, len(good)), 0.01, 0.99)
    agree, disagree = np.stack([good, good]), np.stack([good, noisy])
    widths = []
    for a in (agree, disagree):
        found = compared("auc", user, lists(user), label, a, noisy)
        widths.append(found.high - found.low)
    assert widths[1] > 2 * widths[0]


def test_seeds_of_both_sides_are_others() -> None:
    """Of the same two trainings on both sides, others would differ; not so of one training, scored
    twice."""
    ours = np.tile([0.7, 0.8], (101, 1))
    found = difference(ours, ours)
    assert found.value == 0
    assert found.low < 0 < found.high
    assert difference(ours, ours, paired=True) == Difference(0.0, 0.0, 0.0)


def test_bounds_are_percentiles_of_the_replicates_alone() -> None:
    """Of one seed, whose only share is 1; the first row is of all users, and no replicate."""
    ours = np.concatenate([[1000.0], np.arange(201.0)])[:, None]
    theirs = np.full((202, 1), 100.0)
    assert difference(ours, theirs) == Difference(900.0, 5.0 - 100, 195.0 - 100)
    assert difference(ours, theirs, level=0.5) == Difference(900.0, 50.0 - 100, 150.0 - 100)


@pytest.mark.parametrize("paired", [False, True])
def test_where_seeds_alone_differ_the_interval_is_that_of_a_t_test(paired: bool) -> None:
    ours, theirs = np.array([0.71, 0.74, 0.78, 0.73]), np.array([0.70, 0.71, 0.69, 0.72])
    tested = (
        stats.ttest_rel(ours, theirs) if paired else stats.ttest_ind(ours, theirs, equal_var=False)
    )
    expected = tested.confidence_interval(0.95)
    rows = (np.tile(of, (20_001, 1)) for of in (ours, theirs))
    found = difference(*rows, paired=paired)
    width = expected.high - expected.low
    assert found.value == pytest.approx(ours.mean() - theirs.mean())
    assert (found.low, found.high) == pytest.approx([*expected], abs=0.03 * width)


def test_few_seeds_leave_out_the_truth_as_seldom_as_many() -> None:
    """Of three on each side, drawn anew among themselves, an interval of 95% had it in 79%."""
    rng, inside = np.random.default_rng(0), []
    for number in range(400):
        ours, theirs = (np.tile(rng.normal(size=3), (201, 1)) for _ in range(2))
        found = difference(ours, theirs, seed=number)
        inside.append(found.low <= 0 <= found.high)
    assert 0.92 < np.mean(inside) < 0.99


def test_users_are_drawn_not_rows() -> None:
    """Rows of a user that repeat must not narrow the interval."""
    user, label, good = case(4, rows=400, users=40)
    noisy = np.clip(good + np.random.default_rng(1).normal(0, 0.2, len(good)), 0.01, 0.99)
    of = (user, lists(user), label, good, noisy)
    once = compared("log_loss", *of)
    often = compared("log_loss", *(np.repeat(x, 10) for x in of))
    assert often.high - often.low == pytest.approx(once.high - once.low, rel=1e-6)


def test_numbers_do_not_depend_on_chunks_or_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    user, label, score = case(5, rows=2000)
    of = (EVERY, user, lists(user), label, np.stack([score, score**2]))
    options = {"train_ctr": 0.5, "replicates": 40}
    expected = redrawn(*of, **options)
    monkeypatch.setattr("jagged_ranking.evaluation.bootstrap.CHUNK", 100)
    before = torch.get_num_threads()
    with ThreadPoolExecutor(4, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for found in pool.map(lambda _: redrawn(*of, **options), range(8)):
            for metric, values in expected.items():
                assert values.shape == (41, 2)
                np.testing.assert_allclose(found[metric], values, rtol=1e-12)
                if metric == "auc":  # of whole numbers
                    assert (found[metric] == values).all()
    assert torch.get_num_threads() == before


def test_nobody_with_both_labels() -> None:
    user = np.arange(8)
    found = redrawn(["auc", "gauc"], user, user, np.ones(8), np.linspace(0, 1, 8), replicates=3)
    assert all(math.isnan(value) for values in found.values() for value in values.flat)


def test_arguments() -> None:
    user, label, score = case(5)
    with pytest.raises(ValueError, match="metric must be one of auc, gauc"):
        redrawn(["auc", "recall"], user, user, label, score)
    with pytest.raises(ValueError, match="needs train_ctr"):
        redrawn(["ne"], user, user, label, score)
