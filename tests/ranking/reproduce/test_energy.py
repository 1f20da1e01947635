"""The energy of some work: by a made-up board's counter, or by its power."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch

from jagged_ranking.measure.providers import Unavailable
from jagged_ranking.reproduce import energy
from jagged_ranking.reproduce.energy import COUNTER, POWER, energy_of

GPU = torch.device("cuda")


class NVML:
    """A board that takes 300 W, and 2 J each time that work is done.

    Args:
        every: how often work is done before the counter moves.
    """

    class NVMLError(Exception):
        pass

    def __init__(self, *, counts: bool, every: int = 1) -> None:
        self.counts, self.every, self.done = counts, every, 0

    def nvmlDeviceGetTotalEnergyConsumption(self, board: str) -> int:
        if not self.counts:
            raise self.NVMLError("Not Supported")
        return 10**9 + 2000 * (self.done // self.every * self.every)

    def nvmlDeviceGetPowerUsage(self, board: str) -> int:
        return 300_000

    def work(self) -> None:
        self.done += 1
        time.sleep(0.002)


@pytest.fixture
def board_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[NVML], None]:
    def put(nvml: NVML) -> None:
        @contextmanager
        def board(device: torch.device):
            yield nvml, "board"

        monkeypatch.setattr(energy, "_board", board)

    return put


def test_the_counter_says_what_all_calls_took(board_of: Callable[[NVML], None]) -> None:
    nvml = NVML(counts=True)
    board_of(nvml)
    found = energy_of(nvml.work, device=GPU, seconds=0.02)
    assert found.means == COUNTER
    assert found.calls == nvml.done > 1
    assert found.joules == pytest.approx(2.0 * found.calls)


def test_the_counter_has_moved(board_of: Callable[[NVML], None]) -> None:
    nvml = NVML(counts=True, every=7)
    board_of(nvml)
    found = energy_of(nvml.work, device=GPU, seconds=0.0)
    assert found.calls == nvml.done == 7
    assert found.joules == pytest.approx(14.0)


def test_a_counter_that_stands_still_is_refused(
    board_of: Callable[[NVML], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "_STILL_SECONDS", 0.02)
    board_of(NVML(counts=True, every=10**9))
    with pytest.raises(Unavailable, match="does not move"):
        energy_of(lambda: time.sleep(0.002), device=GPU, seconds=0.0)


def test_without_a_counter_power_is_sampled(board_of: Callable[[NVML], None]) -> None:
    nvml = NVML(counts=False)
    board_of(nvml)
    begun = time.perf_counter()
    found = energy_of(nvml.work, device=GPU, seconds=0.05)
    took = time.perf_counter() - begun
    assert found.means == POWER
    assert found.calls == nvml.done
    assert 300 * 0.05 <= found.joules <= 300 * took


def test_a_call_is_made_at_least_once(board_of: Callable[[NVML], None]) -> None:
    nvml = NVML(counts=True)
    board_of(nvml)
    assert energy_of(nvml.work, device=GPU, seconds=0.0).calls == 1


def test_a_cpu_has_none_that_is_measured() -> None:
    with pytest.raises(Unavailable, match="on a GPU alone") as refused:
        energy_of(lambda: None, device=torch.device("cpu"), seconds=0.1)
    assert refused.value.status == "unsupported"


@pytest.mark.gpu
def test_a_gpu_takes_some() -> None:
    x = torch.ones(1024, 1024, device="cuda")

    def work() -> None:
        for _ in range(100):
            torch.mm(x, x)
        torch.cuda.synchronize()

    found = energy_of(work, device=torch.device("cuda"), seconds=0.3)
    assert 0 < found.joules < 1500
