"""`measure_attention`: every provider on every workload, checked, timed, weighed, as one table.

For each workload: one setup, every provider prepared from it, every provider's output and
gradients compared with a float32 reference, then timed in interleaved rounds; then each alone,
on a fresh setup, for its memory. A provider that is missing, wrong or too big becomes rows that
say so. What breaks the device itself (an illegal access) fails everything after it in the
process, visibly.
"""

import gc
import math
import os
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from jagged_ranking import provenance, results
from jagged_ranking.measure import memory, timing
from jagged_ranking.measure.ceilings import Ceilings, ceiling_rows, measure_ceilings
from jagged_ranking.measure.providers import (
    FORWARD,
    MODES,
    PROVIDERS,
    TRAINING,
    Prepared,
    Unavailable,
    default_providers,
)
from jagged_ranking.measure.reference import Errors, compare, reference, tolerance
from jagged_ranking.measure.timing import Effort
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
    """Measure providers of jagged self-attention side by side.

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

        op "attention": metrics "latency" (ms), "peak_memory" and "peak_memory_minus_inputs"
        (bytes), "useful_flops" (FLOP/s of the useful operations), "max_abs_error" and
        "rel_error" against float32;
        op "schedule" (ours) and "block_mask" (flex): what is built once a batch, outside of the
        attention's time;
        op "ceiling": bandwidth and arithmetic of the device in this run.
        `config` has the facts of the workload and `limit_ms`.

    Raises:
        ValueError: an unknown provider, mode or metric.
    """
    device = torch.device(device)
    _known("provider", providers or (), PROVIDERS)
    _known("mode", modes, MODES)
    _known("metric", metrics, METRICS)
    if not workloads:
        return results.frame([])
    with timing.threads(device, cpu_threads):
        name = provenance.device_name(device)
        if ceilings is None:
            ceilings = measure_ceilings(device, dtype=workloads[0].dtype)
        common = {"run_id": run_id, "run_key": run_key}
        config = {"device": name, "ceiling_dtype": ceilings.dtype}
        rows = ceiling_rows(ceilings, config=config, **common)
        bar = tqdm(total=len(workloads), disable=not progress, unit="workload")
        for workload in workloads:
            one = _Measurement(workload, device, name, ceilings, effort or Effort(), common, bar)
            chosen = providers
            if chosen is None:
                chosen = default_providers(device, group=workload.group)
            one.latency_and_errors(chosen, modes, timed="latency" in metrics)
            if "memory" in metrics:
                one.weigh(chosen, modes)
            rows += one.rows
            timing.release(device)
            bar.update()
        bar.close()
    return results.frame(rows)


def _known(kind: str, given: Sequence[str], known: Any) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"unknown {kind} {name!r}; known are {', '.join(known)}")


