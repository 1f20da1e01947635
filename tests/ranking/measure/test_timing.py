"""Timing: providers take turns, and the time of a GPU is not that of its host."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import pytest
import torch
from fake_gpu import FakeGpu

from jagged_ranking.measure import timing
from jagged_ranking.measure.timing import Effort

CPU = torch.device("cpu")


def test_providers_take_turns_and_slow_ones_fewer() -> None:
    said: list[str] = []
    calls = {"a": lambda: said.append("a"), "b": lambda: said.append("b")}
    effort = Effort(rounds=3, inner=2, warmup=1, seconds=10.0)
    found = timing.interleaved(calls, device=CPU, effort=effort)
    assert [len(found[name].samples) for name in "ab"] == [6, 6]
    # After the warm-up of both: a turn is one call that does not count and two that do, and nobody
    # is always the first.
    turns = ["".join(said[i : i + 3]) for i in range(4, len(said), 3)]
    rounds = [tuple(turns[i : i + 2]) for i in range(0, len(turns), 2)]
    assert sorted(set(rounds)) == [("aaa", "bbb"), ("bbb", "aaa")]
    assert len(rounds) == 3
    assert timing._plan(1.0, Effort(rounds=5, inner=10, seconds=2.0)) == (2, 1)
    assert timing._plan(1e-4, Effort(rounds=5, inner=10, seconds=2.0)) == (5, 10)
    assert timing._plan(60.0, Effort(rounds=5, inner=10, seconds=2.0)) == (2, 1)


def test_one_that_breaks_later_does_not_stop_the_others() -> None:
    left = iter(range(4))

    def breaks() -> None:
        if next(left, None) is None:
            raise RuntimeError("enough")

    calls = {"breaks": breaks, "works": lambda: None}
    effort = Effort(rounds=3, inner=2, warmup=1)
    found = timing.interleaved(calls, device=CPU, effort=effort)
    assert isinstance(found["breaks"].failure, RuntimeError)
    assert found["breaks"].samples == []
    assert len(found["works"].samples) == 6


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen by others"])
def test_earlier_objects_are_set_apart_once(frozen: bool) -> None:
    """Whatever another library has frozen before."""
    if frozen:
        gc.freeze()
    earlier: list[list] = [[]]
    try:
        with timing.earlier_objects_apart():
            assert all(entry is not earlier for entry in gc.get_objects())
            with timing.earlier_objects_apart():
                pass
            assert all(entry is not earlier for entry in gc.get_objects())
        assert any(entry is earlier for entry in gc.get_objects())
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("slowly", [2e-4, 1e-3], ids=["on time", "late"])
def test_a_host_that_falls_behind_is_not_in_the_time_of_the_device(
    slowly: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that the host issues in the time that it was seen to take, or in five times that."""
    gpu, issued = FakeGpu(monkeypatch), []

    def call() -> None:
        issued.append(gpu.host)
        for _ in range(2):
            gpu.issue(1e-5)
            gpu.host += slowly / 2

    samples = gpu.clock().time(call, 5, start=5e-4)
    assert samples == pytest.approx([0.02] * 5)
    assert len(issued) == (5 if slowly < 5e-4 else 6)


def test_inputs_in_turn_are_all_timed_though_the_host_falls_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, late = FakeGpu(monkeypatch), iter([False, True, False, True])

    def call(number: int) -> None:
        for _ in range(2):
            gpu.issue(1e-5 * (1 + number))
            gpu.host += 1e-3 if next(late, False) else 1e-5

    samples = gpu.clock().time(timing.InTurn(call, 3), 3, start=5e-4)
    assert samples == pytest.approx([0.02, 0.04, 0.06])


def test_a_host_that_falls_behind_now_and_then_is_not_in_the_time_of_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine, more often in a turn than a call that waits for the device is tried."""
    gpu, issued = FakeGpu(monkeypatch), []

    def call() -> None:
        issued.append(gpu.host)
        gpu.issue(1e-5)
        gpu.host += 1.0 if len(issued) % 2 else 1e-4
        gpu.issue(1e-5)

    samples = gpu.clock().time(call, 5, start=5e-4)
    assert samples == pytest.approx([0.02] * 5)
    assert len(issued) == 10


def test_a_call_that_waits_for_the_device_is_timed_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, issued = FakeGpu(monkeypatch), []

    def call() -> None:
        issued.append(gpu.host)
        gpu.issue(1e-5)
        gpu.wait()
        gpu.host += 3e-5
        gpu.issue(1e-5)

    samples = gpu.clock().time(call, 5, start=5e-4)
    assert samples == pytest.approx([0.05] * 5)
    assert len(issued) == 5 + timing.LATE_CALLS


def test_every_call_finds_a_cache_without_its_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written over before each of them, and not in its time."""
    gpu, done = FakeGpu(monkeypatch), []
    clock = gpu.clock()

    class Flush:
        def zero_(self) -> None:
            done.append("flush")
            gpu.issue(7e-5)

    def call() -> None:
        done.append("call")
        gpu.issue(2e-5)

    clock.flush = Flush()  # pyright: ignore[reportAttributeAccessIssue]
    assert clock.time(call, 3, start=1e-4) == pytest.approx([0.02] * 3)
    assert done == ["flush", "call"] * 3


def test_the_host_is_timed_while_the_device_has_nothing_else_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a call that finds the device's queue full the host's time would be that of the device."""
    gpu = FakeGpu(monkeypatch)

    def call() -> None:
        gpu.wait()  # for what was issued before
        gpu.host += 3e-5
        gpu.issue(1e-2)

    call()
    monkeypatch.setattr("time.perf_counter", lambda: gpu.host)
    assert gpu.clock().host(call, 3) == pytest.approx([0.03] * 3)
    assert gpu.host == gpu.done


def slow_to_issue(seconds: float) -> Callable[[], None]:
    """A call that takes the host so long, and the device next to nothing."""
    x = torch.zeros(1024, device="cuda")

    def call() -> None:
        x.add_(1)
        time.sleep(seconds)
        x.add_(1)

    return call


@pytest.mark.gpu
def test_on_a_gpu_the_host_is_timed_apart() -> None:
    effort = Effort(rounds=2, inner=3, warmup=1)
    calls = {"one": slow_to_issue(0.01)}
    timed = timing.interleaved(calls, device=torch.device("cuda"), effort=effort)["one"]
    assert min(timed.host) >= 10  # ms
    assert max(timed.samples) < 5


@pytest.mark.gpu
def test_on_a_gpu_a_host_that_falls_behind_is_not_in_the_time_of_the_device() -> None:
    clock = timing._CudaClock(torch.device("cuda"))
    samples = clock.time(slow_to_issue(0.002), 5, start=1e-3)
    assert len(samples) == 5
    assert max(samples) < 1  # ms


@pytest.mark.parametrize("changes", [{"rounds": 0}, {"inner": 0}])
def test_no_effort_is_refused_before_anything_is_timed(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"(rounds|repeats) must be at least 1, got 0"):
        Effort(**changes)


def test_there_is_a_thread() -> None:
    said = "cpu_threads must be at least 1, got 0"
    with pytest.raises(ValueError, match=said), timing.threads("cpu", 0):
        pass
