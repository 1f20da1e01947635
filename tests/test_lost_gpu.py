"""Tests that are left when a GPU does not serve a process any more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lost_gpu

SUPPORT = str(Path(lost_gpu.__file__).parent)
TESTS = """
import os

LOST = []

def test_passes():
    pass

def test_loses_it():
    LOST.append(os.getpid())
    assert False

def test_of_a_lost_process():
    assert not LOST

def test_fails():
    assert False

def test_after_it():
    assert not LOST
"""
CONFTEST = """
import sys

import lost_gpu

def pytest_configure(config):
    lost_gpu.watch(config, lambda: bool(sys.modules["test_it"].LOST))
"""


def outcomes(folder: Path, *options: str) -> str:
    (folder / "test_it.py").write_text(TESTS)
    (folder / "conftest.py").write_text(f"import sys\nsys.path.append({SUPPORT!r})\n{CONFTEST}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, "."]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


def test_another_process_goes_on(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    said = outcomes(tmp_path, "-n", "1")
    assert "3 failed, 3 passed" in said, said
    assert "crashed while running 'test_it.py::test_loses_it'" in said


def test_a_process_by_itself_stops(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    said = outcomes(tmp_path, "-n", "0")
    assert "1 failed, 1 passed" in said, said
    assert "after test_it.py::test_loses_it the GPU refuses this process everything" in said


def test_who_is_refused_everything(monkeypatch):
    def refuse() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(lost_gpu.torch.cuda, "synchronize", refuse)
    assert lost_gpu.refuses_everything()
    monkeypatch.setattr(lost_gpu.torch.cuda, "synchronize", lambda: None)
    assert not lost_gpu.refuses_everything()
