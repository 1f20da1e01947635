"""Requests that are served, by kind of attention and from a cache, on tiny histories."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch

from jagged_ranking import results
from jagged_ranking.figures.serving_points import CACHED, SCORING, SERVING, TAIL
from jagged_ranking.figures.throughput_points import GRAPH
from jagged_ranking.layers import attention, growing_cache
from jagged_ranking.measure import timing
from jagged_ranking.measure.timing import Effort
from jagged_ranking.reproduce.lab import describe_points, serving_points
from jagged_ranking.reproduce.request_batches import BatchLengths, RequestBatches
from jagged_ranking.reproduce.serving_contest import NewEvents, ServingContest
from jagged_ranking.reproduce.serving_study import (
    ServingPoint,
    _device_times,
    _parts,
    _Pass,
    serving,
)
from jagged_ranking.reproduce.step_contest import NO_GPU, Entry, StepContest
from jagged_ranking.reproduce.training_step import ranker_to_measure
from jagged_ranking.training.config import TrainConfig

KINDS = ("jagged", "padded_flash", "padded_dense")
TIMES = {"latency", TAIL, "requests_per_second"}
PEAKS = {"peak_memory", "peak_memory_minus_inputs"}

pytestmark = pytest.mark.usefixtures("objects_apart")


def measured(model: str = "transformer", **changes: Any) -> pd.DataFrame:
    given: dict[str, Any] = {
        "attentions": KINDS,
        "options": {"dim": 8, "hidden": [8]},
        "items": 40,
        "drawn": 4,
        "new_events": 2,
        "page_size": 4,
        "effort": Effort(rounds=2, inner=1, warmup=1, seconds=0.02),
        "device": "cpu",
    }
    point = ServingPoint(model=model, layers=1, cap=16, candidates=3, requests=2)
    return serving(point, **{**given, **changes})


def of(table: pd.DataFrame, metric: str) -> pd.DataFrame:
    return results.select(table, op=SERVING, metric=metric).set_index("provider")


@pytest.mark.parametrize("model", ["target_attention", "transformer"])
def test_everybody_has_all_numbers(model: str) -> None:
    table = measured(model)
    assert set(table["provider"]) == {*KINDS, CACHED}
    for provider, mine in table.groupby("provider"):
        status = dict(zip(mine["metric"], mine["status"], strict=True))
        lost = {name for name, said in status.items() if said != "ok"}
        assert lost == {"device_time"}  # of a CPU
        held = {"cache_memory"} if provider == CACHED else set()
        assert set(status) - lost == TIMES | PEAKS | {"rel_error"} | held
    assert (of(table, "rel_error")["value"] < 1e-5).all()
    facts = results.with_config(table, "requests", "candidates", "cap", "B", "new_events").iloc[0]
    told = [facts[name] for name in ("requests", "candidates", "cap", "B", "new_events")]
    assert told == [2, 3, 16, 2, 2]
    waited, tail, rate = (of(table, name) for name in ("latency", TAIL, "requests_per_second"))
    for provider, samples in waited["samples"].items():
        assert len(samples) % 2 == 0  # whole passes over both batches
        assert tail["value"][provider] == pytest.approx(np.percentile(samples, 99))
        assert rate["value"][provider] == pytest.approx(2e3 / np.mean(samples))


@pytest.mark.parametrize(("batches", "calls", "passes"), [(10, 4, 1), (10, 11, 2), (2, 5, 2)])
def test_whatever_is_counted_are_whole_passes(batches: int, calls: int, passes: int) -> None:
    asked: list[int] = []

    def answer(number: int) -> torch.Tensor:
        asked.append(number)
        return torch.zeros(1)

    one, counted = _Pass(answer, _parts(batches)), []
    for _ in range(3 + calls):  # three to warm up
        asked.clear()
        one()
        again, *timed = asked
        assert again == timed[0]
        assert len(one.samples[-1]) == len(timed)
        counted.append(timed)
    assert len(one.whole(calls)) == passes * batches
    last = [number for timed in counted[-passes * len(one.parts) :] for number in timed]
    assert sorted(last) == sorted(passes * list(range(batches)))


def test_a_request_is_answered_when_its_logits_are_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    class Coming:
        def cpu(self) -> None:
            now[0] += 5e-3

    def answer(number: int) -> Any:
        now[0] += 1e-3  # to launch it
        return Coming()

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    one = _Pass(answer, [[0, 1, 2]])
    one()
    assert one.samples == [pytest.approx([6.0] * 3)]


def batches_of(*lengths: tuple[int, ...]) -> RequestBatches:
    given = BatchLengths(name="some", group="cap", cap=16, batches=lengths)
    return RequestBatches(given, items=40, candidates=3, device=torch.device("cpu"))


def test_a_cache_lacks_the_new_events_of_a_request() -> None:
    """All of them, and no more: they are what a request over it costs."""
    made = batches_of((7, 1), (2, 16))
    options = {"model": "transformer", "dim": 8, "max_history": 16, "event_time": "arrival"}
    model = ranker_to_measure(TrainConfig.from_dict(options), made.shape, made.device).eval()
    found = NewEvents(model, made.each(), 3, 4)
    assert [batch.events.tolist() for batch in found.batches] == [[3, 1], [2, 3]]


def test_memory_is_that_of_the_longest_history() -> None:
    made = batches_of((7, 1), (2, 16), (3, 3))
    contest = ServingContest(
        op=SERVING, workload="some", configs={}, shape=made.shape, batches=made.each(),
        new_events=1, page_size=4, facts={},
    )  # fmt: skip
    assert contest.batch.longest[1] == 16


def test_the_device_is_timed_on_the_same_requests_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow one is: of a few of its requests the median would be of other lengths."""

    def clocked(clock: Any, call: Any, repeats: int, start: float) -> list[float]:
        return [float(call()) for _ in range(repeats)]

    monkeypatch.setattr(timing._WallClock, "time", clocked)  # ms are what calls return
    contest = SimpleNamespace(batches=range(5), failed={}, device=torch.device("cpu"))
    contest.interleaved = partial(StepContest.interleaved, cast(StepContest, contest))
    times = {"quick": 1.0, "slow": 1e4}
    calls = {Entry(name, SCORING): partial(sum_of, ms) for name, ms in times.items()}
    found = _device_times(cast(ServingContest, contest), calls, Effort(seconds=0.02))
    for entry, samples in found.items():
        assert sorted(samples) == [times[entry.provider] + number for number in range(5)]


