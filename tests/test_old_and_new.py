"""`old_and_new.py` times two checkouts in one process, and says where their results differ."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from old_and_new import PACKAGES, ROOT, difference, noise

SCRIPT = ROOT / "tests" / "support" / "old_and_new.py"
ATTENTION, HARD = ("A", "K") if torch.cuda.is_available() else ("A-small", "K-small")


def compare(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the packages of the other checkout stay where they are imported."""
    few = ("--users", "8", "--rounds", "2", "--repeats", "1")
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words, *few],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose sums are twice as large, from before K, L and W."""
    checkout = tmp_path_factory.mktemp("old")
    for package, folder in PACKAGES.items():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder / package, checkout / folder / package, ignore=ignored)
    problems = checkout / "src/jagged_ranking/measure/interaction/elementwise.py"
    text, call = problems.read_text(encoding="utf-8"), "jagged_sum(b.jagged(x), backend=backend)"
    assert text.count(call) == 1
    problems.write_text(text.replace(call, f"2 * {call}"), encoding="utf-8")
    (checkout / "src/jagged_ranking/measure/hard_workloads.py").unlink()
    return checkout


def test_both_are_timed_and_compared(old: Path, tmp_path: Path) -> None:
    ran = compare(str(old), ATTENTION, "jagged_sum", "jagged_mean", "--out", str(tmp_path / "t"))
    assert ran.returncode == 0, ran.stderr
    table = pd.read_csv(tmp_path / "t")
    assert table["what"].tolist() == 2 * [ATTENTION] + 2 * ["jagged_sum"] + 2 * ["jagged_mean"]
    assert (table[["old, ms", "new, ms"]].to_numpy() > 0).all()
    # of sums and their gradients, by which the new are smaller
    assert table["results differ"].tolist() == pytest.approx([0, 0, 0.5, 0.5, 0, 0])


def test_what_the_old_one_does_not_have_is_a_line(old: Path) -> None:
    ran = compare(str(old), HARD)
    assert ran.returncode
    assert f"{HARD} is not in both; there are A" in ran.stderr


def test_hard_batches_are_there() -> None:
    ran = compare(str(ROOT), HARD)
    assert ran.returncode == 0, ran.stderr
    assert HARD in ran.stdout


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("no-such-commit",), "no-such-commit is no folder, and no commit: "),
        ((str(ROOT / "docs"),), "docs: there is no kernels/jagged_kernels"),
        ((str(ROOT), "Z"), "Z is not in both; there are A"),
    ],
)
def test_what_cannot_be_compared_is_a_line(words: tuple[str, ...], line: str) -> None:
    ran = compare(*words)
    assert ran.returncode
    assert line in ran.stderr
    assert "Traceback" not in ran.stderr


def test_differences_and_noise() -> None:
    a, b = torch.tensor([0.0, 4.0]), torch.tensor([1.0, 4.0])
    assert difference([a, a], [a, b]) == 0.25
    assert difference([torch.zeros(0)], [torch.zeros(0)]) == 0
    assert noise([1.0, 1.0, 1.0, 2.0, 2.0, 2.0], turns=2) == pytest.approx(1 / 1.5)
