"""Timing runs never share a GPU; of other processes one waits."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jagged_ranking.processes import gpus_alone

# Holds what it finds free; says so, and lets go when it is told to.
OTHER = """
import fcntl, os, sys
handle = os.open(sys.argv[1], os.O_RDWR)
try:
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit("taken")
print("free", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"gpu{number}")
    )


def lock(tmp_path: Path, number: int) -> str:
    return str(tmp_path / f"jagged-gpu-gpu{number}.lock")


def free(path: str) -> bool:
    ran = subprocess.run([sys.executable, "-c", OTHER, path], input=b"\n", capture_output=True)
    return ran.returncode == 0


def test_a_gpu_is_held_for_the_time_of_the_block(tmp_path: Path) -> None:
    with gpus_alone([0, 1]):
        assert not free(lock(tmp_path, 0))
        assert not free(lock(tmp_path, 1))
    assert free(lock(tmp_path, 0))


def test_a_process_does_not_wait_for_itself(tmp_path: Path) -> None:
    with gpus_alone([0]):
        with gpus_alone([0, 1]):
            assert not free(lock(tmp_path, 1))
        assert free(lock(tmp_path, 1))
        assert not free(lock(tmp_path, 0))


def test_one_that_another_has_is_waited_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lock(tmp_path, 0)
    Path(path).touch()
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdin is not None
    assert other.stdout is not None
    assert other.stdout.readline() == b"free\n"
    subprocess.Popen(["sh", "-c", f"sleep 0.5; echo > /proc/{other.pid}/fd/0"])
    with gpus_alone([0]):
        assert other.wait(10) == 0
    assert "GPU 0: waiting for another timing run there" in capsys.readouterr().err


def test_without_a_place_for_locks_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with gpus_alone([0]):
        assert not (tmp_path / "none").exists()
