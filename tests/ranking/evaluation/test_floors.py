"""The floor of counts where requests have no times: of the train split, and of no label itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from click_data import ClickDataset, open_dataset, prepare
from click_data.split import SPLITS
from jagged_ranking.evaluation.floors import FLOORS, count_features, evaluate_floor, train_counts
from jagged_ranking.evaluation.metrics import auc

USERS, ITEMS, PAIRS = 400, 100, 10  # of which the last two are valid and test
COLUMNS = "user_id,item_id,label,cate_id,item_history,cate_history"


def untimed_log(folder: Path, *, noise: bool) -> ClickDataset:
    """Requests of a positive by Zipf's law and a uniform negative, or of two uniform ones."""
    rng = np.random.default_rng(0)
    zipf = 1 / np.arange(1, ITEMS + 1)
    share = np.full(ITEMS, 1 / ITEMS) if noise else zipf / zipf.sum()
    order = rng.permutation(ITEMS) + 1  # so that an item's number says nothing
    positive = order[rng.choice(ITEMS, (USERS, PAIRS), p=share)]
    negative = rng.integers(1, ITEMS + 1, (USERS, PAIRS))
    lines: dict[str, list[str]] = {"train": [], "valid": [], "test": []}
    for user in range(USERS):
        for pair in range(PAIRS):
            split = {PAIRS - 1: "test", PAIRS - 2: "valid"}.get(pair, "train")
            seen = positive[user, :pair]
            past = f"{_listed(seen)},{_listed(seen % 5)}"
            for label, item in ((1, positive[user, pair]), (0, negative[user, pair])):
                lines[split].append(f"{user},{item},{label},{item % 5},{past}")
    source = folder / "source"
    source.mkdir()
    for split, rows in lines.items():
        (source / f"{split}.csv").write_text("\n".join([COLUMNS, *rows]) + "\n")
    return open_dataset(prepare("reczoo", from_path=source, out=folder / "prepared"))


def _listed(numbers: Sequence[int] | np.ndarray) -> str:
    return "^".join(map(str, numbers))


@pytest.fixture(scope="module")
def untimed(tmp_path_factory: pytest.TempPathFactory) -> ClickDataset:
    return untimed_log(tmp_path_factory.mktemp("zipf"), noise=False)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 1)), max_size=30),
    st.integers(0, 30),
)
def test_train_counts_are_of_other_requests(rows: list[tuple[int, int, int]], train: int) -> None:
    key, request, label = np.array(rows, np.int64).reshape(-1, 3).T
    found, positive = train_counts(key, request, label, train)
    others = [[o for o in rows[:train] if o[0] == k and o[1] != r] for k, r, _ in rows]
    assert found.tolist() == [len(one) for one in others]
    assert positive.tolist() == [sum(label for *_, label in one) for one in others]


def test_a_floor_without_times_ranks_by_what_training_liked(untimed: ClickDataset) -> None:
    train, test = untimed.requests("train"), untimed.requests("test")
    label = np.asarray(train.labels["label"])
    shown = np.bincount(train.item, minlength=untimed.item_rows)
    liked = np.bincount(train.item, label, minlength=untimed.item_rows)
    direct = auc(np.asarray(test.labels["label"]), (liked / np.maximum(shown, 1))[test.item])
    (found,) = evaluate_floor("counts", untimed)
    assert found.metrics["auc"] > 0.65
    assert found.metrics["auc"] == pytest.approx(direct, abs=0.02)


def test_counts_without_times_are_of_the_train_split(untimed: ClickDataset) -> None:
    """None of validation and test, whose users have had all of their train candidates by then."""
    features = count_features(untimed)
    of_all, of_others = np.log1p(2 * (PAIRS - 2)), np.log1p(2 * (PAIRS - 3))
    for split, seen in (("train", of_others), ("valid", of_all), ("test", of_all)):
        np.testing.assert_allclose(features[split][:, 1], seen)


def test_who_is_new_has_the_rate_of_the_train_split(toy: ClickDataset) -> None:
    rates = [np.mean(toy.requests(split).labels["label"]) for split in SPLITS]
    assert len({*rates}) == len(SPLITS)
    features = np.concatenate([*count_features(toy).values()])
    for rate, counted in ((0, 1), (2, 3), (4, 5)):  # of a user, an item, a user in a category
        new = features[:, counted] == 0
        assert new.any()
        np.testing.assert_allclose(features[new, rate], np.log(rates[0] / (1 - rates[0])))


def test_counts_within_a_category_are_of_one_user_and_one_category(tmp_path: Path) -> None:
    """Items without one, too: of one user they must not count with the last one of another."""
    rng = np.random.default_rng(0)
    lines = ["user_id,item_id,timestamp,label,category"]
    for time in range(120):
        item = int(rng.integers(12))
        category = ("", "a", "b")[item % 3]
        lines.append(f"{time % 4},{item},{time},{rng.integers(2)},{category}")
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    log = open_dataset(prepare("log", from_path=tmp_path / "log.csv", out=tmp_path / "prepared"))
    codes, histories = log.item_categories["category"], log.histories
    assert {*codes[1:].tolist()} == {0, 1, 2}
    for split, features in count_features(log).items():
        columns = log.requests(split)
        for row, (user, prefix) in enumerate(zip(columns.user, columns.prefix, strict=True)):
            seen = codes[histories.item[histories.offsets[user] :][:prefix]]
            counted = np.sum(seen == codes[columns.item[row]])
            assert features[row, 5] == pytest.approx(np.log1p(counted))


def test_a_floor_chooses_its_penalty_on_the_validation_split(
    toy: ClickDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What tells labels until the test split, where it tells the opposite."""
    sign = {"train": 1, "valid": 1, "test": -1}
    told = {s: sign[s] * np.asarray(toy.requests(s).labels["label"])[:, None] for s in SPLITS}
    monkeypatch.setitem(FLOORS, "counts", lambda dataset: told)
    valid, test = evaluate_floor("counts", toy, splits=("valid", "test"))
    assert valid.metrics["ne"] < 0.1
    assert test.metrics["ne"] > 5


def test_no_label_is_in_its_own_feature(tmp_path: Path) -> None:
    """Each request has one positive, so that the rest of it would tell the label, too."""
    (found,) = evaluate_floor("counts", untimed_log(tmp_path, noise=True), splits=("train",))
    assert found.metrics["auc"] == pytest.approx(0.5, abs=0.03)


def test_a_draw_does_not_tell_that_it_is_one(tmp_path: Path) -> None:
    """Clicks without a preference: nothing tells who was drawn from the clicks of others."""
    rng = np.random.default_rng(0)
    clicks = zip(rng.integers(200, size=8000), rng.integers(800, size=8000), strict=True)
    lines = [f"{user},{item},{time}" for time, (user, item) in enumerate(clicks)]
    (tmp_path / "log.csv").write_text("\n".join(["user_id,item_id,timestamp", *lines]) + "\n")
    log = open_dataset(prepare("log", from_path=tmp_path / "log.csv", out=tmp_path / "prepared"))
    assert log.info["candidates"] == "drawn from others"
    (found,) = evaluate_floor("counts", log, splits=("train",))
    assert found.metrics["auc"] == pytest.approx(0.5, abs=0.02)