def sum_of(ms: float, number: int) -> torch.Tensor:
    return torch.tensor(ms + number)


def test_graphs_are_of_whoever_is_named_for_them() -> None:
    table = measured(attentions=("padded_dense",), graphed_attentions=("jagged",))
    graphed = table[table["mode"] == GRAPH]
    assert graphed[["provider", "metric", "message"]].to_numpy().tolist() == [
        ["jagged", "latency", NO_GPU]
    ]


def test_what_cannot_be_measured_says_why() -> None:
    waited = of(measured("hstu"), "latency")
    assert waited["status"].to_dict() == {
        "jagged": "ok",
        "padded_dense": "ok",
        "padded_flash": "unsupported",
        CACHED: "unsupported",
    }
    assert "does not take its history from caches" in waited["message"][CACHED]


def test_graphs_need_a_gpu() -> None:
    table = measured(graphed_attentions=("jagged",))
    graphed = table[table["mode"] == GRAPH]
    assert graphed[["provider", "metric", "status", "message"]].to_numpy().tolist() == [
        ["jagged", "latency", "unsupported", NO_GPU]
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["target_attention", "transformer", "hstu"])
def test_what_is_captured_is_timed(model: str) -> None:
    kinds = ("jagged",) if model == "hstu" else ("jagged", "padded_flash")
    options = {"dim": 64, "heads": 2, "hidden": [8]}
    table = measured(model, graphed_attentions=kinds, options=options, device="cuda")
    graphed = table[table["mode"] == GRAPH]
    assert set(graphed["provider"]) == set(kinds)
    assert (graphed["status"] == "ok").all(), graphed["message"].unique()
    assert set(graphed["metric"]) == TIMES | {"device_time", "rel_error"}


def test_who_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    padded, asked = attention.padded_attention, growing_cache.cached_attention

    def blind(*given: Any, causal: bool, **options: Any) -> Any:
        return padded(*given, **{**options, "causal": False})

    def doubled(q: Any, *given: Any, **options: Any) -> Any:
        return asked(q.with_values(2 * q.values), *given, **options)

    monkeypatch.setattr(attention, "padded_attention", blind)
    monkeypatch.setattr(growing_cache, "cached_attention", doubled)
    waited = of(measured(attentions=("jagged", "padded_dense")), "latency")
    assert waited["status"].to_dict() == {"jagged": "ok", "padded_dense": "error", CACHED: "error"}
    assert waited["message"].drop("jagged").str.startswith("wrong: rel_error").all()


def test_who_runs_out_of_memory_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*given: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(NewEvents, "__init__", full)
    table = measured(attentions=("jagged",))
    for metric in (*TIMES, *PEAKS):
        assert of(table, metric)["status"].to_dict() == {"jagged": "ok", CACHED: "out_of_memory"}


def points(**changes: Any) -> list[ServingPoint]:
    given: dict[str, Any] = {
        "models": ["target_attention", "transformer"],
        "layers": 3,
        "caps": [8, 16],
        "candidates": [1, 10],
        "requests": [1, 4],
        "at_candidates": 10,
    }
    return serving_points(**{**given, **changes})


def test_points_are_every_cap_with_every_kind_of_requests() -> None:
    found = points()
    assert len(found) == len(set(found)) == 2 * 2 * 3
    kinds = {(one.candidates, one.requests) for one in found}
    assert kinds == {(1, 1), (10, 1), (10, 4)}
    assert {one.model: one.layers for one in found} == {"target_attention": 1, "transformer": 3}
    table = describe_points(found)
    assert list(table.index) == ["8", "16"]
    assert set(table["requests x candidates"]) == {"4 x 10"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"candidates": [1, 0]}, "candidates must be at least 1, got 0"),
        ({"at_candidates": 0}, "at_candidates must be at least 1, got 0"),
        ({"models": ["nobody"]}, "model must be one of"),
        ({"caps": []}, "nothing to measure"),
    ],
)
def test_bad_points_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        points(**changes)
