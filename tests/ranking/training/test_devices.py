"""What `--device` may be, and that a device which is none is no damage of a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from click_data import ClickDataset
from jagged_ranking.cli import main
from jagged_ranking.devices import given_device
from jagged_ranking.training import checkpoint
from jagged_ranking.training.checkpoint import CheckpointError
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.run_files import load_model
from jagged_ranking.training.trainer import train

NONE = ("meta", "tpu9", "cpu:1", "cpu:0", "cuda:", "cuda:-1", "CUDA", "mps", "")


@pytest.mark.parametrize("name", NONE)
def test_other_devices_than_a_cpu_and_gpus_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"must be cpu, cuda, or a GPU by its number") as why:
        given_device(name)
    assert str(why.value).startswith(f"--device {name}: ")
    assert "meta" not in str(why.value).removeprefix("--device meta")
    assert "\n" not in str(why.value)


@pytest.mark.parametrize("number", ["99", "999999"])
def test_a_gpu_that_is_not_there_is_refused(number: str) -> None:
    found = torch.cuda.device_count()
    with pytest.raises(ValueError, match=rf"^--device cuda:{number}: .* there are {found} here$"):
        given_device(f"cuda:{number}")


def test_the_devices_that_there_are() -> None:
    assert given_device("cpu") == torch.device("cpu")
    for number in range(torch.cuda.device_count()):
        assert given_device(f"cuda:{number}") == torch.device("cuda", number)


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize("name", ["meta", "cpu:1"])
def test_commands_refuse_them_before_any_work(
    toy: ClickDataset,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    name: str,
) -> None:
    folder = {"train": "--out", "evaluate": "--run"}[command]
    out = tmp_path / "run"
    words = ["--data", str(toy.folder), folder, str(out), "--device", name]
    assert main([command, *words]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"jagged: --device {name}: must be cpu, cuda, or ")
    assert said.count("\n") == 1
    assert not out.exists()


def test_a_good_file_is_not_called_damaged(toy: ClickDataset, tmp_path: Path) -> None:
    """Whatever is wrong with the device that it is asked for on."""
    config = TrainConfig(model="mean_pool", dim=8, hidden=(8,), max_history=10, epochs=1)
    train(config, toy, out=tmp_path, progress=False, device="cpu")
    with pytest.raises((RuntimeError, AssertionError)) as why:
        load_model(tmp_path, digest=toy.digest, device="cuda:99")
    assert not isinstance(why.value, CheckpointError)
    found = checkpoint.load(tmp_path / "model.pt", device="meta").content["model"]
    assert {weight.device.type for weight in found.values()} == {"meta"}
