"""`fp8_pays.py`: what it says without a Hopper GPU, and that what it times is there."""

from __future__ import annotations

import pytest
import torch
from choice_cases import on_hopper
from fp8_pays import BF16, KEPT, KERNEL, WHOLE, calls_of, errors_of, main
from hopper_pays import Batch

from jagged_kernels.schedule.policy.hopper import fp8_config


def test_without_such_a_gpu_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8_pays.is_hopper", lambda device: False)
    with pytest.raises(SystemExit, match="fp8_pays: there is no Hopper GPU here"):
        main(["--lengths", "128"])


def test_errors_are_of_numbers_as_they_came() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    batch = Batch(40, tokens=80, heads=2, dim=64, dtype=dtype, device=device)
    errors = errors_of(batch, causal=True)
    assert errors[f"{BF16}, error"] < 0.01 < errors[f"{KERNEL}, error"] < 0.1


@on_hopper
def test_all_that_is_timed_runs() -> None:
    device = torch.device("cuda")
    batch = Batch(300, tokens=600, heads=2, dim=128, dtype=torch.bfloat16, device=device)
    calls = calls_of(batch, fp8_config(128), causal=True)
    assert list(calls) == [BF16, KERNEL, KEPT, WHOLE]
    for call in calls.values():
        call()
