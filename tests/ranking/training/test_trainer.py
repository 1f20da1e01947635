"""Training: determinism, exact resume, early stopping, and what it refuses."""

from __future__ import annotations

import dataclasses
import errno
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from click_data import ClickDataset
from jagged_ranking.evaluation.evaluate import evaluate_model
from jagged_ranking.evaluation.metrics import auc
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training import checkpoint, trainer
from jagged_ranking.training.checkpoint import CheckpointError
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.ranks import Ranks
from jagged_ranking.training.run_files import CHECKPOINT, MODEL, load_model
from jagged_ranking.training.run_progress import Progress, StepNumbers, TrainingError
from jagged_ranking.training.trainer import TrainResult, _Run, train

SMALL = TrainConfig(
    dim=8, heads=2, hidden=(8,), max_history=10, batch_size=256, epochs=4, learning_rate=0.01
)


class Interrupted(Exception):
    pass


def quick(toy: ClickDataset, config: TrainConfig = SMALL, **options) -> TrainResult:
    return train(config, toy, progress=False, device="cpu", **options)


def same(a: TrainResult, b: TrainResult) -> None:
    """Equal to the bit, but for the seconds that it took."""
    assert a.losses == b.losses
    assert a.best_epoch == b.best_epoch

    def timeless(result: TrainResult) -> list[dict[str, float]]:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in result.history]

    assert timeless(a) == timeless(b)
    for name, value in a.model.state_dict().items():
        assert torch.equal(value, b.model.state_dict()[name]), name


def test_a_seed_decides_everything(toy: ClickDataset) -> None:
    first = quick(toy)
    torch.rand(7)  # what others did with torch's generator must not matter
    same(first, quick(toy))
    assert quick(toy, dataclasses.replace(SMALL, seed=1)).losses != first.losses


