"""A contest runs the mode that its rows say, and weighs what a provider alone brings along."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jagged_ranking.measure import contest as contest_module
from jagged_ranking.measure.ceilings import Ceilings
from jagged_ranking.measure.contest import Contest
from jagged_ranking.measure.peak_memory import Peak, peak_memory
from jagged_ranking.measure.providers import MODES, TRAINING
from jagged_ranking.measure.timing import Effort, Timing

FACTS = {f"{kind}_{mode}": 1.0 for kind in ("bytes", "flops") for mode in MODES}


def contest_of() -> Contest:
    return Contest(
        op="o", workload="w", facts=FACTS, device=torch.device("cpu"),
        effort=Effort(rounds=2, inner=1, warmup=1, seconds=0.01),
        ceilings=Ceilings(1.0, 1.0, "float32"), common={},
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_what_is_timed_and_weighed_is_the_mode(mode: str) -> None:
    ran: list[str] = []
    one = contest_of()
    one.time({"a": ran.append, "b": ran.append}, mode)
    timed = len(ran)
    one.weigh(["a"], [mode], lambda name: (ran.append, []))
    assert len(ran) > timed > 2
    assert set(ran) == {mode}
    assert {row["mode"] for row in one.rows} == {mode}


def test_the_device_and_the_host_have_rows_of_their_own() -> None:
    one = contest_of()
    one.times("a", TRAINING, Timing([1.0, 2.0, 6.0], [7.0, 8.0, 30.0]))
    assert {row["metric"]: row["value"] for row in one.rows} == {"latency": 2.0, "host_time": 8.0}


def test_more_than_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest_module, "free_bytes", lambda device: 2 * 10**9)
    one = contest_of()
    one.refuse("fits", TRAINING, 2 * 10**9)
    one.refuse("does not", TRAINING, 2 * 10**9 + 1)
    assert [*one.failed] == [("does not", TRAINING)]
    assert one.failed["does not", TRAINING][0] == "out_of_memory"


def test_inputs_are_memory_of_their_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was there before it was prepared is nobody's."""
    one, held, floors = contest_of(), [1000], []

    def prepare(name: str) -> Any:
        held.append(30)
        return (lambda mode: None), []

    def peak(call: Any, *, floor: int, **_: Any) -> Peak:
        floors.append(floor)
        return Peak(total=sum(held) - floor, beyond_inputs=0)

    monkeypatch.setattr(contest_module, "allocated", lambda device: sum(held))
    monkeypatch.setattr(contest_module, "peak_memory", peak)
    one.weigh(["a"], [TRAINING], prepare)
    assert floors == [1000]
    assert {row["metric"]: row["value"] for row in one.rows} == {
        "peak_memory": 30.0,
        "peak_memory_minus_inputs": 0.0,
    }


class Allocator:
    """Of a GPU: what tensors hold, and the most that they did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
        self.held = self.most = held
        given = {
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
            "reset_peak_memory_stats": lambda device: setattr(self, "most", self.held),
            "memory_allocated": lambda device: self.held,
            "max_memory_allocated": lambda device: self.most,
        }
        for name, function in given.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr("jagged_ranking.measure.peak_memory._await_gradients", lambda on: None)

    def takes(self, size: int) -> None:
        """For a moment."""
        self.most = max(self.most, self.held + size)


def test_a_peak_on_a_gpu_is_that_of_the_second_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what is held when it begins; in all, beyond what was held before the inputs were."""
    gpu, sizes = Allocator(monkeypatch, held=1000 + 30), iter([700, 50])

    def call() -> None:
        gpu.takes(size := next(sizes))
        gpu.held += 7 if size == 700 else 0  # which the first leaves, as an optimiser its state

    found = peak_memory(call, inputs=[], device=torch.device("cuda"), floor=1000)
    assert found == Peak(total=30 + 7 + 50, beyond_inputs=50)
