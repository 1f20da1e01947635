"""Whole training steps by kind of attention, on tiny batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch

from jagged_ranking import results
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.figures.throughput_points import DATA, GRAPH, HEAD, PART, PARTS, STEP
from jagged_ranking.layers import attention
from jagged_ranking.measure.contest import CROWDED
from jagged_ranking.measure.timing import Effort
from jagged_ranking.reproduce import energy, throughput_study
from jagged_ranking.reproduce.energy import Energy
from jagged_ranking.reproduce.graphed_step import GraphedStep
from jagged_ranking.reproduce.lab import describe_lengths, measured_throughput, throughput_batches
from jagged_ranking.reproduce.request_batches import BatchLengths
from jagged_ranking.reproduce.step_contest import Entry, StepContest
from jagged_ranking.reproduce.throughput_study import throughput
from jagged_ranking.reproduce.training_step import TrainingStep
from jagged_ranking.training.config import TrainConfig

LENGTHS = BatchLengths(name="some", group="waste", cap=8, batches=((3, 8, 5), (1, 8, 2)))
KINDS = ("jagged", "padded_flash", "padded_dense", "nested")
QUICK = Effort(rounds=2, inner=1, warmup=1, seconds=0.02)
TIMES = {"step_time", "samples_per_second", "device_time"}
PEAKS = {"peak_memory", "peak_memory_minus_inputs"}
ERRORS = {"rel_error", "loss_rel_error"}

pytestmark = pytest.mark.usefixtures("objects_apart")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty checkout, with no logs."""
    home = tmp_path / "home"
    (home / "notebooks").mkdir(parents=True)
    (home / "pyproject.toml").touch()
    monkeypatch.setenv("JAGGED_HOME", str(home))
    monkeypatch.delenv("JAGGED_BUILD", raising=False)
    monkeypatch.setenv("CLICK_DATA_DIR", str(tmp_path / "logs"))
    return home


def measured(lengths: BatchLengths = LENGTHS, **changes: Any) -> pd.DataFrame:
    given: dict[str, Any] = {
        "models": ["bst"],
        "layers": 2,
        "attentions": KINDS,
        "options": {"dim": 8, "hidden": [8]},
        "items": 40,
        "candidates": 2,
        "effort": QUICK,
        "energy_seconds": 0.01,
        "device": "cpu",
    }
    return throughput(lengths, **{**given, **changes})


def of(table: pd.DataFrame, metric: str, mode: str = "eager") -> pd.DataFrame:
    return results.select(table, op=STEP, metric=metric, mode=mode).set_index("provider")


def test_every_kind_has_all_its_numbers() -> None:
    table = measured()
    steps = results.select(table, op=STEP, mode="eager")
    assert set(steps["provider"]) == set(KINDS)
    for _, mine in steps.groupby("provider"):
        status = dict(zip(mine["metric"], mine["status"], strict=True))
        lost = {name for name, said in status.items() if said != "ok"}
        assert lost == {"host_share", "energy"}  # of a CPU
        assert set(status) - lost == TIMES | PEAKS | ERRORS
    assert (results.select(steps, metric=sorted(ERRORS))["value"] < 1e-4).all()
    held = of(table, "peak_memory")["value"] - of(table, "peak_memory_minus_inputs")["value"]
    assert len(set(held)) == 1  # weights, the optimiser's state and the batch
    assert held.min() > 0
    facts = results.with_config(steps, "B", "tokens", "candidates", "waste", "cap", "model")
    assert set(facts["B"]) == {3}
    assert set(facts["tokens"]) == {round((16 + 11) / 2)}
    assert set(facts["candidates"]) == {6}
    assert facts["waste"].unique() == pytest.approx([1 - 27 / 48])
    rates, times = (of(table, name)["samples"] for name in ("samples_per_second", "step_time"))
    for kind in KINDS:
        requests = np.array(rates[kind]) * np.array(times[kind]) / 1e3
        assert requests == pytest.approx([3.0] * len(requests))


def test_parts_add_up_to_a_step_that_was_measured() -> None:
    table = measured(attentions=("jagged", "padded_dense"))
    for kind, mine in results.select(table, op=PART).groupby("provider"):
        assert list(mine["metric"]) == list(PARTS)
        (device,) = results.select(
            table, op=STEP, metric="device_time", mode="eager", provider=str(kind)
        )["samples"]
        assert np.abs(np.array(device) - mine["value"].sum()).min() < 1e-9