class _Measurement:
    """One workload; gathers rows."""

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        device_name: str,
        ceilings: Ceilings,
        effort: Effort,
        common: dict[str, Any],
        bar: tqdm,
    ) -> None:
        self.workload = workload
        self.device = device
        self.effort = effort
        self.ceilings = ceilings
        self.common = common
        self.bar = bar
        self.facts = {**workload.facts(), "device": device_name}
        if device.type == "cpu":
            self.facts["threads"] = torch.get_num_threads()
        self.configs: dict[str, dict[str, Any]] = {}
        self.failed: dict[tuple[str, str], tuple[str, str]] = {}
        self.rows: list[dict[str, Any]] = []

    def latency_and_errors(
        self, providers: Sequence[str], modes: Sequence[str], *, timed: bool
    ) -> None:
        """Check everybody, then time whoever was right."""
        batch = setup(self.workload, self.device)
        prepared: dict[str, Prepared] = {}
        for name in providers:
            self._tell(name, "prepare")
            if ready := self._prepare(name, batch, modes):
                prepared[name] = ready
        self._check(prepared, batch, modes)
        del batch
        if timed:
            for mode in modes:
                self._time(prepared, mode)
            self._time_builds(prepared)
            for name in providers:
                self._failure_rows(name, modes, {"latency": "ms"})

    def weigh(self, providers: Sequence[str], modes: Sequence[str]) -> None:
        """Each provider alone on the device, with nothing but its own inputs."""
        units = {"peak_memory": "bytes", "peak_memory_minus_inputs": "bytes"}
        # Every measurement collects garbage several times, and a compiler leaves millions of
        # objects to look through: set them aside.
        gc.collect()
        gc.freeze()
        for name in providers:
            for mode in modes:
                if (name, mode) in self.failed:
                    continue
                self._tell(name, f"memory, {mode}")
                try:
                    peak = self._peak(name, mode)
                except Exception as error:
                    self._fail(name, mode, error)
                    continue
                values = (peak.total, peak.beyond_inputs)
                for (metric, unit), value in zip(units.items(), values, strict=True):
                    self._row(name, mode, metric, unit, value=float(value))
            self._failure_rows(name, modes, units)
        gc.unfreeze()

    def _peak(self, name: str, mode: str) -> memory.Peak:
        timing.release(self.device)
        floor = memory.allocated(self.device)
        ready = PROVIDERS[name].prepare(setup(self.workload, self.device))
        inputs = (*ready.inputs, ready.grad_output, *ready.held)
        return memory.peak_memory(
            lambda: ready.run(mode), inputs=inputs, device=self.device, floor=floor
        )

    def _prepare(self, name: str, batch: Batch, modes: Sequence[str]) -> Prepared | None:
        provider = PROVIDERS[name]
        if self.workload.queries is not None and not provider.dense_queries:
            for mode in modes:
                self.failed[name, mode] = ("unsupported", f"{name} is not prepared for it here")
            return None
        free = _free_bytes(self.device)
        for mode in modes:
            need = provider.bytes_needed(self.workload, mode)
            if need > free:
                message = f"refused: needs at least {need / 1e9:.1f} GB, {free / 1e9:.1f} GB free"
                self.failed[name, mode] = ("out_of_memory", message)
        if all((name, mode) in self.failed for mode in modes):
            return None
        try:
            ready = provider.prepare(batch)
        except Exception as error:
            for mode in modes:
                self._fail(name, mode, error)
            return None
        self.configs[name] = dict(ready.config)
        return ready

    def _check(self, prepared: dict[str, Prepared], batch: Batch, modes: Sequence[str]) -> None:
        limit = tolerance(batch)
        for padding_attends in (False, True):
            names = [n for n in prepared if PROVIDERS[n].padding_attends == padding_attends]
            if not names:
                continue
            expected = reference(batch, padding_attends=padding_attends)
            wanted = (expected.out, expected.dq, expected.dk, expected.dv)
            for name in names:
                for mode in modes:
                    if (name, mode) in self.failed:
                        continue
                    self._tell(name, f"check, {mode}")
                    try:
                        errors = _errors(prepared[name], batch, wanted, mode)
                    except Exception as error:
                        self._fail(name, mode, error)
                        continue
                    self._judge(name, mode, errors, limit)
        timing.release(self.device)

    def _judge(self, name: str, mode: str, errors: Errors, limit: float) -> None:
        right = errors.relative <= limit  # False for NaN
        if not right:
            message = f"wrong: relative error {errors.relative:.3g}, allowed is {limit:.3g}"
            self.failed[name, mode] = ("error", message)
        if math.isnan(errors.relative):
            return
        for metric, value in (("max_abs_error", errors.max_abs), ("rel_error", errors.relative)):
            extra = {"allowed_rel_error": limit}
            self._row(name, mode, metric, "1", value=value, extra=extra)

    def _time(self, prepared: dict[str, Prepared], mode: str) -> None:
        ready = {n: p for n, p in prepared.items() if (n, mode) not in self.failed}
        calls = {name: (lambda p=p: p.run(mode)) for name, p in ready.items()}
        timings = timing.interleaved(
            calls,
            device=self.device,
            effort=self.effort,
            progress=lambda name: self._tell(name, mode),
        )
        flops = self.facts[f"flops_{mode}"]
        for name, timed in timings.items():
            if timed.failure:
                self._fail(name, mode, timed.failure)
                continue
            self._row(name, mode, "latency", "ms", samples=timed.samples)
            rates = [flops / (sample / 1e3) for sample in timed.samples]
            self._row(name, mode, "useful_flops", "FLOP/s", samples=rates)

    def _time_builds(self, prepared: dict[str, Prepared]) -> None:
        calls = {(n, op): call for n, p in prepared.items() for op, call in p.builds.items()}
        timings = timing.interleaved(
            {f"{name} {op}": call for (name, op), call in calls.items()},
            device=self.device,
            effort=self.effort,
            progress=lambda name: self._tell(name, "build"),
        )
        for (name, op), timed in zip(calls, timings.values(), strict=True):
            if timed.failure:
                status, message = _explain(timed.failure)
                options: dict[str, Any] = {"status": status, "message": message}
            else:
                options = {"samples": timed.samples}
            self._row(name, FORWARD, "latency", "ms", op=op, **options)

    def _failure_rows(self, name: str, modes: Sequence[str], units: dict[str, str]) -> None:
        for mode in modes:
            if (name, mode) in self.failed:
                status, message = self.failed[name, mode]
                for metric, unit in units.items():
                    self._row(name, mode, metric, unit, status=status, message=message)

    def _fail(self, name: str, mode: str, error: Exception) -> None:
        self.failed[name, mode] = _explain(error)
        del error
        timing.release(self.device)

    def _row(
        self,
        provider: str,
        mode: str,
        metric: str,
        unit: str,
        *,
        op: str = "attention",
        extra: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        config = {
            **self.facts,
            **self.configs.get(provider, {}),
            **(extra or {}),
            "limit_ms": self.ceilings.limit_ms(self.facts, mode),
        }
        self.rows.append(
            results.row(
                op=op,
                provider=provider,
                workload=self.workload.name,
                mode=mode,
                metric=metric,
                unit=unit,
                config=config,
                **options,
                **self.common,
            )
        )

    def _tell(self, provider: str, what: str) -> None:
        self.bar.set_postfix_str(f"{self.workload.name}: {provider}, {what}")


def _errors(ready: Prepared, batch: Batch, wanted: Sequence[torch.Tensor], mode: str) -> Errors:
    got = ready.compare_as(batch, mode)
    assert len(got) == (4 if mode == TRAINING else 1)
    return compare(list(zip(got, wanted, strict=False)))


def _explain(error: Exception) -> tuple[str, str]:
    """(status, one line) for whatever a provider raised."""
    if isinstance(error, Unavailable):
        return error.status, str(error)
    text = str(error).strip()
    first_line = text.splitlines()[0] if text else ""
    message = f"{type(error).__name__}: {first_line}"
    # Libraries below PyTorch report a full device as an ordinary RuntimeError.
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        sign in text.lower() for sign in ("out of memory", "can't allocate memory")
    ):
        return "out_of_memory", message
    # What SDPA says of padded and of nested tensors.
    no_kernel = "No available kernel" in text or "No viable backend" in text
    if isinstance(error, NotImplementedError) or no_kernel:
        return "unsupported", message
    return "error", message


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    # Half of what is free: a CPU that runs out of memory ends the process, or its neighbours.
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
