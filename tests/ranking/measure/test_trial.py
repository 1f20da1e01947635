"""Providers that break a process do so in one of their own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import trial_cases

from jagged_ranking import results
from jagged_ranking.measure import benchmark
from jagged_ranking.measure.benchmark import measure_attention
from jagged_ranking.measure.lineup import NOT_TRIED
from jagged_ranking.measure.providers import PROVIDERS, Provider
from jagged_ranking.measure.timing import Effort
from jagged_ranking.measure.trial import FAILURES, TRIALS, Trials
from jagged_ranking.measure.workload_sets import small_workloads

CPU = torch.device("cpu")
BATCH, OTHER, *MORE = small_workloads()
BRIEF = Effort(rounds=1, inner=1, seconds=0.01)


def provider(prepare) -> Provider:
    return Provider(name=prepare.__name__, description="", prepare=prepare, tried_apart=True)


@pytest.fixture
def none_left() -> Iterator[None]:
    """No process is left that was not there before: `TRIALS` keeps that of other tests' studies."""
    before = multiprocessing.active_children()
    yield
    assert set(multiprocessing.active_children()) <= set(before)


@pytest.fixture
def trials(none_left: None) -> Iterator[Trials]:
    made = Trials(seconds=60.0)
    yield made
    made.end()


def test_what_is_no_reason_to_end_a_process(trials: Trials) -> None:
    works = provider(trial_cases.works)
    assert trials.failure(works, BATCH, "forward", CPU) is None
    first = trials._other
    missing = trials.failure(provider(trial_cases.is_missing), BATCH, "forward", CPU)
    assert missing == ("missing", "no such package")
    wrong = trials.failure(provider(trial_cases.raises), BATCH, "forward", CPU)
    assert wrong == ("error", "RuntimeError: out of place")
    training = provider(trial_cases.raises_in_training)
    assert trials.failure(training, BATCH, "forward", CPU) is None
    assert trials.failure(training, BATCH, "forward+backward", CPU) == wrong
    assert trials.failure(works, OTHER, "forward", CPU) is None
    assert trials._other is first


def test_who_breaks_it_has_failed_on_that_batch_and_others_go_on(trials: Trials) -> None:
    breaks, ends = provider(trial_cases.breaks_the_device), provider(trial_cases.ends_its_process)
    place = f"in a process of its own, on {BATCH.name}, it"
    broken = "broke the device: RuntimeError: CUDA error: an illegal memory access was encountered"
    assert trials.failure(breaks, BATCH, "forward", CPU) == ("error", f"{place} {broken}")
    assert trials.failure(ends, BATCH, "forward", CPU) == ("error", f"{place} ended that process")
    assert trials.failure(provider(trial_cases.works), BATCH, "forward", CPU) is None
    alive = trials._other
    for one, why in ((breaks, broken), (ends, "ended that process")):
        again = trials.failure(one, BATCH, "forward", CPU)
        assert again == ("error", f"{place} {why}")
    assert trials._other is alive


def test_who_breaks_it_on_some_batches_is_not_tried_again(trials: Trials) -> None:
    ends = provider(trial_cases.ends_its_process)
    *batches, another = [BATCH, OTHER, *MORE][: FAILURES + 1]
    said = [f"in a process of its own, on {one.name}, it ended that process" for one in batches]
    for batch, message in zip(batches, said, strict=True):
        assert trials.failure(ends, batch, "forward", CPU) == ("error", message)
    expected = ("error", f"{NOT_TRIED}{said[-1]}")
    assert trials.failure(ends, another, "forward", CPU) == expected
    # What it has not got, it has not failed on.
    lacking = replace(ends, lacks=lambda workload: "no biases")
    assert trials.failure(lacking, another, "forward", CPU) == ("unsupported", "no biases")
    # What it was tried on stays as it was.
    assert trials.failure(ends, BATCH, "forward", CPU) == ("error", said[0])
    assert trials._other is None


def test_who_does_not_come_back(none_left: None) -> None:
    trials = Trials(seconds=1.0)
    status, message = trials.failure(provider(trial_cases.never_returns), BATCH, "forward", CPU)
    assert status == "error"
    assert message.endswith("it did not come back within 1 s")
    again = trials.failure(provider(trial_cases.never_returns), OTHER, "forward", CPU)
    assert again == ("error", f"{NOT_TRIED}{message}")


def test_a_measurement_goes_on_without_who_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def failure(tried, workload, mode, device):
        asked.append((tried.name, workload.name, mode))
        return ("error", "it broke the device") if mode == "forward+backward" else None

    monkeypatch.setitem(PROVIDERS, "works", provider(trial_cases.works))
    monkeypatch.setattr(TRIALS, "failure", failure)
    monkeypatch.setattr(benchmark, "BREAKABLE", ("cpu",))
    names = ("jagged", "works")
    table = measure_attention([BATCH], providers=names, effort=BRIEF, progress=False)
    assert asked == [("works", BATCH.name, mode) for mode in ("forward", "forward+backward")]
    latency = results.select(table, op="attention", metric="latency")
    said = latency.set_index(["provider", "mode"])[["status", "message"]].apply(tuple, axis=1)
    assert said["jagged", "forward+backward"] == ("ok", "")
    assert said["works", "forward+backward"] == ("error", "it broke the device")
    # Tried, it is checked as everybody is.
    assert said["works", "forward"][1].startswith("wrong: relative error")
