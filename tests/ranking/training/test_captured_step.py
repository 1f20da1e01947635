"""Training by CUDA graphs: on a CPU batches are padded as for them, on a GPU steps are replayed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from click_data import ClickDataset
from jagged_kernels.graphs import step_graphs
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.ranks import Ranks
from jagged_ranking.training.run_progress import TrainingError
from jagged_ranking.training.trainer import TrainResult, _Run, train

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = TrainConfig(
    dim=8, heads=2, hidden=(8,), max_history=10, batch_size=100, epochs=2, learning_rate=0.01,
    precision="float32", compile="cuda_graphs",
)  # fmt: skip
# Dropout draws other numbers for batches of another size.
PLAIN = {"dropout": 0.0, "embedding_dropout": 0.0, "id_dropout": 0.0}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"table_optimizer": "rowwise_adagrad", "schedule": "cosine", "warmup_steps": 7},
    {"loss": "listwise", "select": "gauc", "model": "transformer"},
    {"batch_tokens": 400, "lr_patience": 0, "table_learning_rate": 0.02},
    # histories of some 45 events, cut
    {"event_time": "arrival", "model": "transformer", "max_history": 4},
)


def changed(**options: Any) -> TrainConfig:
    return dataclasses.replace(SMALL, **options)


def quick(toy: ClickDataset, config: TrainConfig, **options: Any) -> TrainResult:
    return train(config, toy, progress=False, device=DEVICE, **options)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_losses_are_those_of_steps_that_are_launched(
    toy: ClickDataset, options: dict[str, Any]
) -> None:
    config = changed(**PLAIN, **options)
    plain = quick(toy, dataclasses.replace(config, compile="off"))
    captured = quick(toy, config)
    assert len(captured.losses) > 10
    assert captured.losses == pytest.approx(plain.losses, rel=2e-3, abs=2e-4)
    assert captured.best_epoch == plain.best_epoch


@pytest.mark.parametrize("options", KINDS[:2], ids=str)
def test_a_run_resumes_to_the_bit(
    toy: ClickDataset, tmp_path: Path, options: dict[str, Any]
) -> None:
    class Interrupted(Exception):
        pass

    def after_step(step: int) -> None:
        if step == 7:
            raise Interrupted

    config = changed(checkpoint_steps=1, **options)
    whole = quick(toy, config)
    with pytest.raises(Interrupted):
        quick(toy, config, out=tmp_path, after_step=after_step)
    resumed = quick(toy, config, out=tmp_path, resume=True)
    assert resumed.losses == whole.losses
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name


def test_what_cannot_be_captured_is_one_line(toy: ClickDataset) -> None:
    with pytest.raises(ValueError, match=r"^compile cuda_graphs needs accumulate 1, got 2$"):
        changed(accumulate=2)
    with pytest.raises(ValueError, match=r"^tables torchrec needs compile off, got cuda_graphs$"):
        changed(tables="torchrec", table_optimizer="rowwise_adagrad")
    with pytest.raises(TrainingError, match=r"^compile cuda_graphs: the model has numbers"):
        quick(toy, changed(model="din"))
    ranks = Ranks()
    ranks.count = 2
    with pytest.raises(ValueError, match=r"^compile cuda_graphs is of one process; here are 2$"):
        quick(toy, SMALL, ranks=ranks)


def test_graphs_are_for_the_longest_request_there_is(toy: ClickDataset) -> None:
    run = _Run(changed(max_history=10_000), toy, device=DEVICE, out=None)
    assert run.captured is not None
    longest = [batch.longest for batch in run.loader.batches()]
    asked, seen = (max(numbers) for numbers in zip(*longest, strict=True))
    form = run.captured.form_of(next(run.loader.batches()))
    assert form.longest == (asked, seen)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", KINDS[:3], ids=str)
def test_what_is_replayed_has_the_bits_of_what_is_launched(
    toy: ClickDataset, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], precision: str
) -> None:
    """With dropout, whose numbers follow from the step: of padded batches without a graph."""
    config = changed(precision=precision, epochs=3, batch_size=128, **options)
    replayed = quick(toy, config)
    monkeypatch.setattr(step_graphs, "WARM_UPS", 10**9)
    launched = quick(toy, config)
    assert replayed.losses == launched.losses
    for name, value in launched.model.state_dict().items():
        assert torch.equal(value, replayed.model.state_dict()[name]), name


@pytest.mark.gpu
def test_most_steps_are_replayed(toy: ClickDataset) -> None:
    run = _Run(changed(epochs=4), toy, device=DEVICE, out=None)
    run.go(progress=False, after_step=None, board=None)
    assert run.captured is not None
    graphs = run.captured.graphs
    assert graphs.replayed > 0.7 * (graphs.replayed + graphs.eager)
