"""The energy of some work: by a made-up board's counter, or by its power."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from jagged_ranking.measure.providers import Unavailable
from jagged_ranking.reproduce import energy
from jagged_ranking.reproduce.energy import COUNTER, POWER, energy_of

GPU = torch.device("cuda")


WATTS = 300


class NVML:
    """A board that takes 300 W.

    Args:
        counts: whether it has a counter of energy.
        every: seconds after which the counter moves.
    """

    class NVMLError(Exception):
        pass

    def __init__(self, *, counts: bool, every: float = 0.01) -> None:
        self.counts, self.every, self.done = counts, every, 0

    def nvmlDeviceGetTotalEnergyConsumption(self, board: str) -> int:
        if not self.counts:
            raise self.NVMLError("Not Supported")
        moved = time.perf_counter() // self.every
        return 10**9 + round(1000 * WATTS * moved * self.every)

    def nvmlDeviceGetPowerUsage(self, board: str) -> int:
        return 1000 * WATTS

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
    begun = time.perf_counter()
    found = energy_of(nvml.work, device=GPU, seconds=0.05)
    took = time.perf_counter() - begun
    assert found.means == COUNTER
    assert found.calls == nvml.done > 1
    assert 0 < found.joules < 2 * WATTS * took


def test_what_a_counter_says_is_as_old_as_its_last_move(
    board_of: Callable[[NVML], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work of 0.4 s at 300 W, of which a counter that moves every 0.1 s says that it took 0.3 or
    0.5 s' worth, as it happens."""
    board_of(NVML(counts=True))
    for late in (0.01, 0.05, 0.09):
        looks = [(late + 0.002 * n, int((late + 0.002 * n) / 0.1)) for n in range(200)]

        @contextmanager
        def looked_at(read: Any, every: float, looks: Any = looks) -> Iterator[Any]:
            yield [(moment, 30_000 * moved) for moment, moved in looks]

        monkeypatch.setattr(energy, "_looked_at", looked_at)
        monkeypatch.setattr(energy, "_repeated", lambda *_, **__: (7, 0.4))
        found = energy_of(lambda: None, device=GPU, seconds=0.3)
        assert found.calls == 7
        assert found.joules == pytest.approx(0.4 * WATTS, rel=0.02)


def test_the_counter_has_moved_twice(board_of: Callable[[NVML], None]) -> None:
    nvml = NVML(counts=True, every=0.03)
    board_of(nvml)
    begun = time.perf_counter()
    found = energy_of(nvml.work, device=GPU, seconds=0.0)
    assert time.perf_counter() - begun >= 0.03
    assert found.calls == nvml.done > 1


def test_a_counter_that_stands_still_is_refused(
    board_of: Callable[[NVML], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "_STILL_SECONDS", 0.02)
    board_of(NVML(counts=True, every=1e9))
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
    assert WATTS * 0.05 <= found.joules <= WATTS * took


def test_power_is_of_all_the_time_that_calls_took(
    board_of: Callable[[NVML], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of them may end long after the seconds that were asked for."""

    @contextmanager
    def looked_at(read: Any, every: float) -> Iterator[Any]:
        yield [(0.0, 1000 * (WATTS - 100)), (0.1, 1000 * (WATTS + 100))]

    board_of(NVML(counts=False))
    monkeypatch.setattr(energy, "_looked_at", looked_at)
    monkeypatch.setattr(energy, "_repeated", lambda *_, **__: (7, 0.4))
    found = energy_of(lambda: None, device=GPU, seconds=0.1)
    assert found.joules == pytest.approx(0.4 * WATTS)
    assert (found.calls, found.means) == (7, POWER)


def test_a_call_is_made_at_least_once(board_of: Callable[[NVML], None]) -> None:
    nvml = NVML(counts=False)
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
