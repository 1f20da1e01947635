"""The parts of a training step, and the step that they are of."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from fake_gpu import FakeGpu

from jagged_ranking.figures.throughput_points import (
    ATTENTION,
    ATTENTION_BACKWARD,
    BACKWARD,
    DATA,
    HEAD,
    PARTS,
    UPDATE,
)
from jagged_ranking.layers.attention import Attention, PointwiseAttention
from jagged_ranking.models.model_config import ATTENTIONS
from jagged_ranking.reproduce.request_batches import BatchLengths, RequestBatches
from jagged_ranking.reproduce.step_parts import StepClock, in_order, typical
from jagged_ranking.reproduce.training_step import TrainingStep
from jagged_ranking.training.config import TrainConfig

CPU = torch.device("cpu")
LENGTHS = BatchLengths(name="some", group="real", cap=8, batches=((3, 0, 8, 5), (1, 8, 2, 2)))
MODELS = ("hstu", "bst", "sasrec", "target_attention")


def made_on(device: torch.device) -> RequestBatches:
    return RequestBatches(LENGTHS, items=50, candidates=2, device=device)


def config_of(model: str, **options) -> TrainConfig:
    return TrainConfig(model=model, dim=16, layers=2, max_history=LENGTHS.cap, **options)


def step_of(model: str, device: torch.device = CPU, **options) -> TrainingStep:
    return TrainingStep(config_of(model, **options), made_on(device).shape, device)


@pytest.mark.parametrize("model", MODELS)
def test_nothing_begins_at_zero_and_a_seed_decides_the_weights(model: str) -> None:
    step, same, other = step_of(model), step_of(model), step_of(model, seed=1)
    for name, parameter in step.model.named_parameters():
        assert parameter.any(), name
    parameters = [[*one.model.parameters()] for one in (step, same, other)]
    assert all(torch.equal(a, b) for a, b in zip(*parameters[:2], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(*parameters[::2], strict=True))


@pytest.mark.parametrize("model", MODELS)
def test_logits_depend_on_attention(model: str) -> None:
    """An attention that is wrong would show where kinds are compared."""
    batch, step = made_on(CPU).each()[0], step_of(model)
    before = step.logits(batch)
    for module in step.model.modules():
        if isinstance(module, (Attention, PointwiseAttention)):
            module.register_forward_hook(lambda _, __, x: x.with_values(0.5 * x.values))
    difference = torch.linalg.vector_norm(step.logits(batch) - before)
    assert difference > 0.01 * torch.linalg.vector_norm(before)


@pytest.mark.parametrize("model", MODELS)
def test_a_step_looked_into_is_the_step(model: str) -> None:
    """To the bit, dropout included; and no hook stays."""
    batches, plain = made_on(CPU).each(), step_of(model)
    looked = copy.deepcopy(plain.model.state_dict())
    clock = StepClock(step_of(model), iter(batches))
    for batch in batches:
        torch.manual_seed(5)
        plain(batch)
        torch.manual_seed(5)
        clock()
    after = clock.step.model.state_dict()
    for name, value in plain.model.state_dict().items():
        assert torch.equal(after[name], value), name
    assert any(not torch.equal(after[name], looked[name]) for name in looked)
    for module in clock.step.model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.parametrize("model", MODELS)
def test_the_parts_of_a_step_are_all_of_it(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a clock that moves by one at each look there are as many ms as there were parts."""
    ticks = itertools.count()
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks) / 1e3)
    clock = StepClock(step_of(model), made_on(CPU).endless())
    clock()
    monkeypatch.undo()
    (parts,) = clock.samples
    assert list(in_order(parts)) == list(PARTS)
    assert sum(parts.values()) == pytest.approx(next(ticks) - 1)
    modules = clock.step.model.modules()
    attentions = sum(isinstance(of, (Attention, PointwiseAttention)) for of in modules)
    assert attentions == {"hstu": 3, "bst": 2, "sasrec": 2, "target_attention": 1}[model]
    for part in (ATTENTION, ATTENTION_BACKWARD):
        assert parts[part] == pytest.approx(attentions)


def test_a_step_that_is_not_looked_into_has_the_parts_that_it_tells() -> None:
    clock = StepClock(step_of("sasrec"), made_on(CPU).endless(), inside=False)
    clock()
    assert list(clock.samples[0]) == [DATA, HEAD, BACKWARD, UPDATE]


def test_the_typical_step_is_one_that_was_measured() -> None:
    steps = [{"a": float(n), "b": 1.0} for n in (9, 1, 5, 3)]
    assert typical(steps) == {"a": 3.0, "b": 1.0}
    assert typical(steps[:3]) == {"a": 5.0, "b": 1.0}


class SlowStep:
    """A step of three kernels, which the host issues in so many seconds each."""

    def __init__(self, gpu: FakeGpu, slowly: Iterator[float]) -> None:
        self.gpu, self.slowly, self.taken = gpu, slowly, 0

    def __call__(self, batch: float, ends: Callable[[str], object]) -> None:
        self.taken += 1
        seconds = next(self.slowly)
        for part, kernel in ((HEAD, batch), (BACKWARD, 2 * batch), (UPDATE, 1e-5)):
            self.gpu.issue(kernel)
            self.gpu.host += seconds
            ends(part)


@pytest.mark.parametrize("late", [False, True])
def test_parts_on_a_gpu_are_without_what_the_host_takes(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is known how long that is; a host that is late is given more time in a second try."""
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr("time.perf_counter", lambda: gpu.host)
    quick, slow = 1e-3, 1.8e-3
    step = SlowStep(gpu, iter([quick, slow if late else quick, *[quick] * 3]))

    def made() -> Iterator[float]:
        while True:
            gpu.issue(3e-5)
            yield 2e-5

    clock = StepClock.__new__(StepClock)
    clock.step, clock.batches, clock.inside = cast(Any, step), cast(Any, made()), False
    clock.device, clock.samples, clock._wait = CPU, [], None
    for _ in range(2):
        clock.samples.append(clock._on_a_gpu())
    expected = {DATA: 0.03, HEAD: 0.02, BACKWARD: 0.04, UPDATE: 0.01}
    assert clock.samples == [pytest.approx(expected)] * 2
    assert step.taken == (4 if late else 3)  # one to see how long the host takes


def test_the_average_of_the_weights_is_part_of_a_step() -> None:
    """And so is leaving no gradient, as in training."""
    step, batch = step_of("mean_pool"), made_on(CPU).each()[0]
    for _ in range(2):
        step(batch)
        kept = dict(step.average.model.named_parameters())
        moved = [n for n, p in step.model.named_parameters() if not torch.equal(p, kept[n])]
        assert bool(moved) == (step.steps > 1)  # it begins where the first step ends
        assert all(p.grad is None for p in step.model.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ATTENTIONS)
@pytest.mark.parametrize("model", MODELS)
def test_parts_on_a_gpu(model: str, kind: str) -> None:
    if model == "hstu" and kind not in ("jagged", "padded_dense"):
        pytest.skip("hstu's layers have no softmax")
    device = torch.device("cuda")
    clock = StepClock(step_of(model, device, attention=kind), made_on(device).endless())
    for _ in range(3):
        clock()
    for parts in clock.samples:
        assert set(parts) == set(PARTS)
        assert all(ms >= 0 for ms in parts.values())
        assert parts[ATTENTION] > 0
        assert parts[ATTENTION_BACKWARD] > 0
