"""Options of training: schedules, steps of several batches, compiling, precision, curves."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from click_data import ClickDataset
from jagged_ranking.layers.head import RankingHead
from jagged_ranking.training.board import Board
from jagged_ranking.training.checkpoint import CheckpointError
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.losses import loss_of
from jagged_ranking.training.run_progress import Progress
from jagged_ranking.training.schedule import rate_scale
from jagged_ranking.training.trainer import TrainResult, _Run, train

SMALL = TrainConfig(
    dim=8, heads=2, hidden=(8,), max_history=10, batch_size=256, epochs=2, learning_rate=0.01
)


class Interrupted(Exception):
    pass


def stop_at(last: int) -> Callable[[int], None]:
    def after_step(step: int) -> None:
        if step == last:
            raise Interrupted

    return after_step


def changed(**options: Any) -> TrainConfig:
    return dataclasses.replace(SMALL, **options)


def quick(toy: ClickDataset, config: TrainConfig = SMALL, **options: Any) -> TrainResult:
    return train(config, toy, progress=False, device="cpu", **options)


def test_rates_rise_and_fall() -> None:
    cosine = changed(schedule="cosine", epochs=4, warmup_steps=10)
    places = [(0, 0, 0), (1, 0, 1), (9, 0, 9), (20, 1, 0), (40, 2, 0), (79, 3, 19)]
    found = [
        rate_scale(cosine, Progress(step=s, epoch=e, epoch_step=p, lr_scale=0.3), epoch_steps=20)
        for s, e, p in places
    ]
    assert found[0] == pytest.approx(0.1)
    assert found[1] == pytest.approx(0.2, abs=1e-3)
    assert found[3:5] == pytest.approx([(1 + 2**-0.5) / 2, 0.5])
    assert 0 < found[5] < 1e-3
    constant = changed(warmup_steps=10)
    for step, wanted in ((0, 0.03), (4, 0.15), (9, 0.3), (500, 0.3)):
        progress = Progress(step=step, lr_scale=0.3)
        assert rate_scale(constant, progress, epoch_steps=20) == pytest.approx(wanted)


def test_a_step_takes_the_mean_of_its_batches(toy: ClickDataset) -> None:
    config = changed(dropout=0.0, embedding_dropout=0.0, id_dropout=0.0, batch_size=64)
    runs = [_Run(config, toy, device=torch.device("cpu"), out=None) for _ in range(2)]
    batches = [batch for batch, _ in zip(runs[0].loader.batches(), range(3), strict=False)]
    runs[0]._step(iter(batches), count=3)
    mean = sum(loss_of("pointwise", runs[1].model, batch) for batch in batches) / 3
    assert isinstance(mean, torch.Tensor)
    mean.backward()
    runs[1].optimisers.step()
    for one, other in zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    runs[0].read_numbers()
    assert runs[0].progress.losses == [pytest.approx(mean.item())]
    assert runs[0].progress.step == 1


@pytest.mark.parametrize("table_optimizer", ["adamw", "rowwise_adagrad"])
def test_all_options_together_resume_to_the_bit(
    toy: ClickDataset, tmp_path: Path, table_optimizer: str
) -> None:
    config = changed(
        batch_tokens=700, accumulate=3, schedule="cosine", warmup_steps=3, checkpoint_steps=1,
        table_optimizer=table_optimizer,
    )  # fmt: skip
    whole = quick(toy, config)
    # requests differ in size, so that epochs may differ in steps
    last = len(whole.losses)
    assert last > 6
    with pytest.raises(Interrupted):
        quick(toy, config, out=tmp_path, after_step=stop_at(2))
    with pytest.raises(Interrupted):
        quick(toy, config, out=tmp_path, resume=True, after_step=stop_at(last - 1))
    resumed = quick(toy, config, out=tmp_path, resume=True)
    assert resumed.losses == whole.losses
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, resumed.model.state_dict()[name]), name
    with pytest.raises(CheckpointError, match="was written with epochs=2, not 3"):
        quick(toy, dataclasses.replace(config, epochs=3), out=tmp_path, resume=True)


def test_compiled_losses_are_the_same(toy: ClickDataset) -> None:
    torch.compiler.reset()
    counters.clear()
    config = changed(epochs=1, model="target_attention", batch_size=512)
    plain = quick(toy, config)
    found = quick(toy, dataclasses.replace(config, compile="aot_eager"))
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


def test_the_head_is_in_float32(toy: ClickDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(SMALL, toy, device=torch.device("cpu"), out=None)
    forward, seen = RankingHead.forward, []

    def watched(self: RankingHead, pooled: Any, candidate: Any, batch: Any) -> Any:
        seen.append((torch.is_autocast_enabled("cpu"), pooled.dtype, candidate.dtype))
        return forward(self, pooled, candidate, batch)

    monkeypatch.setattr(RankingHead, "forward", watched)
    with torch.autocast("cpu", torch.bfloat16):
        logit = run.model(next(run.loader.batches()))
    assert seen == [(False, torch.float32, torch.float32)]
    assert logit.dtype == torch.float32


def test_unknown_words_are_answered_by_the_known_ones() -> None:
    for name, known in (
        ("schedule", "constant, cosine"),
        ("compile", "off, inductor, aot_eager, eager, cuda_graphs"),
        ("precision", "bfloat16, float32"),
    ):
        with pytest.raises(ValueError, match=f"^{name} must be one of {known}, got 'x'$"):
            changed(**{name: "x"})
    for name in ("batch_tokens", "warmup_steps", "table_learning_rate"):
        with pytest.raises(ValueError, match=f"{name} must not be negative, got -1"):
            changed(**{name: -1})
    with pytest.raises(ValueError, match="accumulate must be at least 1, got 0"):
        changed(accumulate=0)


def test_without_tensorboard_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'jagged-flash-attention\[tensorboard\]'$"):
        Board(tmp_path)
    assert not list(tmp_path.iterdir())


def test_curves_of_a_run(
    toy: ClickDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == (str(tmp_path), 0)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    module: Any = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    result = quick(toy, board=tmp_path)
    losses = [(value, step) for name, value, step in written if name == "loss"]
    assert losses == [(loss, step) for step, loss in enumerate(result.losses)]
    last = {name: value for name, value, step in written if step == len(result.losses)}
    assert last == {k: v for k, v in result.history[-1].items() if k != "epoch"}
    assert written[-1][0] == "closed"
