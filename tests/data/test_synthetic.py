"""The embedded log: the same bytes for a seed, skewed like real logs, interests worth attending to.

What is planted is checked with counts and logistic regression, which need no model of ours.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from click_data import ClickDataset, DataError, RequestColumns, open_dataset, prepare


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> ClickDataset:
    """The log as anyone gets it without options."""
    return open_dataset(prepare("synthetic", out=tmp_path_factory.mktemp("log") / "synthetic"))


def test_a_seed_fixes_every_byte(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"users": 50, "items": 80, "categories": 8, "events": 1500}
    folders = [
        prepare("synthetic", out=tmp_path / str(number), seed=seed, **sizes)
        for number, seed in enumerate((3, 3, 4))
    ]
    for name in ("histories.parquet", "requests.parquet", "items.parquet", "dataset.json"):
        first, same, other = ((folder / name).read_bytes() for folder in folders)
        assert first == same
        assert first != other


@pytest.mark.parametrize(
    ("users", "items", "categories", "events"),
    [(30, 40, 5, 400), (1, 2, 1, 50), (200, 3, 3, 200), (7, 500, 100, 90)],
)
def test_sizes_are_what_was_asked_for(
    users: int, items: int, categories: int, events: int, tmp_path: Path
) -> None:
    names = ("users", "items", "categories", "events")
    sizes: dict[str, Any] = dict(zip(names, (users, items, categories, events), strict=True))
    dataset = open_dataset(prepare("synthetic", out=tmp_path / "out", **sizes))
    counts = dataset.info["counts"]
    assert (counts["users"], counts["events"]) == (users, events)
    assert counts["items"] <= items
    assert dataset.item_features["category"] <= categories + 1


def test_lengths_and_popularity_are_skewed_like_real_logs(default: ClickDataset) -> None:
    assert default.info["counts"]["users"] == 1000
    assert default.info["counts"]["events"] == 60_000
    assert 0.85 < default.info["padding_waste"] < 0.92
    lengths = np.sort(np.diff(default.histories.offsets))
    assert np.median(lengths) < 0.75 * lengths.mean()
    assert lengths[-1] > 5 * lengths.mean()
    item = np.concatenate([default.requests(split).item for split in ("train", "valid", "test")])
    popularity = np.sort(np.bincount(item))[::-1]
    assert popularity[: len(popularity) // 10].sum() > 0.25 * popularity.sum()
    for split in ("train", "valid", "test"):
        assert 0.4 < default.requests(split).labels["label"].mean() < 0.6


def test_some_events_of_a_user_share_a_second_and_none_go_back(default: ClickDataset) -> None:
    histories = default.histories
    inside = np.ones(len(histories.time) - 1, bool)
    inside[histories.offsets[1:-1] - 1] = False
    gaps = np.diff(histories.time)[inside]
    assert gaps.min() == 0
    assert 0.03 < (gaps == 0).mean() < 0.2


def test_every_category_has_items(default: ClickDataset) -> None:
    category = default.item_categories["category"]
    assert default.item_features == {"category": 61}
    assert len(np.unique(category[1:])) == 60


def counts(dataset: ClickDataset, requests: RequestColumns, cap: int) -> NDArray[np.float64]:
    """[C, 4]: events and positives of the last `cap`, then of those in the target's category."""
    histories, category = dataset.histories, dataset.item_categories["category"]
    rows = np.empty((len(requests.item), 4))
    for index in range(len(requests)):
        start = histories.offsets[requests.user[index]]
        end = start + requests.prefix[index]
        window = slice(max(start, end - cap), end)
        label = histories.signals["label"][window]
        for shown in range(*requests.offsets[index : index + 2]):
            same = category[histories.item[window]] == category[requests.item[shown]]
            rows[shown] = len(label), label.sum(), same.sum(), label[same].sum()
    return rows


def rankings(dataset: ClickDataset, cap: int) -> tuple[float, float]:
    """Test AUC of counts of the item and the user; the same with counts of user x category."""
    train, test = dataset.requests("train"), dataset.requests("test")
    label = {"train": train.labels["label"], "test": test.labels["label"]}
    shown = np.bincount(train.item, minlength=dataset.item_rows)
    liked = np.bincount(train.item, weights=label["train"], minlength=dataset.item_rows)

    def features(requests: RequestColumns, own: int) -> NDArray[np.float64]:
        # A training candidate's own label is taken out of its item's counts.
        mine = own * requests.labels["label"]
        item = (liked[requests.item] - mine + 1) / (shown[requests.item] - own + 2)
        events, positives, same, same_positives = counts(dataset, requests, cap).T
        rates = ((positives + 1) / (events + 2), (same_positives + 0.5) / (same + 1))
        logits = [np.log(rate / (1 - rate)) for rate in (item, *rates)]
        return np.stack([*logits, logits[-1] * np.log1p(same)], axis=1)

    x_train, x_test = features(train, 1), features(test, 0)
    aucs = []
    for columns in ([0, 1], [0, 1, 2, 3]):
        model = LogisticRegression().fit(x_train[:, columns], label["train"])
        aucs.append(roc_auc_score(label["test"], model.predict_proba(x_test[:, columns])[:, 1]))
    return aucs[0], aucs[1]


def test_the_targets_category_in_the_history_tells_most_and_far_back_still_more(
    default: ClickDataset,
) -> None:
    plain, ten = rankings(default, 10)
    _, fifty = rankings(default, 50)
    _, everything = rankings(default, 10_000)
    assert plain > 0.6
    assert everything > plain + 0.1
    assert ten + 0.04 < fifty
    assert fifty + 0.015 < everything


GAP = 20


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> ClickDataset:
    """A log where longer histories are better by construction."""
    sizes: dict[str, Any] = {"users": 100, "items": 150, "categories": 30, "events": 12_000}
    return open_dataset(
        prepare("synthetic", out=tmp_path_factory.mktemp("log") / "far", gap=GAP, **sizes)
    )


def test_with_a_gap_nobody_returns_to_a_category_sooner(far: ClickDataset) -> None:
    assert far.name == "synthetic_far"
    category = far.item_categories["category"][far.histories.item]
    returns = 0
    for start, end in pairwise(far.histories.offsets):
        for one in range(1, far.item_features["category"]):
            distances = np.diff(np.flatnonzero(category[start:end] == one))
            returns += len(distances)
            assert (distances > GAP).all()
    assert returns > 5000


def test_with_a_gap_only_what_lies_far_back_tells_the_label(far: ClickDataset) -> None:
    """No model of ours: counts in the last events, and a logistic regression on them."""
    test = far.requests("test")
    near, all_of_it = (counts(far, test, cap) for cap in (10, 10_000))
    assert not near[:, 2].any()
    assert (all_of_it[:, 2] > 0).mean() > 0.9
    plain, ten = rankings(far, 10)
    _, twice = rankings(far, 2 * GAP)
    _, everything = rankings(far, 10_000)
    assert ten < plain + 0.005
    assert twice > ten + 0.05
    assert everything > twice + 0.02


def test_a_gap_needs_as_many_other_categories(tmp_path: Path) -> None:
    for gap in (-1, 4):
        with pytest.raises(DataError, match=f"gap must lie between 0 and 3, .* not {gap}"):
            prepare("synthetic", out=tmp_path / "out", categories=4, gap=gap)
    sizes: dict[str, Any] = {"users": 3, "items": 8, "categories": 4, "events": 60}
    dataset = open_dataset(prepare("synthetic", out=tmp_path / "out", gap=3, **sizes))
    category = dataset.item_categories["category"][dataset.histories.item[:4]]
    assert len(set(category.tolist())) == 4