def test_what_cannot_be_measured_says_why() -> None:
    table = measured(models=["hstu"], attentions=KINDS)
    step = of(table, "step_time")
    assert step["status"].to_dict() == {
        "jagged": "ok",
        "padded_dense": "ok",
        "padded_flash": "unsupported",
        "nested": "unsupported",
    }
    assert "is a softmax" in step["message"]["padded_flash"]
    assert of(table, "energy")["message"]["jagged"] == "energy is measured on a GPU alone"
    causal = of(measured(models=["sasrec"], attentions=("jagged", "nested")), "step_time")
    assert causal["status"].to_dict() == {"jagged": "ok", "nested": "unsupported"}


def test_an_attention_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    padded = attention.padded_attention

    def blind(*given: Any, causal: bool, **options: Any) -> Any:
        return padded(*given, **{**options, "causal": True})

    monkeypatch.setattr(attention, "padded_attention", blind)
    step = of(measured(attentions=("jagged", "padded_dense")), "step_time")
    assert step["status"].to_dict() == {"jagged": "ok", "padded_dense": "error"}
    assert step["message"]["padded_dense"].startswith("wrong: rel_error")


def test_who_runs_out_of_memory_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = TrainingStep.__call__

    def full(step: TrainingStep, batch: JaggedBatch, *given: Any) -> None:
        if step.config.attention == "padded_dense" and step.steps > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        call(step, batch, *given)

    monkeypatch.setattr(TrainingStep, "__call__", full)
    table = measured(attentions=("jagged", "padded_dense"))
    for metric in ("step_time", "device_time", "peak_memory"):
        assert of(table, metric)["status"].to_dict() == {
            "jagged": "ok",
            "padded_dense": "out_of_memory",
        }


def test_memory_that_others_held_is_not_said_to_be_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever finds none among the others, and does alone, has its memory and no time."""
    call, weigh = TrainingStep.__call__, StepContest.weigh
    beside = [True]

    def full(step: TrainingStep, batch: JaggedBatch, *given: Any) -> None:
        if step.config.attention == "padded_dense" and beside:
            raise torch.OutOfMemoryError("CUDA out of memory")
        call(step, batch, *given)

    def alone(contest: StepContest, *given: Any) -> None:
        beside.clear()
        weigh(contest, *given)

    monkeypatch.setattr(TrainingStep, "__call__", full)
    monkeypatch.setattr(StepContest, "weigh", alone)
    table = measured(attentions=("jagged", "padded_dense"))
    said = {name: of(table, name)["status"]["padded_dense"] for name in ("step_time", "energy")}
    assert set(said.values()) == {"unsupported"}
    assert of(table, "step_time")["message"]["padded_dense"] == CROWDED
    for metric in PEAKS:
        assert of(table, metric)["status"]["padded_dense"] == "ok"


@pytest.mark.parametrize("checked", [True, False])
def test_a_graph_that_finds_no_room_beside_others(
    monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """Nobody weighs it: whoever was captured for the check could be, alone."""
    entry = Entry("jagged", GRAPH)
    monkeypatch.setattr(throughput_study, "on_device", lambda configs, device: (configs, {}))

    def answers(contest: StepContest, asked: Entry, config: TrainConfig) -> tuple[Any, None]:
        if asked == entry and not checked:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return torch.ones(1), None

    def full(step: TrainingStep, batches: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def plain(step: TrainingStep, *given: Any, **of_graphs: Any) -> None:
        TrainingStep.__init__(step, *given)

    monkeypatch.setattr(StepContest, "_answers", answers)
    monkeypatch.setattr(GraphedStep, "capture", full)
    monkeypatch.setattr(GraphedStep, "__init__", plain)
    table = measured(attentions=("jagged",), graphed_attentions=("jagged",))
    status = of(table, "step_time", GRAPH)["status"]["jagged"]
    assert status == ("unsupported" if checked else "out_of_memory")


class Told:
    """A contest that times nothing: its calls took so many ms."""

    def __init__(self, took: list[float]) -> None:
        self.took, self.device = took, torch.device("cuda")
        self.facts, self.rows = {"B": 3}, dict[str, Any]()

    def interleaved(self, calls: Any, effort: Effort, device: torch.device) -> Any:
        assert device.type == "cpu"  # by the wall, since each call ends by waiting
        return dict.fromkeys(calls, self.took)

    def row(self, entry: Entry, metric: str, unit: str, **said: Any) -> None:
        self.rows[metric] = said.get("samples", said.get("value"))


def test_times_are_of_a_step_and_the_host_has_what_the_device_has_not() -> None:
    """Of runs of two steps; the making of batches is beside them, and not the device's part."""
    entry = Entry("jagged", "eager")
    contest = Told([20.0, 40.0, 30.0])
    one = throughput_study._Measurement(cast(Any, contest), cast(Any, None), 2, QUICK, 0.1)
    one._times({entry: lambda: None})
    assert contest.rows["step_time"] == [10.0, 20.0, 15.0]
    assert contest.rows["samples_per_second"] == [300.0, 150.0, 200.0]
    # the first was to warm up
    parts = [(90.0, 90.0), (1.0, 8.0), (7.0, 9.0), (0.0, 12.0)]
    clock = SimpleNamespace(samples=[{DATA: data, HEAD: head} for data, head in parts])
    one._parts({entry: cast(Any, clock)})
    assert contest.rows["device_time"] == [9.0, 16.0, 12.0]
    assert contest.rows["host_share"] == pytest.approx(1 - 9 / 15)
    assert contest.rows[HEAD] + contest.rows[DATA] == 12.0


