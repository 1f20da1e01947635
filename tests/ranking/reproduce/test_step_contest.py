"""What rows of steps and of answers are numbers of."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from jagged_ranking.data.prefetch import tensors_of
from jagged_ranking.figures.throughput_points import GRAPH
from jagged_ranking.measure.peak_memory import Peak, storage_bytes
from jagged_ranking.measure.timing import Effort, Timing
from jagged_ranking.reproduce import serving_contest, step_contest, step_cost
from jagged_ranking.reproduce.request_batches import BatchLengths, RequestBatches
from jagged_ranking.reproduce.serving_contest import CapturedHistories, ServingContest
from jagged_ranking.reproduce.step_contest import EXACT, Entry, StepContest
from jagged_ranking.training.config import TrainConfig

ENTRY = Entry("jagged", "train")
MADE = RequestBatches(
    BatchLengths(name="some", group="cap", cap=8, batches=((3, 8, 5), (1, 2))),
    items=40, candidates=2, device=torch.device("cpu"),
)  # fmt: skip


def contest_of(kind: type[StepContest], **given: Any) -> StepContest:
    config = TrainConfig(model="mean_pool", dim=8, max_history=8)
    named = {"op": "o", "workload": "w", "configs": {ENTRY: config}, "shape": MADE.shape}
    return kind(**named, facts={}, **given)


@pytest.mark.parametrize("served", [False, True])
def test_weights_and_the_batch_are_memory_of_their_step(
    served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of an answer; what was there before, and is not the batch, is nobody's."""
    batches = MADE.each()
    of_serving: dict[str, Any] = {"batches": batches, "new_events": 1, "page_size": 4}
    kind, given = (ServingContest, of_serving) if served else (StepContest, {"batch": batches[0]})
    contest = contest_of(kind, **given)
    batch = storage_bytes(tensors_of(batches[0]))
    held = [1000, batch]
    made_by = "_call" if served else "step_of"
    make = getattr(contest, made_by)

    def made(*asked: Any) -> Any:
        held.append(500)
        return make(*asked)

    def peak(call: Any, *, floor: int, **_: Any) -> Peak:
        return Peak(total=sum(held) - floor, beyond_inputs=0)

    monkeypatch.setattr(contest, made_by, made)
    module = serving_contest if served else step_contest
    monkeypatch.setattr(module, "allocated", lambda device: sum(held))
    monkeypatch.setattr(module, "peak_memory", peak)
    contest.weigh([ENTRY])
    assert {row["metric"]: row["value"] for row in contest.found} == {
        "peak_memory": batch + 500.0,
        "peak_memory_minus_inputs": 0.0,
    }


def test_a_step_costs_the_device_one_time_and_the_host_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timed(calls: Any, **_: Any) -> dict[str, Timing]:
        return {name: Timing([1.0, 2.0, 6.0], [7.0, 8.0, 30.0]) for name in calls}

    monkeypatch.setattr(step_cost.timing, "interleaved", timed)
    contest = contest_of(StepContest, batch=MADE.each()[0])
    rows = {row["metric"]: row for row in step_cost._measured(contest, Effort())}
    assert (rows["latency"]["value"], rows["host_time"]["value"]) == (2.0, 8.0)


def test_facts_are_of_all_batches() -> None:
    facts = step_contest.facts_of(MADE.each())
    assert (facts["tokens"], facts["candidates"]) == (round(19 / 2), 5)
    assert facts["waste"] == pytest.approx(1 - 19 / (3 * 8 + 2 * 2))


def test_who_is_captured_answers_by_graphs() -> None:
    contest = contest_of(ServingContest, batches=MADE.each(), new_events=1, page_size=4)
    assert isinstance(contest, ServingContest)
    config = contest.configs[ENTRY]
    captured = contest._call(Entry("jagged", GRAPH), contest.batches, config)
    assert isinstance(captured, CapturedHistories)
    assert captured.captured._longest == (2, 8)


def test_others_may_be_off_by_some_times_what_ours_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, in lower precision: a few roundings would hide an attention that is wrong."""
    off = {"jagged": 1e-3, "padded_flash": 4e-3, "padded_dense": 6e-3, "nested": math.nan}
    config = TrainConfig(model="mean_pool", dim=8, max_history=8)
    contest = contest_of(StepContest, batch=MADE.each()[0])
    contest.configs = {Entry(kind, "train"): config for kind in reversed(off)}
    contest.device = torch.device("cuda")

    def answers(entry: Entry, config: TrainConfig) -> tuple[torch.Tensor, None]:
        wrong = 0.0 if entry.mode == EXACT else off[entry.provider]
        return torch.full((4,), 1.0 + wrong), None

    monkeypatch.setattr(contest, "_answers", answers)
    contest.check()
    assert {entry.provider for entry in contest.failed} == {"padded_dense", "nested"}
    assert {status for status, _ in contest.failed.values()} == {"error"}
