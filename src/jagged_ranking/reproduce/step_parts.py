"""The device's time of a training step by its parts, which add up to the step.

A mark at the end of each part: on a GPU an event of the stream, on a CPU the clock. Marks stand
around modules by their hooks; around attention in the backward, too, where an identity in the graph
is reached when the gradient is. On a GPU the device is kept waiting until the host has issued the
whole step, as `measure.timing` does it: so parts are the device's alone, and what a step takes
beyond their sum in training is what the host kept the device waiting for.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from jagged_kernels import JaggedTensor
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.attention import Attention, PointwiseAttention
from jagged_ranking.reproduce.training_step import BACKWARD, FORWARD, UPDATE, TrainingStep

DATA, EMBEDDINGS, ATTENTION, ENCODER = "batch", "embeddings", "attention", "encoder, the rest"
ATTENTION_BACKWARD = "attention, backward"
# In the order of a step; `backward` is all of it but that of attention.
PARTS = (DATA, EMBEDDINGS, ATTENTION, ENCODER, FORWARD, ATTENTION_BACKWARD, BACKWARD, UPDATE)

# How long a GPU waits for the host: so many times as long as that took at first, and where it was
# late all the same so many times longer, in so many tries. Of more launches than fit in the
# device's queue the host is always late, and far enough ahead.
_HEAD_START, _MORE, _TRIES, _MOST_SECONDS = 1.5, 2.0, 2, 0.1
_CYCLES_A_SECOND = 2e9  # of a GPU at its highest clock; at a lower one the device waits longer

Ends = Callable[[str], object]


class StepClock:
    """A call that takes one step, the making of its batch included, and keeps what each part took.

    Args:
        step: what is measured; hooks stay in its model only while it is called.
        batches: that are made when they are asked for.
        inside: look into the forward and the backward, which a compiled model does not allow.
    """

    def __init__(
        self, step: TrainingStep, batches: Iterator[JaggedBatch], *, inside: bool = True
    ) -> None:
        self.step, self.batches, self.inside = step, batches, inside
        self.device = next(step.model.parameters()).device
        self.samples: list[dict[str, float]] = []  # ms by part, of each call
        self._wait: float | None = None

    def __call__(self) -> None:
        self.samples.append(self._on_a_gpu() if self.device.type == "cuda" else self._on_a_cpu())

    def _issue(self, ends: Ends) -> None:
        with _hooked(self.step.model, ends) if self.inside else _as_it_is():
            batch = next(self.batches)
            ends(DATA)
            self.step(batch, ends)

    def _on_a_cpu(self) -> dict[str, float]:
        marks = [("", time.perf_counter())]
        self._issue(lambda part: marks.append((part, time.perf_counter())))
        return _summed(marks, lambda begin, end: (end - begin) * 1e3)

    def _on_a_gpu(self) -> dict[str, float]:
        if self._wait is None:
            begun = time.perf_counter()
            self._marked(0.0)
            self._wait = min(_HEAD_START * (time.perf_counter() - begun), _MOST_SECONDS)
        marks: list[tuple[str, Any]] = []
        for tried in range(_TRIES):
            torch.cuda.synchronize(self.device)
            marks = self._marked(min(self._wait * _MORE**tried, _MOST_SECONDS))
            if not marks[0][1].query():  # the device waits still
                break
        torch.cuda.synchronize(self.device)
        return _summed(marks, lambda begin, end: begin.elapsed_time(end))

    def _marked(self, wait: float) -> list[tuple[str, Any]]:
        """Events at the ends of parts of a step, all issued, behind so many seconds of waiting."""
        marks: list[tuple[str, Any]] = []

        def mark(part: str) -> None:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            marks.append((part, event))

        with torch.cuda.device(self.device):
            torch.cuda._sleep(int(wait * _CYCLES_A_SECOND))
            mark("")
            self._issue(mark)
        return marks


def typical(samples: list[dict[str, float]]) -> dict[str, float]:
    """The parts of the step that took the median: they add up to it.

    Of an even number the lower of the two in the middle.
    """
    by_total = sorted(samples, key=lambda parts: sum(parts.values()))
    return by_total[(len(by_total) - 1) // 2]


def _summed(marks: list[tuple[str, Any]], elapsed: Callable[[Any, Any], float]) -> dict[str, float]:
    """ms by part, of marks at the end of each; a part may have several."""
    found: dict[str, float] = {}
    for (_, begin), (part, end) in itertools.pairwise(marks):
        found[part] = found.get(part, 0.0) + elapsed(begin, end)
    return found


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


@contextmanager
def _hooked(model: nn.Module, ends: Ends) -> Iterator[None]:
    """Marks around the embeddings, the encoder and its attention."""
    handles: list[RemovableHandle] = []

    def at_the_end(module: Any, part: str) -> None:
        handles.append(module.register_forward_hook(_ended(ends, part)))

    for name in ("embedding", "encoder"):
        at_the_end(getattr(model, name), EMBEDDINGS if name == "embedding" else ENCODER)
    for module in model.modules():
        if isinstance(module, (Attention, PointwiseAttention)):
            handles.append(module.register_forward_pre_hook(_attention_begins(ends)))
            handles.append(module.register_forward_hook(_attention_ends(ends)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _ended(ends: Ends, part: str) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        ends(part)

    return hook


def _attention_begins(ends: Ends) -> Callable[[nn.Module, tuple[JaggedTensor, ...]], Any]:
    def hook(module: nn.Module, given: tuple[JaggedTensor, ...]) -> tuple[JaggedTensor, ...]:
        values = _Mark.apply(ends, ATTENTION_BACKWARD, *(x.values for x in given))
        ends(ENCODER)
        return tuple(x.with_values(one) for x, one in zip(given, values, strict=True))

    return hook


def _attention_ends(ends: Ends) -> Callable[[nn.Module, Any, JaggedTensor], JaggedTensor]:
    def hook(module: nn.Module, given: Any, found: JaggedTensor) -> JaggedTensor:
        ends(ATTENTION)
        return found.with_values(_Mark.apply(ends, BACKWARD, found.values)[0])

    return hook


class _Mark(torch.autograd.Function):
    """The same tensors; in the backward, when all their gradients are there, a part has ended."""

    @staticmethod
    def forward(ctx: Any, ends: Ends, part: str, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.ends, ctx.part = ends, part
        ctx.set_materialize_grads(False)
        return tuple(value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.ends(ctx.part)
        return None, None, *gradients


def in_order(parts: Mapping[str, float]) -> dict[str, float]:
    """By `PARTS`."""
    return {part: parts[part] for part in PARTS if part in parts}