def test_a_run_ends_when_the_device_has(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    run = throughput_study._Run.__new__(throughput_study._Run)
    run.step, run.steps, run.batches = cast(Any, done.append), 3, itertools.cycle("ab")
    run.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waits"))
    run()
    assert done == ["a", "b", "a", "waits"]


def test_energy_is_told_by_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def ten_joules_a_call(call: Any, *, device: torch.device, seconds: float) -> Energy:
        call()
        return Energy(10.0 * 7, 7, energy.COUNTER)

    monkeypatch.setattr(throughput_study, "energy_of", ten_joules_a_call)
    found = results.with_config(of(measured(attentions=("jagged",)), "energy"), "means")
    # two steps of three requests each in a call
    assert found["value"].tolist() == pytest.approx([10 / 6])
    assert found["means"].tolist() == [energy.COUNTER]


def test_a_board_that_fails_costs_the_energy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: Any, **__: Any) -> Energy:
        raise RuntimeError("GPU is lost")

    monkeypatch.setattr(throughput_study, "energy_of", lost)
    table = measured(attentions=("jagged",))
    assert of(table, "energy")["message"].tolist() == ["RuntimeError: GPU is lost"]
    assert {*of(table, "step_time")["status"], *of(table, "peak_memory")["status"]} == {"ok"}


def test_steps_through_the_compiler_are_rows_of_their_own() -> None:
    table = measured(
        models=["target_attention"], layers=1, attentions=("jagged",),
        compiled_attentions=("jagged",), compiler="eager",
    )  # fmt: skip
    compiled = results.select(table, op=STEP, mode="torch.compile", status="ok")
    assert set(compiled["metric"]) == {*TIMES, "rel_error"}
    assert results.with_config(compiled, "compile")["compile"].unique().tolist() == ["eager"]


def test_a_cpu_has_no_graphs() -> None:
    table = measured(attentions=("jagged", "padded_flash"), graphed_attentions=("jagged",))
    graph = of(table, "step_time", "CUDA graph")
    assert graph["status"].to_dict() == {"jagged": "unsupported"}
    assert graph["message"].to_dict() == {"jagged": "CUDA graphs need a GPU"}


def test_graphs_are_of_whoever_is_named_for_them() -> None:
    """Not only of those whose steps are measured launch by launch."""
    table = measured(attentions=("padded_dense",), graphed_attentions=("jagged",))
    assert of(table, "step_time", GRAPH)["status"].to_dict() == {"jagged": "unsupported"}
    assert of(table, "step_time")["status"].to_dict() == {"padded_dense": "ok"}


