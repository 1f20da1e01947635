"""Equal budgets: the same trials for every model, the best by validation, the test split once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from click_data import ClickDataset
from jagged_ranking import results
from jagged_ranking.evaluation.evaluate import Evaluation
from jagged_ranking.training import runs
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.experiment import Plan, compare_models
from jagged_ranking.training.outcome import Outcome
from jagged_ranking.training.search import Search, best_of

TINY = TrainConfig(dim=8, hidden=(8,), max_history=10, batch_size=512, epochs=1, seed=4)
SPACE: dict[str, list[Any]] = {"learning_rate": [1e-4, 0.03], "hidden": [[8], [4, 4]]}


def test_trials_are_drawn_once_around_the_start() -> None:
    search = Search(trials=3, space=SPACE)
    drawn = search.drawn(TINY)
    assert drawn[0] == replace(TINY, seed=0)
    assert drawn == search.drawn(TINY)
    assert len(set(drawn)) == 3
    for one in drawn[1:]:
        assert one.learning_rate in SPACE["learning_rate"]
        assert [*one.hidden] in SPACE["hidden"]
        assert replace(one, learning_rate=TINY.learning_rate, hidden=TINY.hidden) == drawn[0]
    assert Search(trials=3, space=SPACE, seed=1).drawn(TINY) != drawn
    # the space and the start, and no more than there are
    assert len(Search(trials=99, space=SPACE).drawn(TINY)) == 5
    assert Search(trials=5, space={}).drawn(TINY) == drawn[:1]


def test_best_is_the_first_of_the_largest() -> None:
    one, two, three = (replace(TINY, dim=dim) for dim in (8, 16, 32))
    assert best_of([(one, 0.5), (two, 0.7), (three, 0.7)]) == two
    assert best_of([(one, float("nan")), (two, -3.0)]) == two


@pytest.mark.parametrize(("select", "best"), [("log_loss", 16), ("auc", 32), ("ndcg@10", 8)])
def test_trials_are_judged_by_the_metric_that_epochs_are_chosen_by(select: str, best: int) -> None:
    """Of log loss the smallest, of others the largest; whatever else a trial came to."""
    metrics = {
        8: {"log_loss": 0.6, "ne": 0.8, "auc": 0.7, "ndcg@10": 0.5},
        16: {"log_loss": 0.5, "ne": 0.9, "auc": 0.6, "ndcg@10": 0.3},
        32: {"log_loss": 0.7, "ne": 0.7, "auc": 0.8, "ndcg@10": 0.4},
    }
    start, none = replace(TINY, select=select), np.zeros(0)
    judged = {dim: [Evaluation("valid", none, none, none, none, m)] for dim, m in metrics.items()}
    scored = [
        Outcome(replace(start, model=model, dim=dim), judged[dim], 0, 0)
        for model, sizes in (("din", (8, 16, 32)), ("mean_pool", (8,)))
        for dim in sizes
    ]
    plan = Plan("none", models=("mean_pool", "din"), seeds=(7, 8), config=start)
    assert plan.finals(scored) == [
        replace(start, model=model, dim=dim, seed=seed)
        for model, dim in (("mean_pool", 8), ("din", best))
        for seed in (7, 8)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trials": 0, "space": {}}, "trials must be at least 1, got 0"),
        ({"trials": 1, "space": {"seed": [1, 2]}}, "a search does not choose seed"),
        ({"trials": 1, "space": {"depth": [1]}}, "unknown option 'depth'"),
        ({"trials": 1, "space": {"dim": []}}, "search space of dim: must be a list of values"),
        ({"trials": 1, "space": {"dropout": [0.1, 2.0]}}, "dropout must lie in"),
    ],
)
def test_what_makes_no_sense_is_said_first(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Search(**options)


def test_every_model_has_the_best_of_the_same_trials(
    toy: ClickDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored: list[tuple[TrainConfig, tuple[str, ...]]] = []
    train_one = runs._train_one

    def note(
        dataset: ClickDataset,
        config: TrainConfig,
        splits: tuple[str, ...],
        device: str,
        **more: Any,
    ) -> Any:
        scored.append((config, splits))
        return train_one(dataset, config, splits, device, **more)

    monkeypatch.setattr(runs, "_train_one", note)
    models, search = ("mean_pool", "target_attention"), Search(trials=2, space=SPACE)
    plan = Plan(toy.folder, models=models, seeds=(7,), config=TINY, search=search)
    table = compare_models([plan], replicates=20, device="cpu", workers=1, progress=False)
    drawn = search.drawn(TINY)
    trials = [(replace(one, model=model), ("valid",)) for model in models for one in drawn]
    assert scored[:4] == trials
    found = results.with_config(table, "learning_rate", "hidden", "seed")
    for place, model in enumerate(models):
        mine = results.select(found, provider=model, mode="trial", metric="log_loss")
        assert len(mine) == 2
        best = drawn[int(mine["value"].argmin())]
        assert scored[4 + place] == (replace(best, model=model, seed=7), ("valid", "test"))
        tested = results.select(found, provider=model, mode="test", metric="auc")
        assert tested["learning_rate"].tolist() == [best.learning_rate]
    assert len(scored) == 6
    assert not pd.isna(found["value"]).any()