def test_torchs_generator_is_left_alone(toy: ClickDataset) -> None:
    before = torch.get_rng_state()
    quick(toy, dataclasses.replace(SMALL, epochs=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_it_learns(toy: ClickDataset) -> None:
    result = quick(toy, dataclasses.replace(SMALL, epochs=8))
    label = toy.requests("valid").labels["label"]
    assert result.history[-1]["train_loss"] < result.history[0]["train_loss"]
    found = evaluate_model(result.model, toy, batch_size=SMALL.batch_size, split="valid")
    assert found.metrics["auc"] > 0.65
    assert found.metrics["auc"] == auc(label, found.probability)
    best = result.history[result.best_epoch]
    assert best["valid_log_loss"] == min(row["valid_log_loss"] for row in result.history)
    # the weights that come back are the best epoch's, not the last one's
    assert found.metrics["log_loss"] == best["valid_log_loss"]


@pytest.mark.parametrize("kept", [False, True])
def test_what_comes_back_is_the_best_epoch_where_later_ones_are_worse(
    toy: ClickDataset, tmp_path: Path, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(config: TrainConfig, progress: Progress, *, epoch_steps: int) -> float:
        return 1.0 if progress.epoch < 1 else -1.0  # from the second epoch on, up the loss

    monkeypatch.setattr(trainer, "rate_scale", away)
    config = dataclasses.replace(SMALL, patience=2, average_decay=0.0)
    result = quick(toy, config, out=tmp_path if kept else None)
    values = [row["valid_log_loss"] for row in result.history]
    assert result.best_epoch == int(np.argmin(values)) < len(values) - 1
    found = evaluate_model(result.model, toy, batch_size=SMALL.batch_size, split="valid")
    assert found.metrics["log_loss"] == min(values) < values[-1]


def test_a_seed_decides_weights_order_and_dropout(toy: ClickDataset) -> None:
    """Each by itself: two trainings that share one of them are no two draws of it."""
    noted: list[tuple[int, int]] = []

    class Noting(Ranks):
        def begin_step(self, seed: int, step: int) -> int:
            noted.append((seed, step))
            return super().begin_step(seed, step)

    configs = [dataclasses.replace(SMALL, seed=seed, epochs=1) for seed in (0, 5)]
    device = torch.device("cpu")
    first, other = (_Run(c, toy, device=device, out=None, ranks=Noting()) for c in configs)
    assert first.loader.order(0).tolist() != other.loader.order(0).tolist()
    weights = zip(first.model.parameters(), other.model.parameters(), strict=True)
    assert not all(torch.equal(one, another) for one, another in weights)
    other.go(progress=False, after_step=None, board=None)
    assert noted == [(5, step) for step in range(len(other.progress.losses))]


@pytest.mark.parametrize("select", ["auc", "gauc"])
def test_it_can_select_what_is_better_when_higher(toy: ClickDataset, select: str) -> None:
    options = {"lr_patience": 0, "patience": 9}
    result = quick(toy, dataclasses.replace(SMALL, epochs=6, select=select, **options))
    values = [row[f"valid_{select}"] for row in result.history]
    rates = [row["learning_rate"] for row in result.history]
    assert result.best_epoch == int(np.argmax(values))
    # the rate of an epoch is lower exactly when the epoch before was no improvement
    for epoch in range(1, len(values)):
        improved = epoch == 1 or values[epoch - 1] > max(values[: epoch - 1])
        assert (rates[epoch] < rates[epoch - 1]) == (not improved)


@pytest.mark.parametrize("select", ["list_auc", "mrr", "ndcg@10"])
def test_metrics_of_lists_are_refused_before_training_where_there_are_none(
    toy: ClickDataset, tmp_path: Path, select: str
) -> None:
    steps: list[int] = []
    with pytest.raises(
        TrainingError,
        match=rf"^\w+: select is {select}, which needs lists of candidates; there are: "
        "log_loss, auc, gauc$",
    ):
        quick(
            toy,
            dataclasses.replace(SMALL, select=select),
            out=tmp_path,
            after_step=steps.append,
        )
    assert not steps
    assert not (tmp_path / MODEL).exists()


@pytest.mark.parametrize("resume", [False, True])
def test_a_run_is_not_written_into_a_data_set(toy: ClickDataset, resume: bool) -> None:
    before = sorted(path.name for path in toy.folder.iterdir())
    with pytest.raises(TrainingError, match="is a prepared data set; name another folder") as why:
        quick(toy, out=toy.folder, resume=resume)
    assert str(why.value).startswith(f"{toy.folder}: ")
    assert sorted(path.name for path in toy.folder.iterdir()) == before


@pytest.mark.parametrize("model", ["mean_pool", "din", "target_attention", "transformer"])
def test_resume_inside_an_epoch_is_exact(toy: ClickDataset, tmp_path: Path, model: str) -> None:
    config = dataclasses.replace(SMALL, model=model, checkpoint_steps=2, lr_patience=0)
    whole = quick(toy, config)
    steps = len(whole.losses) // config.epochs
    assert steps > 4

    def stop_at(last: int):
        def after_step(step: int) -> None:
            if step == last:
                raise Interrupted

        return after_step

    # stopped twice: one step behind a checkpoint in mid-epoch, then one step into an epoch
    with pytest.raises(Interrupted):
        quick(toy, config, out=tmp_path, after_step=stop_at(steps + 3))
    with pytest.raises(Interrupted):
        quick(toy, config, out=tmp_path, resume=True, after_step=stop_at(2 * steps + 1))
    same(quick(toy, config, out=tmp_path, resume=True), whole)


def test_resume_between_epochs_and_for_longer(toy: ClickDataset, tmp_path: Path) -> None:
    whole = quick(toy)
    quick(toy, dataclasses.replace(SMALL, epochs=2), out=tmp_path)
    same(quick(toy, out=tmp_path, resume=True), whole)
    # nothing is left to do, and nothing is done
    same(quick(toy, out=tmp_path, resume=True), whole)
    same(quick(toy, out=tmp_path / "new", resume=True), whole)


def test_resume_keeps_the_early_stop(toy: ClickDataset, tmp_path: Path) -> None:
    hopeless = dataclasses.replace(SMALL, learning_rate=1.0, epochs=20, patience=2, lr_patience=0)
    stopped = quick(toy, hopeless, out=tmp_path)
    assert len(stopped.history) == stopped.best_epoch + 3 < 20
    rates = [row["learning_rate"] for row in stopped.history]
    assert rates[-1] < rates[0]
    same(quick(toy, hopeless, out=tmp_path, resume=True), stopped)


def test_progress_stops_after_patience() -> None:
    progress = Progress()
    better = [progress.record({}, value=v, patience=2) for v in (0.7, 0.6, 0.6, 0.65)]
    assert better == [True, True, False, False]
    assert (progress.stopped, progress.best_epoch, progress.best_value) == (True, 1, 0.6)


def test_numbers_of_steps_are_read_in_bulk() -> None:
    numbers, progress = StepNumbers(), Progress(epoch=2, losses=[0.5])
    for loss, norm in ((0.25, 3.0), (0.125, math.inf), (math.nan, math.nan)):
        numbers.add(torch.tensor(loss, requires_grad=True), torch.tensor(norm))
    with pytest.raises(
        TrainingError, match=r"^din: the gradient's norm is inf at step 2 \(epoch 2"
    ):
        numbers.read(progress, model="din")
    assert progress.losses == [0.5, 0.25]
    assert len(numbers) == 0


def nan_at_step_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth batch that any model sees from here on gets logits that are no numbers."""
    calls = iter(range(100))
    forward = Ranker.forward

    def poisoned(self: Ranker, batch):
        return forward(self, batch) * (math.nan if next(calls) == 3 else 1.0)

    monkeypatch.setattr(Ranker, "forward", poisoned)


def test_no_checkpoint_has_a_loss_behind_it_that_is_none(
    toy: ClickDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan_at_step_3(monkeypatch)
    with pytest.raises(TrainingError, match=r"the loss is nan at step 3 \(epoch 0\)"):
        quick(toy, dataclasses.replace(SMALL, checkpoint_steps=2), out=tmp_path)
    # the one of step 2 stands, the one of step 4 was never written
    assert checkpoint.load(tmp_path / CHECKPOINT).content["progress"]["step"] == 2
    monkeypatch.undo()
    config = dataclasses.replace(SMALL, checkpoint_steps=2)
    same(quick(toy, config, out=tmp_path, resume=True), quick(toy, config))


def test_a_step_leaves_its_loss_on_the_device(
    toy: ClickDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _Run(SMALL, toy, device=torch.device("cpu"), out=None)
    batches = run.loader.batches()
    monkeypatch.setattr(torch.Tensor, "item", lambda *given: pytest.fail("a step waited"))
    run._step(batches)
    assert len(run.numbers) == 1


def test_nan_stops_with_step_and_loss(
    toy: ClickDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nan_at_step_3(monkeypatch)
    with pytest.raises(
        TrainingError, match=r"^target_attention: the loss is nan at step 3 \(epoch 0\)"
    ) as why:
        quick(toy, out=tmp_path)
    assert "\n" not in str(why.value)
    assert not (tmp_path / CHECKPOINT).exists()


def test_a_run_can_be_loaded(toy: ClickDataset, tmp_path: Path) -> None:
    result = quick(toy, out=tmp_path)
    model, config = load_model(tmp_path, digest=toy.digest)
    assert config == SMALL
    expected = evaluate_model(result.model, toy, batch_size=SMALL.batch_size)
    np.testing.assert_array_equal(
        evaluate_model(model, toy, batch_size=config.batch_size).probability, expected.probability
    )
    with pytest.raises(CheckpointError, match=r"belongs to other data \(digest [0-9a-f]{12}, "):
        load_model(tmp_path, digest="0" * 64)
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        load_model(tmp_path / "nowhere", digest=toy.digest)


def test_resume_refuses_other_options_and_data(
    toy: ClickDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(toy, dataclasses.replace(SMALL, epochs=1), out=tmp_path)
    with pytest.raises(CheckpointError, match=r"was written with learning_rate=0\.01, not 0\.02"):
        quick(toy, dataclasses.replace(SMALL, learning_rate=0.02), out=tmp_path, resume=True)
    # without --resume the folder is simply written anew
    quick(toy, dataclasses.replace(SMALL, learning_rate=0.02, epochs=1), out=tmp_path)
    monkeypatch.setitem(toy.info, "digest", "f" * 64)
    with pytest.raises(CheckpointError, match="belongs to other data"):
        quick(toy, dataclasses.replace(SMALL, learning_rate=0.02), out=tmp_path, resume=True)


def test_checkpoints_are_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "state.pt"
    checkpoint.save(path, {"x": torch.ones(2)}, config={"a": 1}, digest="d")
    real_save = torch.save

    def half(content, file) -> None:
        real_save(content, file)
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(path, {"x": torch.zeros(2)}, config={"a": 1}, digest="d")
    assert [p.name for p in tmp_path.iterdir()] == ["state.pt"]
    assert checkpoint.load(path).content["x"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("file write failed")]
)
def test_a_checkpoint_that_cannot_be_written_is_named(
    toy: ClickDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def full(*given: object) -> None:
        raise error  # torch's own, where a disk is full

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(TrainingError, match=r"model\.pt: cannot be written \(.*(space|write)"):
        quick(toy, dataclasses.replace(SMALL, epochs=1), out=tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "text", "pickle"])
def test_damaged_checkpoints_are_one_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "state.pt"
    checkpoint.save(path, {"x": torch.ones(2000)}, config={}, digest="d")
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:2000])
    elif damage == "text":
        path.write_text("hello")
    else:
        torch.save({"content": Interrupted()}, path)
    with pytest.raises(CheckpointError, match="is damaged, or not a checkpoint") as why:
        checkpoint.load(path)
    assert "\n" not in str(why.value)


def test_evaluate_arguments(toy: ClickDataset) -> None:
    result = quick(toy, dataclasses.replace(SMALL, epochs=1))
    with pytest.raises(ValueError, match="split must be one of train, valid, test, got 'all'"):
        evaluate_model(result.model, toy, batch_size=SMALL.batch_size, split="all")