def test_a_graph_pads_as_far_as_histories_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the longest of all batches, and not to the cap: what is measured launch by launch pads no
    further either."""
    lengths = BatchLengths(name="cut", group="real", cap=32, batches=((3, 5), (1, 12, 2), (7, 8)))
    monkeypatch.setattr(throughput_study, "on_device", lambda configs, device: (configs, {}))
    padded, reached = attention.padded_attention, set[int]()

    def noted(*given: Any, longest: tuple[int, int], **options: Any) -> Any:
        reached.add(longest[1])
        return padded(*given, longest=longest, **options)

    captured = list[Any]()
    capture = GraphedStep.capture

    def steps(step: GraphedStep, batches: Any) -> None:
        captured.append(step)
        capture(step, batches)

    monkeypatch.setattr(GraphedStep, "capture", steps)
    monkeypatch.setattr(attention, "padded_attention", noted)
    kinds = ("padded_dense",)
    table = measured(lengths, models=["sasrec"], attentions=(), graphed_attentions=kinds)
    assert of(table, "step_time", GRAPH)["status"].to_dict() == {"padded_dense": "ok"}
    assert max(reached) == 12
    (step,) = captured
    assert step.steps > 3 * len(lengths.batches)  # it is what was timed


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["hstu", "bst", "sasrec", "target_attention"])
def test_graphs_on_a_gpu(model: str) -> None:
    kinds = ("jagged", "padded_flash")
    options = {"dim": 64, "heads": 2}
    table = measured(
        models=[model], attentions=kinds, graphed_attentions=kinds, options=options, device="cuda"
    )
    graph = results.select(table, op=STEP, mode="CUDA graph")
    wrong = graph[graph["status"] != "ok"]
    if model == "bst":
        assert set(wrong["provider"]) == set(kinds)
        assert set(wrong["status"]) == {"unsupported"}
        assert wrong["message"].str.contains("changes from batch to batch").all()
        return
    without = {"padded_flash"} if model == "hstu" else set()  # which is a softmax
    assert set(wrong["provider"]) == without, wrong[["provider", "metric", "message"]]
    jagged = results.select(graph, provider="jagged")
    assert set(jagged["metric"]) == {*TIMES, *ERRORS, "host_share", "energy"}


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, int, list[str]]]]:
    """What cells are measured, in place of measuring them."""
    cells: list[tuple[str, str, int, list[str]]] = []

    def record(_: Any, one: BatchLengths, **given: Any) -> pd.DataFrame:
        cells.append((one.name, given["models"][0], given["layers"], given["compiled_attentions"]))
        return results.frame([])

    monkeypatch.setattr(throughput_study, "cached", record)
    yield cells


def study(batches: list[BatchLengths], **changes: Any) -> pd.DataFrame:
    given: dict[str, Any] = {
        "models": ["sasrec", "target_attention"],
        "layers": [4, 8],
        "attentions": ["jagged"],
        "compiled": ["sasrec"],
        "compiled_attentions": ["jagged"],
        "options": {"dim": 8},
        "seed": 0,
    }
    return measured_throughput(batches, **{**given, **changes})


def test_depth_and_compiling_are_for_the_batches_of_given_waste(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = throughput_batches(
        wastes=[0.0, 0.5], caps=[8], at_cap=8, histories=[], batch_tokens=64, batches=2, seed=0
    )
    assert describe_lengths(batches)["padding waste"].tolist()[:2] == ["0%", "50%"]
    with recorded(monkeypatch) as cells:
        study(batches)
    assert cells == [
        ("waste 0%", "sasrec", 4, []),
        ("waste 0%", "sasrec", 8, []),
        ("waste 50%", "sasrec", 4, ["jagged"]),
        ("waste 50%", "sasrec", 8, []),
        ("lognormal 8", "sasrec", 4, []),
        ("waste 0%", "target_attention", 1, []),
        ("waste 50%", "target_attention", 1, []),
        ("lognormal 8", "target_attention", 1, []),
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": ["sasrecs"]}, "model must be one of .* got 'sasrecs'"),
        ({"attentions": ["flash"]}, "attention must be one of .* got 'flash'"),
        ({"options": {"dims": 8}}, "unknown option 'dims'"),
        ({"layers": []}, "at least one model and one number of layers"),
        ({"models": []}, "at least one model and one number of layers"),
        ({"attentions": [], "compiled_attentions": []}, "at least one kind of attention"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    changes: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorded(monkeypatch) as cells, pytest.raises(ValueError, match=said):
        study([LENGTHS], **changes)
    assert not cells


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"at_cap": 0}, "at_cap must be at least 1, got 0"),
        ({"batch_tokens": 0}, "batch_tokens must be at least 1"),
        ({"caps": [8, 0]}, "caps must be at least 1, got 0"),
        ({"wastes": [], "caps": []}, "no batch to measure"),
    ],
)
def test_batches_that_cannot_be(home: Path, changes: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {
        "wastes": [0.0], "caps": [8], "at_cap": 8, "histories": [], "batch_tokens": 64,
        "batches": 1, "seed": 0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=said):
        throughput_batches(**{**given, **changes})


def test_a_log_that_is_not_at_hand_is_left_out(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = throughput_batches(
        wastes=[0.0], caps=[], at_cap=8, histories=["globo_clicks"], batch_tokens=64, batches=1,
        seed=0,
    )  # fmt: skip
    assert [one.name for one in found] == ["waste 0%"]
    assert "no globo_clicks in" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("model", ["hstu", "bst", "sasrec", "target_attention"])
def test_steps_on_a_gpu(model: str) -> None:
    table = measured(models=[model], options={"dim": 64, "heads": 2}, device="cuda")
    steps = results.select(table, op=STEP, mode="eager")
    wrong = steps[steps["status"] != "ok"]
    softmax_alone = {"padded_flash", "nested"} if model == "hstu" else set()
    assert set(wrong["provider"]) == softmax_alone, wrong[["provider", "metric", "message"]]
    jagged = results.select(steps, provider="jagged")
    assert set(jagged["metric"]) == {*TIMES, *PEAKS, *ERRORS, "host_share", "energy"}
    values = dict(zip(jagged["metric"], jagged["value"], strict=True))
    assert 0 <= values["host_share"] < 1
    assert values["energy"] > 0
