"""Ranks among all items, of scores made up: who is met, who is new, and who ties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from jagged_ranking.data.batch import JaggedBatch, RequestTable
from jagged_ranking.data.loader import RequestLoader
from jagged_ranking.data.store import HistoryStore, ItemTable
from jagged_ranking.evaluation.all_items import ranks_among_all
from jagged_ranking.models.ranker import Ranker

ROWS = 10  # of the item table, of which training knows those below the number of scores


class Scores:
    """In the place of a ranker that gives items these scores, whoever asks."""

    def __init__(self, scores: Sequence[float]) -> None:
        self.scores = torch.tensor(scores)
        self.num_items = len(scores)

    def eval(self) -> None:
        pass

    def items(self, ids: Tensor, items: ItemTable) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(ids), 1), self.scores[ids]

    def answers(self, batch: JaggedBatch) -> Tensor:
        return torch.zeros(len(batch), 1)


def rank(scores: Sequence[float], *, history: list[int], target: int) -> float:
    """Of one request, in batches that see three events."""
    one = np.zeros(1, np.int64)
    store = HistoryStore(
        offsets=torch.tensor([0, len(history)]),
        item=torch.tensor(history, dtype=torch.int32),
        time=None,
        signals=torch.zeros(len(history), 0),
        items=ItemTable(torch.zeros(ROWS, 0, dtype=torch.int32), torch.zeros(ROWS, 0)),
    )
    requests = RequestTable(
        user=torch.zeros(1, dtype=torch.int32),
        prefix=torch.tensor([len(history)], dtype=torch.int32),
        time=torch.zeros(1, dtype=torch.int64),
        offsets=torch.tensor([0, 1]),
        item=torch.tensor([target], dtype=torch.int32),
        label=torch.ones(1, 1),
        features=torch.zeros(1, 0),
        context=torch.zeros(1, 0, dtype=torch.int32),
        context_dense=torch.zeros(1, 0),
        host_prefix=one + len(history),
        host_offsets=np.array([0, 1]),
    )
    loader = RequestLoader(store, requests, batch_size=1, max_history=3)
    (found,) = ranks_among_all(cast(Ranker, Scores(scores)), loader)
    return float(found)


def test_of_equal_scores_the_mean() -> None:
    assert rank([0.0] * 8, history=[1, 2], target=5) == 3  # among 3, 4, 5, 6, 7
    assert rank([0, 9, 9, 1, 1, 1, 1, 3], history=[1, 2], target=5) == 3.5  # behind 7


@pytest.mark.parametrize("events", [4, 500])
def test_an_item_met_long_ago_is_none_to_rank_among(events: int) -> None:
    scores = [0, 2, 3, 1, 4, 9, 0, 0]
    assert rank(scores, history=[5] + [1] * events, target=3) == 3  # behind 2 and 4
    assert rank(scores, history=[1] * (events + 1), target=3) == 4


def test_an_item_that_training_has_not_seen_is_the_unknown_one() -> None:
    scores = [1.5, 2, 3, 1, 4, 0, 0, 9]
    assert rank(scores, history=[7, 1], target=9) == 3  # behind 2 and 4
    assert rank(scores, history=[9, 1], target=7) == 1
    # of a target that is known, the unknown item is none to rank among
    assert rank(scores, history=[7, 1], target=3) == 3
