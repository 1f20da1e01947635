"""Small models and batches of the toy log, for the tests of rankers."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch import Tensor

from click_data import ClickDataset
from jagged_ranking.data.batch import JaggedBatch, RequestTable, make_batch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.config import TrainConfig


def batch_of(
    dataset: ClickDataset, index: np.ndarray, *, max_history: int = 20, arrivals: bool = False
) -> JaggedBatch:
    store = HistoryStore.from_dataset(dataset)
    requests = RequestTable.from_columns(dataset.requests("train"))
    return make_batch(store, requests, index, max_history=max_history, arrivals=arrivals)


def ranker(dataset: ClickDataset, model: str, **options) -> Ranker:
    """A model away from its start, where some branches are zero."""
    torch.manual_seed(0)
    made = Ranker(TrainConfig(model=model, dim=16, **options), DataShape.of(dataset))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return made.eval()


def changed(batch: JaggedBatch, name: str, values: Tensor) -> JaggedBatch:
    return dataclasses.replace(batch, **{name: getattr(batch, name).with_values(values)})


def mixed_rows(dataset: ClickDataset) -> np.ndarray:
    """Requests with an empty, a one-event and longer histories, some with several candidates."""
    train = dataset.requests("train")
    several = np.diff(train.offsets) > 1
    rows = [int(np.flatnonzero(train.prefix == n)[0]) for n in (0, 1)]
    long = train.prefix > 5
    return np.array([*rows, *np.flatnonzero(long)[:3], *np.flatnonzero(long & several)[:3]])
