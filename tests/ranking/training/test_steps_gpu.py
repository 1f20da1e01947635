"""What only a GPU can show of training."""

from __future__ import annotations

import pytest
import torch

from click_data import ClickDataset
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.trainer import _Run

pytestmark = pytest.mark.gpu

MODELS = ("mean_pool", "din", "target_attention", "transformer")


@pytest.mark.parametrize("model", MODELS)
def test_a_step_does_not_wait_for_the_device(toy: ClickDataset, model: str) -> None:
    config = TrainConfig(model=model, dim=32, max_history=20, batch_size=64)
    run = _Run(config, toy, device=torch.device("cuda"), out=None)
    batches = run.loader.batches()
    run.model.train()
    run._step(batches)  # the first step compiles, and makes the optimiser's state
    torch.cuda.set_sync_debug_mode("error")
    try:
        run._step(batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    run.read_numbers()
    assert len(run.progress.losses) == 2
