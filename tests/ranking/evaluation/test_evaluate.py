"""What is judged of a model: its first task, in the order of the split's candidates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from click_data import ClickDataset
from jagged_ranking.data.batch import JaggedBatch, RequestTable
from jagged_ranking.data.loader import RequestLoader
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.evaluation.evaluate import Evaluation, predict
from jagged_ranking.models.ranker import Ranker


class Answers:
    """In the place of a ranker of two tasks: says a candidate's row, and for the second task 0."""

    def eval(self) -> None:
        pass

    def bring(self, batch: JaggedBatch) -> None:
        pass

    def __call__(self, batch: JaggedBatch) -> torch.Tensor:
        first = batch.index / 100
        return torch.stack([first, torch.zeros_like(first)], dim=1)


def test_predictions_are_of_the_first_task(toy: ClickDataset) -> None:
    columns = toy.requests("test")
    loader = RequestLoader(
        HistoryStore.from_dataset(toy),
        RequestTable.from_columns(columns),
        batch_size=7,
        max_history=3,
    )
    found = predict(cast(Ranker, Answers()), loader)
    expected = 1 / (1 + np.exp(-np.arange(len(columns.item)) / 100))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_labels_are_of_the_first_task_and_users_of_their_requests() -> None:
    columns = SimpleNamespace(
        offsets=np.array([0, 2, 2, 5]),  # nobody was shown anything in the second request
        user=np.array([4, 8, 4]),
        labels={"click": np.array([1, 0, 0, 1, 0]), "buy": np.array([0, 0, 1, 0, 0])},
    )
    probability = np.array([0.9, 0.2, 0.3, 0.8, 0.1])
    found = Evaluation.of("test", columns, probability, train_ctr=0.5)
    assert found.label.tolist() == [1, 0, 0, 1, 0]
    assert found.user.tolist() == [4] * 5
    assert found.request.tolist() == [0, 0, 2, 2, 2]
    assert found.metrics["auc"] == found.metrics["gauc"] == 1
    assert found.metrics["ne"] == pytest.approx(found.metrics["log_loss"] / np.log(2))
