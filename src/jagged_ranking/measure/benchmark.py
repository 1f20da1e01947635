"""`measure_attention`: every provider on every workload, checked, timed, weighed, as one table.

For each workload: one setup, every provider prepared from it, every provider's output and
gradients compared with a float32 reference, then timed in interleaved rounds; then each alone,
on a fresh setup, for its memory. A provider that is missing, wrong or too big becomes rows that
say so. What breaks the device itself (an illegal access) fails everything after it in the
process, visibly.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm import tqdm

from jagged_ranking import results
from jagged_ranking.measure import timing
from jagged_ranking.measure.ceilings import Ceilings
from jagged_ranking.measure.contest import Contest, Run, known
from jagged_ranking.measure.gathering import gathering
from jagged_ranking.measure.lineup import default_providers
from jagged_ranking.measure.providers import (
    MODES,
    PROVIDERS,
    TRAINING,
    Prepared,
    Provider,
)
from jagged_ranking.measure.reference import Errors, compare, reference, tolerance
from jagged_ranking.measure.timing import Effort
from jagged_ranking.measure.trial import TRIALS
from jagged_ranking.measure.workloads import Batch, Workload, setup

METRICS = ("latency", "memory")


def measure_attention(
    workloads: Sequence[Workload],
    *,
    providers: Sequence[str] | None = None,
    modes: Sequence[str] = MODES,
    metrics: Sequence[str] = METRICS,
    device: torch.device | str = "cpu",
    effort: Effort | None = None,
    ceilings: Ceilings | None = None,
    run_id: str = "",
    run_key: str = "",
    cpu_threads: int = 1,
    progress: bool = True,
) -> pd.DataFrame:
    """Measure providers of attention over jagged batches side by side.

    Args:
        workloads: see `jagged_ranking.measure.workloads`.
        providers: names in `PROVIDERS`; by default those that make sense on the device, fewer on
            the many points of a sweep (see `default_providers`).
        modes: "forward" (without autograd) and "forward+backward" (gradients of q, k and v).
        metrics: "latency" and "memory".
        device: "cpu" or a CUDA device.
        effort: rounds, repetitions and the budget in seconds.
        ceilings: of the device, to state the limit of each workload; measured when None.
        run_id: for the column `id`, e.g. "01_speed".
        run_key: for the column `run_key`.
        cpu_threads: on a CPU. With one, times say what the work costs; with as many as there are
            cores, whoever waits for a busy core waits in the middle of a parallel loop, and times
            of a millisecond become hundreds.
        progress: show a bar.

    Returns:
        A DataFrame in the form of `jagged_ranking.results`:

        op "attention", or one of `lineup.HSTU_OPS`: metrics "latency" (ms; on a GPU the device's
        time), "host_time" (ms that the call keeps the host; on a GPU only), "peak_memory" and
        "peak_memory_minus_inputs" (bytes), "useful_flops" (FLOP/s of the useful operations),
        "max_abs_error" and "rel_error" against float32;
        op "schedule" (ours) and "block_mask" (flex): what is built once a batch, outside of the
        attention's time;
        op "ceiling": bandwidth and arithmetic of the device in this run.
        `config` has the facts of the workload and `limit_ms`.

    Raises:
        ValueError: an unknown provider, mode or metric.
    """
    device = torch.device(device)
    known("provider", providers or (), PROVIDERS)
    known("mode", modes, MODES)
    known("metric", metrics, METRICS)
    if not workloads:
        return results.frame([])
    with gathering(
        device,
        workloads[0].dtype,
        effort=effort,
        ceilings=ceilings,
        run_id=run_id,
        run_key=run_key,
        cpu_threads=cpu_threads,
    ) as gathered:
        bar = tqdm(total=len(workloads), disable=not progress, unit="workload")
        for workload in workloads:
            one = _Measurement(
                workload,
                op=workload.op,
                workload=workload.name,
                facts={**workload.facts(), "device": gathered.device_name},
                tell=bar.set_postfix_str,
                **gathered.options,
            )
            chosen = providers
            if chosen is None:
                hstu = workload.hstu is not None
                chosen = default_providers(device.type, group=workload.group, hstu=hstu)
            one.latency_and_errors(chosen, modes, timed="latency" in metrics)
            if "memory" in metrics:
                one.weigh(chosen, modes, one.alone)
            gathered.rows.extend(one.rows)
            timing.release(device)
            bar.update()
        bar.close()
    return gathered.table()


BREAKABLE = ("cuda",)  # types of devices that refuse a process everything after an error


class _Measurement(Contest):
    """Attention on one workload."""

    def __init__(self, batch: Workload, **options: Any) -> None:
        super().__init__(**options)
        self.workload = batch

    def latency_and_errors(
        self, providers: Sequence[str], modes: Sequence[str], *, timed: bool
    ) -> None:
        """Check everybody, then time whoever was right."""
        self._check_and_time(providers, modes, timed=timed)
        self.ask_alone(
            # whoever may break the device has been asked in a process of its own
            [name for name in providers if not PROVIDERS[name].tried_apart],
            modes,
            self.alone,
            lambda name, mode: PROVIDERS[name].bytes_needed(self.workload, mode),
        )
        for name in providers if timed else ():
            self.failure_rows(name, modes, {"latency": "ms"})

    def _check_and_time(
        self, providers: Sequence[str], modes: Sequence[str], *, timed: bool
    ) -> None:
        batch = setup(self.workload, self.device)
        prepared: dict[str, Prepared] = {}
        for name in providers:
            if ready := self._prepare(name, batch, modes):
                prepared[name] = ready
        self._check(prepared, batch, modes)
        del batch
        if timed:
            for mode in modes:
                self._time(prepared, mode)
            self.time_builds(
                {(n, op): call for n, p in prepared.items() for op, call in p.builds.items()}
            )

    def alone(self, name: str) -> tuple[Run, list[Tensor]]:
        """A provider with nothing but its own inputs, for its memory."""
        ready = PROVIDERS[name].prepare(setup(self.workload, self.device))
        return ready.run, [*ready.inputs, *ready.learned, ready.grad_output, *ready.held]

    def _prepare(self, name: str, batch: Batch, modes: Sequence[str]) -> Prepared | None:
        provider = PROVIDERS[name]
        if not provider.takes(self.workload):
            for mode in modes:
                self.failed[name, mode] = ("unsupported", f"{name} is not prepared for it here")
            return None
        for mode in modes:
            self.refuse(name, mode, provider.bytes_needed(self.workload, mode))
        if provider.forward_only and TRAINING in modes:
            self.failed[name, TRAINING] = ("unsupported", f"{name} has no gradient")
        if provider.tried_apart and self.device.type in BREAKABLE:
            self._try_apart(name, modes)
        return self.prepare(name, modes, lambda: provider.prepare(batch))

    def _try_apart(self, name: str, modes: Sequence[str]) -> None:
        for mode in modes:
            if (name, mode) not in self.failed:
                self.tell(name, f"{mode}, apart")
                failure = TRIALS.failure(PROVIDERS[name], self.workload, mode, self.device)
                if failure is not None:
                    self.failed[name, mode] = failure

    def _check(self, prepared: dict[str, Prepared], batch: Batch, modes: Sequence[str]) -> None:
        limit = tolerance(batch)
        for what in dict.fromkeys(_compared_with(PROVIDERS[name]) for name in prepared):
            names = [n for n in prepared if _compared_with(PROVIDERS[n]) == what]
            padding_attends, softmax = what
            expected = reference(batch, padding_attends=padding_attends, softmax=softmax)
            wanted = expected.parts()
            for name in names:
                errors = partial(_errors, prepared[name], batch, wanted)
                self.check(name, modes, errors, limit)
        timing.release(self.device)

    def _time(self, prepared: dict[str, Prepared], mode: str) -> None:
        flops = self.facts[f"flops_{mode}"]
        for name, samples in self.time({n: p.run for n, p in prepared.items()}, mode).items():
            rates = [flops / (sample / 1e3) for sample in samples]
            self.row(name, mode, "useful_flops", "FLOP/s", samples=rates)


def _compared_with(provider: Provider) -> tuple[bool, bool]:
    """The options `padding_attends` and `softmax` of its `reference`."""
    return provider.padding_attends, provider.softmax_instead


def _errors(ready: Prepared, batch: Batch, wanted: Sequence[torch.Tensor], mode: str) -> Errors:
    got = ready.compare_as(batch, mode)
    assert len(got) == (len(wanted) if mode == TRAINING else 1)
    return compare(list(zip(got, wanted, strict=False)))
