"""Several ways to take one training step, on the same batch, from the same weights.

All that begin with the same weights must give the same logits, and the same loss after a step,
before any is timed: what is wrong, missing or out of memory is a row that says so. All of a model
but its attention is jagged, whatever the kind of attention: so this is what padding costs there,
and no more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jagged_ranking import results
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.prefetch import tensors_of
from jagged_ranking.devices import device_name
from jagged_ranking.figures.throughput_points import GRAPH
from jagged_ranking.measure import timing
from jagged_ranking.measure.contest import CROWDED, explain
from jagged_ranking.measure.lineup import OURS
from jagged_ranking.measure.peak_memory import Peak, allocated, peak_memory, storage_bytes
from jagged_ranking.measure.reference import Errors, compare
from jagged_ranking.measure.timing import Effort
from jagged_ranking.reproduce.graphed_step import GraphedStep
from jagged_ranking.reproduce.training_step import TrainingStep
from jagged_ranking.training.config import TrainConfig

# Relative error against float32, beyond which who computes in bfloat16 is wrong: five roundings of
# it. Of logits, others than jagged attention may be off by as many times its own error, since far
# less than that bound shows an attention that is wrong. In float32, what tf32 needs.
LOWER_PRECISION_ERROR = 5 * torch.finfo(torch.bfloat16).eps
TIMES_OURS = 5
FLOAT32_ERROR = 1e-3
NO_CAPTURE = "the step cannot be captured"
NO_GPU = "CUDA graphs need a GPU"
PEAKS = ("peak_memory", "peak_memory_minus_inputs")
WALL = torch.device("cpu")  # whose clock is that of the wall, for what ends by waiting
EXACT = "exact"  # the mode of what all others are held against


@dataclass(frozen=True)
class Entry:
    """Who takes a step, as results call it."""

    provider: str
    mode: str


class StepContest:
    """Steps of one model on one batch.

    Args:
        op: of the rows.
        workload: of the rows.
        configs: who takes part; they differ in what they compute with, and not in what.
        shape: of the data.
        batch: of requests.
        facts: further ones, for the config of every row.
        longest: the most candidates and events of a request, of all batches that steps are taken
            on: a graph is of them all, and who pads there pads to that. By default of the batch.
        run_id: for the column `id`.
    """

    def __init__(
        self,
        *,
        op: str,
        workload: str,
        configs: Mapping[Entry, TrainConfig],
        shape: DataShape,
        batch: JaggedBatch,
        facts: Mapping[str, Any],
        longest: tuple[int, int] | None = None,
        run_id: str = "",
    ) -> None:
        self.configs, self.shape, self.batch = dict(configs), shape, batch
        self.longest = longest or batch.longest
        self.device = batch.user.device
        self._named: dict[str, Any] = {"op": op, "workload": workload, "run_id": run_id}
        self.failed: dict[Entry, tuple[str, str]] = {}
        self._checked: set[Entry] = set()  # who could do it alone
        self.found: list[dict[str, Any]] = []
        self.facts = {**facts, **facts_of([batch])}

    def check(self) -> None:
        """Rows of how far everybody's logits, and losses after a step, are from those of jagged
        attention in float32; who is wrong has failed."""
        if not self.configs:
            return
        exact = dataclasses.replace(
            next(iter(self.configs.values())), attention=OURS, precision="float32", compile="off"
        )
        try:
            logits, loss = self._answers(Entry(OURS, EXACT), exact)
        except Exception as error:  # nobody can be held against it
            for entry in self.configs:
                self.fail(entry, error)
            return
        ours: float | None = None
        for entry in sorted(self.configs, key=lambda entry: entry.provider != OURS):
            if entry in self.failed:
                continue
            config = self.configs[entry]
            lower = self.device.type == "cuda" and config.precision != "float32"
            bound = LOWER_PRECISION_ERROR if lower else FLOAT32_ERROR
            answers = self.tried(entry, lambda e=entry, c=config: self._answers(e, c))
            if entry.mode == GRAPH:  # which keeps all memory of its step
                timing.release(self.device)
            if answers is None:
                continue
            self._checked.add(entry)
            error = compare([(answers[0], logits)])
            allowed = bound
            if entry.provider == OURS:
                ours = max(ours or 0.0, error.relative)
            elif ours is not None:
                allowed = min(bound, max(FLOAT32_ERROR, TIMES_OURS * ours))
            self._judge(entry, "rel_error", error, allowed)
            if answers[1] is not None and loss is not None and entry not in self.failed:
                self._judge(entry, "loss_rel_error", compare([(answers[1], loss)]), bound)

    def _answers(self, entry: Entry, config: TrainConfig) -> tuple[Tensor, Tensor | None]:
        """Logits, and the loss after a step; of what is compiled the former alone, since every
        graph more is compiled for a long time."""
        step = self.step_of(config, entry.mode)
        logits = step.logits(self.batch)
        return logits, None if config.backend else step.loss_after_a_step(self.batch)

    def _judge(self, entry: Entry, metric: str, error: Errors, allowed: float) -> None:
        if not error.relative <= allowed:  # NaN too
            said = f"wrong: {metric} {error.relative:.3g}, allowed is {allowed:.3g}"
            self.failed[entry] = ("error", said)
        elif np.isfinite(error.relative):
            extra = {"allowed_rel_error": allowed}
            self.row(entry, metric, "1", value=error.relative, extra=extra)

    def ready(self) -> dict[Entry, TrainingStep]:
        """The steps of all who have not failed."""
        found: dict[Entry, TrainingStep] = {}
        for entry, config in self.configs.items():
            if entry not in self.failed:
                step = self.tried(entry, lambda c=config, m=entry.mode: self.step_of(c, m))
                if step is not None:
                    found[entry] = step
        return found

    def step_of(self, config: TrainConfig, mode: str = "") -> TrainingStep:
        """A step from the first weights; of the mode `GRAPH` one that is captured."""
        if mode == GRAPH:
            return GraphedStep(config, self.shape, self.device, longest=self.longest)
        return TrainingStep(config, self.shape, self.device)

    def interleaved(
        self,
        calls: Mapping[Entry, Callable[[], object]],
        effort: Effort,
        device: torch.device,
    ) -> dict[Entry, list[float]]:
        """ms of calls of all who have not failed, by the clock of a device, or of the `WALL`."""
        left = {f"{e.provider}, {e.mode}": e for e in calls if e not in self.failed}
        timed = timing.interleaved(
            {name: calls[entry] for name, entry in left.items()}, device=device, effort=effort
        )
        for name, one in timed.items():
            if one.failure:
                self.fail(left[name], one.failure)
        return {left[name]: one.samples for name, one in timed.items() if not one.failure}

    def weigh(self, entries: Iterable[Entry]) -> None:
        """Rows of the peak memory of each of these, alone on the device, who has not failed; or ran
        out of memory after its check, when others held some: whoever can be weighed has failed for
        want of room, and not because of what it needs."""
        for entry in entries:
            status, _ = self.failed.get(entry, ("ok", ""))
            crowded = status == "out_of_memory" and entry in self._checked
            if status != "ok" and not crowded:
                continue
            peak = self.tried(entry, lambda e=entry: self._peak(e))
            if peak is not None:
                if crowded:
                    self.failed[entry] = ("unsupported", CROWDED)
                for metric, value in zip(PEAKS, (peak.total, peak.beyond_inputs), strict=True):
                    self.row(entry, metric, "bytes", value=float(value))

    def _peak(self, entry: Entry) -> Peak:
        timing.release(self.device)
        # the batch counts, the data set that it was cut out of does not
        floor = allocated(self.device) - storage_bytes(tensors_of(self.batch))
        step = self.step_of(self.configs[entry])
        step(self.batch)  # the optimiser makes its state in the first
        inputs = [*step.tensors(), *tensors_of(self.batch)]
        return peak_memory(lambda: step(self.batch), inputs=inputs, device=self.device, floor=floor)

    def tried(self, entry: Entry, call: Callable[[], Any]) -> Any:
        """What a call returns; None if it raises, of which the entry has failed."""
        try:
            return call()
        except Exception as error:
            self.fail(entry, error)
            return None

    def fail(self, entry: Entry, error: Exception) -> None:
        """Remember what an entry raised."""
        status, message = explain(error)
        # What the seam itself says that a kind cannot do here, and `StepGraphs` of a step.
        kind = self.configs[entry].attention
        cannot = isinstance(error, ValueError) and str(error).startswith(f"attention {kind} ")
        cannot = cannot or (status == "error" and str(error).startswith(NO_CAPTURE))
        if cannot:
            status, message = "unsupported", str(error)
        # Nobody who is captured is weighed, see `weigh`.
        if status == "out_of_memory" and entry.mode == GRAPH and entry in self._checked:
            status, message = "unsupported", CROWDED
        self.failed[entry] = (status, message)
        timing.release(self.device)

    def say_failures(self, metrics: Mapping[str, str]) -> None:
        """A row for each metric (its unit behind it) that an entry has none of, because it
        failed."""
        for entry, (status, message) in self.failed.items():
            told = {
                row["metric"]
                for row in self.found
                if (row["provider"], row["mode"]) == (entry.provider, entry.mode)
            }
            for metric, unit in metrics.items():
                if metric not in told:
                    self.row(entry, metric, unit, status=status, message=message)

    def say_graphs_need_a_gpu(self, captured: Mapping[Entry, TrainConfig], metric: str) -> None:
        """A row of the metric, in ms, for each of those who would be captured."""
        self.configs |= captured
        for entry in captured:
            self.row(entry, metric, "ms", status="unsupported", message=NO_GPU)

    def row(
        self,
        entry: Entry,
        metric: str,
        unit: str,
        *,
        op: str | None = None,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """One row of results."""
        config = {**self.configs[entry].to_dict(), **self.facts, **(extra or {})}
        self.found.append(
            results.row(
                **{**self._named, "op": op or self._named["op"]},
                provider=entry.provider,
                mode=entry.mode,
                metric=metric,
                unit=unit,
                config=config,
                **options,
            )
        )


def longest_of(batches: Sequence[JaggedBatch]) -> tuple[int, int]:
    """The most candidates and the most events of a request of any of these."""
    asked, seen = (max(most) for most in zip(*(one.longest for one in batches), strict=True))
    return asked, seen


def on_device(
    configs: Mapping[Entry, TrainConfig], device: torch.device
) -> tuple[dict[Entry, TrainConfig], dict[Entry, TrainConfig]]:
    """(who can take part on the device, who needs a GPU for it)."""
    cuda = device.type == "cuda"
    need = {entry: one for entry, one in configs.items() if entry.mode == GRAPH and not cuda}
    return {entry: one for entry, one in configs.items() if entry not in need}, need


def facts_of(batches: Sequence[JaggedBatch]) -> dict[str, Any]:
    """What batches hold, on average, and where they are."""
    device = batches[0].user.device
    padded = sum(len(batch) * max(1, batch.longest[1]) for batch in batches)
    tokens = sum(int(batch.events.sum()) for batch in batches)
    facts: dict[str, Any] = {
        "B": round(float(np.mean([len(batch) for batch in batches]))),
        "tokens": round(tokens / len(batches)),
        "candidates": round(float(np.mean([batch.asked.sum() for batch in batches]))),
        "waste": 1 - tokens / max(1, padded),
        "device": device_name(device),
    }
    if device.type == "cpu":
        facts["threads"] = torch.get_num_threads()
    return facts
