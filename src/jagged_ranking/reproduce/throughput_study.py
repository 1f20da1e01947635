"""What a whole training step costs by each kind of attention: samples a second, where the time
goes, memory and energy.

A step is what the trainer does, the making of its batch included: made beside the step before, as
there. Who takes part begins with the same weights and is checked before anything is timed, and all
take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from click_data import history_lengths
from jagged_ranking import paths, results
from jagged_ranking.data.prefetch import beside_the_step
from jagged_ranking.figures.throughput_points import COMPILED, DATA, EAGER, GRAPH, PART, STEP
from jagged_ranking.measure import timing
from jagged_ranking.measure.contest import explain
from jagged_ranking.measure.timing import Effort
from jagged_ranking.models.model_config import has_self_attention
from jagged_ranking.reproduce.cache import cached
from jagged_ranking.reproduce.click_logs import find_histories
from jagged_ranking.reproduce.energy import energy_of
from jagged_ranking.reproduce.graphed_step import GraphedStep
from jagged_ranking.reproduce.request_batches import (
    BatchLengths,
    RequestBatches,
    described,
    of_cap,
    of_log,
    of_waste,
)
from jagged_ranking.reproduce.step_contest import (
    PEAKS,
    WALL,
    Entry,
    StepContest,
    facts_of,
    longest_of,
    on_device,
)
from jagged_ranking.reproduce.step_parts import StepClock, in_order, typical
from jagged_ranking.reproduce.training_step import TrainingStep
from jagged_ranking.training.config import TrainConfig

_UNITS = {
    "step_time": "ms",
    "samples_per_second": "1/s",
    "device_time": "ms",
    "host_share": "1",
    "energy": "J",
    **dict.fromkeys(PEAKS, "bytes"),
}


def throughput_batches(
    *,
    wastes: Sequence[float],
    caps: Sequence[int],
    at_cap: int,
    histories: Sequence[str],
    batch_tokens: int,
    batches: int,
    seed: int,
) -> list[BatchLengths]:
    """Lengths of what steps are measured on.

    Args:
        wastes: padding wastes, each at the cap `at_cap`.
        caps: history caps, each with lognormal lengths.
        at_cap: the cap of `wastes` and of real histories.
        histories: data sets whose real lengths are taken, see `find_histories`; one that is not
            at hand is left out, and that is said.
        batch_tokens: events in a batch, about: so a step costs as much without padding whatever the
            lengths are.
        batches: different ones that take turns.
        seed: of all lengths.

    Raises:
        ValueError: a count below 1, a waste that no lengths have, or no batch at all.
    """
    for name, least in (("at_cap", at_cap), ("batch_tokens", batch_tokens), ("batches", batches)):
        if least < 1:
            raise ValueError(f"{name} must be at least 1, got {least}")
    for cap in caps:
        if cap < 1:
            raise ValueError(f"caps must be at least 1, got {cap}")
    drawn: dict[str, Any] = {"tokens": batch_tokens, "batches": batches, "seed": seed}
    found = [of_waste(waste, cap=at_cap, **drawn) for waste in wastes]
    found += [of_cap(cap, **drawn) for cap in caps]
    for name in histories:
        if (place := find_histories(name)) is not None:
            found.append(of_log(place.stem, history_lengths(place), cap=at_cap, **drawn))
        else:
            print(f"no {name} in {paths.DATA}: its histories are not measured")
    if not found:
        raise ValueError("no batch to measure: nothing in any of wastes, caps, histories")
    return found


def describe_lengths(found: Sequence[BatchLengths]) -> pd.DataFrame:
    """A table of what the batches hold."""
    return pd.DataFrame(described(found)).set_index("batch")


def measured_throughput(
    batches: Sequence[BatchLengths],
    *,
    models: Sequence[str],
    layers: Sequence[int],
    compiled: Sequence[str],
    compiled_attentions: Sequence[str],
    **common: Any,
) -> pd.DataFrame:
    """`throughput` of each model on each batch, each kept in `build/cache` as soon as it is done.

    Args:
        batches: see `throughput_batches`.
        models: names of rankers.
        layers: numbers of layers, on batches of given waste; on all others the first alone. A model
            whose events do not attend to one another has one layer.
        compiled: of the models those whose steps are measured through `torch.compile`, too: with
            the first number of layers, on the last batch of given waste.
        compiled_attentions: by these kinds of attention.
        common: see `throughput`.

    Raises:
        ValueError: an option, a model or a kind that there is not, or no number of layers; before
            anything is measured.
    """
    if not layers or not models:
        raise ValueError("there must be at least one model and one number of layers")
    by_waste = [one for one in batches if one.group == "waste"]
    cells: list[tuple[BatchLengths, dict[str, Any]]] = []
    for model in models:
        deep = has_self_attention(model)
        for one in batches:
            depths = (layers if one.group == "waste" else layers[:1]) if deep else (1,)
            for depth in depths:
                graphs = model in compiled and one in by_waste[-1:] and depth == depths[0]
                cell: dict[str, Any] = {"models": [model], "layers": depth}
                cell["compiled_attentions"] = [*compiled_attentions] if graphs else []
                cells.append((one, {**common, **cell}))
    for one, given in cells:
        _configs(one, **given)
    tables = []
    for number, (one, given) in enumerate(cells, 1):
        said = f"{one.name}, {given['models'][0]}, layers {given['layers']}"
        print(f"{number} of {len(cells)}, {said}", end=": ")
        tables.append(cached(throughput, one, **given))
    return pd.concat(tables, ignore_index=True)


def throughput(
    lengths: BatchLengths,
    *,
    models: Sequence[str],
    layers: int,
    attentions: Sequence[str],
    compiled_attentions: Sequence[str] = (),
    graphed_attentions: Sequence[str] = (),
    compiler: str = "inductor",
    options: Mapping[str, Any],
    items: int,
    candidates: int,
    effort: Effort,
    energy_seconds: float,
    device: str,
    seed: int = 0,
    cpu_threads: int = 1,
    run_id: str = "",
) -> pd.DataFrame:
    """Measure steps of one model on batches of these lengths, each batch in turn.

    Args:
        lengths: of histories.
        models: the one model.
        layers: of it.
        attentions: kinds of attention, see `ModelConfig.attention`.
        compiled_attentions: those that are measured through `torch.compile`, too.
        graphed_attentions: those that are also measured as CUDA graphs, each captured for batches
            of about the same size (`GraphedStep`). A graph keeps all memory that its step needs.
        compiler: its backend, see `TrainConfig.compile`.
        options: further ones of `TrainConfig`.
        items: that there are.
        candidates: of each request.
        effort: see `Effort`; a call is a step on every batch.
        energy_seconds: for which steps are repeated to tell the energy that they take.
        device: "cuda" or "cpu".
        seed: of weights and batches.
        cpu_threads: on a CPU.
        run_id: for the column `id`.

    Returns:
        Rows of op `STEP`, the provider being the kind of attention, the mode "eager",
        "torch.compile" or "CUDA graph", the workload the name of the lengths. Metrics:
        "step_time" (ms; of the wall, the making of batches beside the steps included),
        "samples_per_second" (requests), "device_time" (ms; of the device, without waiting for the
        host, the making of the batch in front of the step), "host_share" (of the step's time that
        in which the device is at no part of it but the batch, made beside the step before: what
        waits for the host, at most; on a GPU), "energy" (J a request; on a GPU), "peak_memory" and
        "peak_memory_minus_inputs" (bytes; of eager steps on the first batch), "rel_error" and
        "loss_rel_error" (see `StepContest.check`).
        Rows of op `PART`, the metric being the part (see `step_parts`): ms of the device in the
        median step; they add up to it.
    """
    where = torch.device(device)
    with timing.threads(where, cpu_threads), timing.earlier_objects_apart():
        made = RequestBatches(lengths, items=items, candidates=candidates, device=where, seed=seed)
        every = made.each()
        asked = _configs(
            lengths,
            models=models,
            layers=layers,
            attentions=attentions,
            compiled_attentions=compiled_attentions,
            graphed_attentions=graphed_attentions,
            compiler=compiler,
            options=options,
            seed=seed,
        )
        configs, need_a_gpu = on_device(asked, where)
        contest = StepContest(
            op=STEP,
            workload=lengths.name,
            configs=configs,
            shape=made.shape,
            batch=every[0],
            facts={"cap": lengths.cap, "group": lengths.group, "items": items},
            longest=longest_of(every),
            run_id=run_id,
        )
        contest.facts |= facts_of(every)
        steps = len(every)
        del every
        if compiled_attentions:  # what other cells compiled counts against a limit of the compiler
            torch.compiler.reset()
        contest.check()
        _Measurement(contest, made, steps, effort, energy_seconds).all()
        contest.weigh([entry for entry in contest.configs if entry.mode == EAGER])
        contest.say_failures(_UNITS)
        contest.say_graphs_need_a_gpu(need_a_gpu, "step_time")
        timing.release(where)
    return results.frame(contest.found)


def _configs(
    lengths: BatchLengths,
    *,
    models: Sequence[str],
    layers: int,
    attentions: Sequence[str],
    compiled_attentions: Sequence[str],
    graphed_attentions: Sequence[str] = (),
    compiler: str = "inductor",
    options: Mapping[str, Any],
    seed: int = 0,
    **others: Any,
) -> dict[Entry, TrainConfig]:
    """Who takes part; `others` are not theirs."""
    if not (attentions or compiled_attentions or graphed_attentions):
        raise ValueError("there must be at least one kind of attention")
    (model,) = models
    given = {**options, "model": model, "layers": layers, "max_history": lengths.cap, "seed": seed}
    asked = [(EAGER, "off", kind) for kind in attentions]
    asked += [(COMPILED, compiler, kind) for kind in compiled_attentions]
    asked += [(GRAPH, "off", kind) for kind in graphed_attentions]
    return {
        Entry(kind, mode): TrainConfig.from_dict({**given, "attention": kind, "compile": by})
        for mode, by, kind in asked
    }


class _Run:
    """A call that takes a step on every batch, each made beside the step before, and waits."""

    def __init__(self, step: TrainingStep, made: RequestBatches, steps: int) -> None:
        self.step, self.steps, self.device = step, steps, made.device
        self.batches: Any = beside_the_step(made.endless(), made.device)

    def __call__(self) -> None:
        for _ in range(self.steps):
            self.step(next(self.batches))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Measurement:
    """Everybody's time, parts and energy."""

    def __init__(
        self,
        contest: StepContest,
        made: RequestBatches,
        steps: int,
        effort: Effort,
        energy_seconds: float,
    ) -> None:
        self.contest, self.made, self.steps = contest, made, steps
        self.effort, self.energy_seconds = effort, energy_seconds
        self.requests = contest.facts["B"]
        self.step_ms: dict[Entry, float] = {}

    def all(self) -> None:
        """Rows of all who have not failed."""
        ready = self.contest.ready()
        for entry, step in ready.items():
            if isinstance(step, GraphedStep):
                self.contest.tried(entry, lambda s=step: s.capture(self.made.each()))
        ready = {entry: step for entry, step in ready.items() if entry not in self.contest.failed}
        with ExitStack() as stack:
            runs: dict[Entry, Callable[[], object]] = {}
            for entry, step in ready.items():
                runs[entry] = run = _Run(step, self.made, self.steps)
                stack.enter_context(closing(run.batches))
            self._times(runs)
            clocks = {
                entry: StepClock(step, self.made.endless(), inside=entry.mode == EAGER)
                for entry, step in ready.items()
            }
            self._parts(clocks)
            for entry, run in runs.items():
                if entry not in self.contest.failed:
                    self._energy(entry, run)

    def _times(self, runs: Mapping[Entry, Callable[[], object]]) -> None:
        for entry, samples in self.contest.interleaved(runs, self.effort, WALL).items():
            steps = [ms / self.steps for ms in samples]
            rates = [self.requests / ms * 1e3 for ms in steps]
            self.step_ms[entry] = float(np.median(steps))
            self.contest.row(entry, "step_time", "ms", samples=steps)
            self.contest.row(entry, "samples_per_second", "1/s", samples=rates)

    def _parts(self, clocks: Mapping[Entry, StepClock]) -> None:
        # a step where a run takes several
        effort = replace(self.effort, inner=self.effort.inner * self.steps)
        for entry, samples in self.contest.interleaved(clocks, effort, WALL).items():
            found = clocks[entry].samples[-len(samples) :]
            totals = [sum(parts.values()) for parts in found]
            own = float(np.median([sum(parts.values()) - parts[DATA] for parts in found]))
            self.contest.row(entry, "device_time", "ms", samples=totals)
            if entry.mode == EAGER:
                for part, ms in in_order(typical(found)).items():
                    self.contest.row(entry, part, "ms", op=PART, value=ms)
            if self.contest.device.type == "cuda":
                share = max(0.0, 1 - own / self.step_ms[entry])
                self.contest.row(entry, "host_share", "1", value=share)
            else:
                said = "a CPU is its own host"
                self.contest.row(entry, "host_share", "1", status="unsupported", message=said)

    def _energy(self, entry: Entry, run: Callable[[], object]) -> None:
        try:
            found = energy_of(run, device=self.contest.device, seconds=self.energy_seconds)
        except Exception as error:  # of NVML too, which costs nobody the other numbers
            status, message = explain(error)
            self.contest.row(entry, "energy", "J", status=status, message=message)
            return
        joules = found.joules / (found.calls * self.steps * self.requests)
        self.contest.row(entry, "energy", "J", value=joules, extra={"means": found.means})
