"""The rankers on a GPU: the same answers as on a CPU, and training that repeats itself."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from click_data import ClickDataset
from jagged_ranking.data.batch import RequestTable, make_batch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.models.model_config import MODEL_NAMES
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.trainer import TrainConfig, train

pytestmark = pytest.mark.gpu

SMALL = TrainConfig(
    dim=32, heads=2, hidden=(16,), max_history=20, batch_size=256, epochs=3, learning_rate=0.01
)


def logits_and_gradients(model: Ranker, batch) -> list[torch.Tensor]:
    logits = model(batch)
    logits.square().sum().backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [t.detach().cpu() for t in (logits, *gradients)]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_the_same_answers_as_on_a_cpu(toy: ClickDataset, name: str) -> None:
    torch.manual_seed(0)
    config = TrainConfig.from_dict({**SMALL.to_dict(), "model": name, "precision": "float32"})
    model = Ranker(config, DataShape.of(toy)).eval()
    requests = RequestTable.from_columns(toy.requests("train"))
    batch = make_batch(HistoryStore.from_dataset(toy), requests, np.arange(300), max_history=20)
    expected = logits_and_gradients(copy.deepcopy(model), batch)
    found = logits_and_gradients(model.cuda(), batch.to("cuda"))
    assert len(found) == len(expected) > 5
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-3 * float(exact.abs().max()), rtol=1e-3)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_training_learns_and_repeats(toy: ClickDataset, name: str) -> None:
    config = TrainConfig.from_dict({**SMALL.to_dict(), "model": name})
    first, second = (train(config, toy, progress=False, device="cuda") for _ in range(2))
    assert first.losses == second.losses
    assert first.history[-1]["train_loss"] < first.history[0]["train_loss"]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_no_model_waits_for_the_gpu(toy: ClickDataset, name: str) -> None:
    config = TrainConfig.from_dict({**SMALL.to_dict(), "model": name})
    model = Ranker(config, DataShape.of(toy)).cuda()
    requests = RequestTable.from_columns(toy.requests("train"))
    batch = make_batch(HistoryStore.from_dataset(toy), requests, np.arange(300), max_history=20)
    batch = batch.to("cuda")
    logits_and_gradients(model, batch)  # compiles what it needs
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(batch).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
