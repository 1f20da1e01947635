"""What every comparison of providers shares: rows, failures, interleaved time, memory apart.

One contest is one operation on one batch. A provider that is missing, wrong or too big becomes
rows that say so, and is not measured further.
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_ranking import results
from jagged_ranking.first_line import described
from jagged_ranking.measure import timing
from jagged_ranking.measure.ceilings import Ceilings
from jagged_ranking.measure.peak_memory import Peak, allocated, peak_memory
from jagged_ranking.measure.providers.base import FORWARD, Prepared, Unavailable
from jagged_ranking.measure.reference import Errors
from jagged_ranking.measure.timing import Effort, Timing

Run = Callable[[str], object]  # does the work of a mode once
PEAKS = {"peak_memory": "bytes", "peak_memory_minus_inputs": "bytes"}
# Of whoever ran out of memory that others held, and so is not said to need too much.
CROWDED = "runs alone, but has no room beside what it is compared with here"


class Contest:
    """Gathers rows.

    Args:
        op: the operation.
        workload: the name of the batch.
        facts: of the operation on this batch; `bytes_<mode>` and `flops_<mode>` make its limit.
        device: where it runs.
        effort: how much is timed.
        ceilings: of the device.
        common: further columns of all rows.
        tell: hears what is being done.
    """

    def __init__(
        self,
        *,
        op: str,
        workload: str,
        facts: Mapping[str, Any],
        device: torch.device,
        effort: Effort,
        ceilings: Ceilings,
        common: Mapping[str, Any],
        tell: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.op = op
        self.name = workload
        self.device = device
        self.effort = effort
        self.ceilings = ceilings
        self.common = common
        self.facts = dict(facts)
        if device.type == "cpu":
            self.facts["threads"] = torch.get_num_threads()
        self.configs: dict[str, dict[str, Any]] = {}
        self.failed: dict[tuple[str, str], tuple[str, str]] = {}
        self.rows: list[dict[str, Any]] = []
        self._hears = tell

    def refuse(self, provider: str, mode: str, need: int) -> None:
        """Fails the provider if it needs more bytes than are free."""
        free = free_bytes(self.device)
        if need > free:
            message = f"refused: needs at least {need / 1e9:.1f} GB, {free / 1e9:.1f} GB free"
            self.failed[provider, mode] = ("out_of_memory", message)

    def prepare(
        self, provider: str, modes: Sequence[str], make: Callable[[], Prepared]
    ) -> Prepared | None:
        """What `make` makes for a provider; None where it has failed in all modes, or does now."""
        if all((provider, mode) in self.failed for mode in modes):
            return None
        self.tell(provider, "prepare")
        try:
            ready = make()
        except Exception as error:
            for mode in modes:
                self.fail(provider, mode, error)
            return None
        self.configs[provider] = dict(ready.config)
        return ready

    def check(
        self, provider: str, modes: Sequence[str], errors: Callable[[str], Errors], limit: float
    ) -> None:
        """Judges each mode that the provider has not failed in by the `errors` of its results."""
        for mode in modes:
            if (provider, mode) in self.failed:
                continue
            self.tell(provider, f"check, {mode}")
            try:
                found = errors(mode)
            except Exception as error:
                self.fail(provider, mode, error)
                continue
            self.judge(provider, mode, found, limit)

    def judge(self, provider: str, mode: str, errors: Errors, limit: float) -> None:
        """Rows of the errors; beyond the limit the provider is wrong."""
        right = errors.relative <= limit  # False for NaN
        if not right:
            message = f"wrong: relative error {errors.relative:.3g}, allowed is {limit:.3g}"
            self.failed[provider, mode] = ("error", message)
        if math.isnan(errors.relative):
            return
        for metric, value in (("max_abs_error", errors.max_abs), ("rel_error", errors.relative)):
            extra = {"allowed_rel_error": limit}
            self.row(provider, mode, metric, "1", value=value, extra=extra)

    def time(self, runs: Mapping[str, Run], mode: str) -> dict[str, list[float]]:
        """Rows of the latency (and on a GPU of the host's time) of all who have not failed, who
        take turns; their samples of latency in ms."""
        ready = {n: run for n, run in runs.items() if (n, mode) not in self.failed}
        timings = timing.interleaved(
            {name: (lambda run=run: run(mode)) for name, run in ready.items()},
            device=self.device,
            effort=self.effort,
            progress=lambda name: self.tell(name, mode),
        )
        for name, timed in timings.items():
            if timed.failure:
                self.fail(name, mode, timed.failure)
            else:
                self.times(name, mode, timed)
        return {name: timed.samples for name, timed in timings.items() if not timed.failure}

    def time_builds(self, calls: Mapping[tuple[str, str], Callable[[], object]]) -> None:
        """Rows of what providers build once a batch, (provider, op) -> a call that does."""
        timings = timing.interleaved(
            {f"{name} {op}": call for (name, op), call in calls.items()},
            device=self.device,
            effort=self.effort,
            progress=lambda name: self.tell(name, "build"),
        )
        for (name, op), timed in zip(calls, timings.values(), strict=True):
            if timed.failure:
                status, message = explain(timed.failure)
                options: dict[str, Any] = {"status": status, "message": message}
                self.row(name, FORWARD, "latency", "ms", op=op, **options)
            else:
                self.times(name, FORWARD, timed, op=op)

    def times(self, name: str, mode: str, timed: Timing, *, op: str | None = None) -> None:
        """Rows of what was timed: the latency and, on a GPU, the host's time."""
        self.row(name, mode, "latency", "ms", op=op, samples=timed.samples)
        if timed.host:
            self.row(name, mode, "host_time", "ms", op=op, samples=timed.host)

    def ask_alone(
        self,
        providers: Iterable[str],
        modes: Sequence[str],
        prepare: Callable[[str], tuple[Run, Iterable[Tensor]]],
        needs: Callable[[str, str], int] = lambda provider, mode: 0,
    ) -> None:
        """Runs whoever ran out of memory once more, when nobody else holds any: who does then has
        failed for want of room, and not because of what it needs.

        Args:
            providers, modes, prepare: as for `weigh`.
            needs: (provider, mode) -> bytes, at least; more than are free are not tried.
        """
        for name in providers:
            for mode in modes:
                if self.failed.get((name, mode), ("", ""))[0] != "out_of_memory":
                    continue
                timing.release(self.device)
                if needs(name, mode) > free_bytes(self.device):
                    continue
                self.tell(name, f"alone, {mode}")
                if self._runs(name, mode, prepare):
                    self.failed[name, mode] = ("unsupported", CROWDED)

    def _runs(
        self, name: str, mode: str, prepare: Callable[[str], tuple[Run, Iterable[Tensor]]]
    ) -> bool:
        try:
            run, _ = prepare(name)
            run(mode)
            wait(self.device)
        except Exception:
            return False
        return True

    def weigh(
        self,
        providers: Iterable[str],
        modes: Sequence[str],
        prepare: Callable[[str], tuple[Run, Iterable[Tensor]]],
    ) -> None:
        """Rows of the memory of each provider, alone on the device.

        Args:
            providers: their names.
            modes: what is run.
            prepare: a name -> (its run on fresh inputs, those inputs).
        """
        for name in providers:
            for mode in modes:
                if (name, mode) not in self.failed:
                    self.tell(name, f"memory, {mode}")
                    self._weigh(name, mode, prepare)
            self.failure_rows(name, modes, PEAKS)

    def _weigh(
        self, name: str, mode: str, prepare: Callable[[str], tuple[Run, Iterable[Tensor]]]
    ) -> None:
        try:
            peak = self._peak(name, mode, prepare)
        except Exception as error:
            self.fail(name, mode, error)
            return
        values = (peak.total, peak.beyond_inputs)
        for (metric, unit), value in zip(PEAKS.items(), values, strict=True):
            self.row(name, mode, metric, unit, value=float(value))

    def _peak(
        self, name: str, mode: str, prepare: Callable[[str], tuple[Run, Iterable[Tensor]]]
    ) -> Peak:
        timing.release(self.device)
        floor = allocated(self.device)
        run, inputs = prepare(name)
        return peak_memory(lambda: run(mode), inputs=inputs, device=self.device, floor=floor)

    def failure_rows(self, provider: str, modes: Sequence[str], units: Mapping[str, str]) -> None:
        """For each metric, a row that says why there is no number."""
        for mode in modes:
            if (provider, mode) in self.failed:
                status, message = self.failed[provider, mode]
                for metric, unit in units.items():
                    self.row(provider, mode, metric, unit, status=status, message=message)

    def fail(self, provider: str, mode: str, error: Exception) -> None:
        """Remember what a provider raised."""
        status, _ = self.failed[provider, mode] = explain(error)
        del error
        if status != "missing":  # then nothing was allocated, and looking for garbage takes long
            timing.release(self.device)

    def row(
        self,
        provider: str,
        mode: str,
        metric: str,
        unit: str,
        *,
        op: str | None = None,
        extra: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """One row of results."""
        config = {
            **self.facts,
            **self.configs.get(provider, {}),
            **(extra or {}),
            "limit_ms": self.ceilings.limit_ms(self.facts, mode),
        }
        self.rows.append(
            results.row(
                op=op or self.op,
                provider=provider,
                workload=self.name,
                mode=mode,
                metric=metric,
                unit=unit,
                config=config,
                **options,
                **self.common,
            )
        )

    def tell(self, provider: str, what: str) -> None:
        """Say what is being done."""
        self._hears(f"{self.name}: {provider}, {what}")


def known(kind: str, given: Sequence[str], names: Iterable[str]) -> None:
    """Raises ValueError for the first given name that is not among the known ones."""
    names = list(names)
    for name in given:
        if name not in names:
            raise ValueError(f"unknown {kind} {name!r}; known are {', '.join(names)}")


def explain(error: Exception) -> tuple[str, str]:
    """(status, one line) for whatever a provider raised."""
    if isinstance(error, Unavailable):
        return error.status, str(error)
    text = str(error).strip()
    message = _said(error)
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


def _said(error: BaseException) -> str:
    """Its type and first line, and what it comes from: of Triton's errors the outermost says where
    a kernel was not compiled, the innermost why."""
    own, cause = described(error), error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if cause is error:
        return own
    lines = str(cause).strip().splitlines()
    return f"{own} (from {type(cause).__name__}{f': {lines[-1].strip()}' if lines else ''})"


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """What can still be allocated without harm."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    # Half of what is free: a CPU that runs out of memory ends the process, or its neighbours.
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
