"""A run's two files: one copy of what they need, and whole whenever the run is killed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from click_data import ClickDataset
from jagged_ranking.training import checkpoint
from jagged_ranking.training.checkpoint import CheckpointError
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.run_files import CHECKPOINT, MODEL, RunFiles, load_model
from jagged_ranking.training.trainer import TrainResult, train

SMALL = TrainConfig(
    dim=8, heads=2, hidden=(8,), max_history=10, batch_size=512, epochs=3, learning_rate=0.01
)


class Killed(Exception):
    pass


def quick(toy: ClickDataset, config: TrainConfig = SMALL, **options: Any) -> TrainResult:
    return train(config, toy, progress=False, device="cpu", **options)


def rewrite(path: Path, change: Any) -> bytes:
    """Changes what a file holds; returns the bytes that it then has."""
    saved = torch.load(path, weights_only=True)
    change(saved)
    torch.save(saved, path)
    return path.read_bytes()


def test_a_checkpoint_holds_weights_average_and_optimisers_once(
    toy: ClickDataset, tmp_path: Path
) -> None:
    result = quick(toy, out=tmp_path)
    content = checkpoint.load(tmp_path / CHECKPOINT).content
    assert content.keys() == {
        *("model", "average", "optimisers", "progress"),
        *("rows", "best_rows"),
    }
    assert content["rows"] == content["best_rows"] == ""
    assert content["average"].keys() == dict(result.model.named_parameters()).keys()
    weights = checkpoint.load(tmp_path / MODEL).content["model"]
    for name, value in result.model.state_dict().items():
        assert torch.equal(weights[name], value), name
    quick(toy, dataclasses.replace(SMALL, average_decay=0.0, epochs=1), out=tmp_path)
    assert checkpoint.load(tmp_path / CHECKPOINT).content["average"] == {}


def test_a_run_killed_between_its_two_files_goes_on(
    toy: ClickDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = quick(toy)
    assert whole.best_epoch > 0
    save = RunFiles.save

    def killed(self: RunFiles, content: dict[str, Any]) -> None:
        if content["progress"]["epoch"] == 2:
            raise Killed
        save(self, content)

    monkeypatch.setattr(RunFiles, "save", killed)
    with pytest.raises(Killed):
        quick(toy, out=tmp_path)
    monkeypatch.setattr(RunFiles, "save", save)
    # model.pt is one epoch ahead of the checkpoint
    with pytest.raises(
        CheckpointError, match=r"model\.pt: holds epoch 1, the best .* is 0; resume"
    ):
        quick(toy, dataclasses.replace(SMALL, epochs=1), out=tmp_path, resume=True)
    found = quick(toy, out=tmp_path, resume=True)
    assert (found.losses, found.best_epoch) == (whole.losses, whole.best_epoch)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, found.model.state_dict()[name]), name


def test_what_cannot_be_gone_on_from_is_refused_and_kept(toy: ClickDataset, tmp_path: Path) -> None:
    quick(toy, dataclasses.replace(SMALL, epochs=1), out=tmp_path)
    saved, model = tmp_path / CHECKPOINT, tmp_path / MODEL
    before = saved.read_bytes(), model.read_bytes()

    model.unlink()
    with pytest.raises(CheckpointError, match=r"model\.pt: no such checkpoint"):
        quick(toy, out=tmp_path, resume=True)
    assert saved.read_bytes() == before[0]
    model.write_bytes(before[1])

    written = rewrite(saved, lambda of: of.update(format=2))
    with pytest.raises(CheckpointError, match="has format 2, this version reads 3"):
        quick(toy, out=tmp_path, resume=True)
    assert (saved.read_bytes(), model.read_bytes()) == (written, before[1])

    for part in ("model", "average"):
        saved.write_bytes(before[0])
        written = rewrite(saved, lambda of, part=part: of["content"][part].popitem())
        with pytest.raises(CheckpointError, match=r"t\.pt: holds the weights of another model"):
            quick(toy, out=tmp_path, resume=True)
        assert saved.read_bytes() == written

    rewrite(model, lambda of: of["content"]["model"].popitem())
    with pytest.raises(CheckpointError, match=r"model\.pt: holds the weights of another model$"):
        load_model(tmp_path, digest=toy.digest)
