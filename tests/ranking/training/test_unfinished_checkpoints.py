"""What a training was writing when it was killed is gone after the next one in its folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from click_data import ClickDataset
from jagged_ranking.processes import BusyError, alone_in
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.run_files import CHECKPOINT, MODEL
from jagged_ranking.training.trainer import train

SMALL = TrainConfig(dim=8, heads=2, hidden=(8,), max_history=10, epochs=1)


@pytest.mark.parametrize("resume", [False, True])
def test_checkpoints_of_a_killed_training_are_swept(
    toy: ClickDataset, tmp_path: Path, resume: bool
) -> None:
    left = [tmp_path / f".{Path(name).stem}-abcd_123.pt" for name in (CHECKPOINT, MODEL)]
    other = tmp_path / ".notes-abcd_123.pt"
    for path in (*left, other):
        path.touch()
    train(SMALL, toy, out=tmp_path, resume=resume, progress=False, device="cpu")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [CHECKPOINT, MODEL, other.name]
    )


def test_one_training_at_a_time_in_a_folder(
    toy: ClickDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jagged_ranking.processes.BUSY_SECONDS", 0.1)
    with alone_in(tmp_path), pytest.raises(BusyError, match="another run writes there"):
        train(SMALL, toy, out=tmp_path, progress=False, device="cpu")
    assert not list(tmp_path.iterdir())
