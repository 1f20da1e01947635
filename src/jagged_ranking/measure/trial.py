"""Kernels of others that may break a GPU run in a process of their own first.

After an access outside of memory CUDA refuses a process everything: what others have measured in
it until then would be lost, and they would fail behind the one that did it. So each mode of a
provider that is `tried_apart` runs once elsewhere, on the same batch; whoever breaks the device
there, ends the process or does not come back has failed on it. Who has on `FAILURES` batches, or
did not come back once, is not asked in that mode again: each time costs a process, whose kernels
compile and tune themselves anew.
"""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from jagged_ranking.measure.contest import explain, wait
from jagged_ranking.measure.lineup import NOT_TRIED
from jagged_ranking.measure.providers.base import Prepared, Provider
from jagged_ranking.measure.workloads import Batch, Workload, setup
from jagged_ranking.processes import end_worker_with_parent

SECONDS = 300.0  # that a trial may take; kernels may compile and tune themselves in it
FAILURES = 3
_LATE = "did not come back"
Failure = tuple[str, str]  # status and one line, as `contest.explain` has them


class Trials:
    """Tries providers in one process after another, which lasts until it breaks.

    Args:
        seconds: that one trial may take.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        # By provider and mode, where it failed, and how.
        self._failed: defaultdict[tuple[str, str], list[tuple[Workload, str]]] = defaultdict(list)
        self._given_up: set[tuple[str, str]] = set()
        self._other: tuple[BaseProcess, Any] | None = None  # the process, and a pipe to it

    def failure(
        self, provider: Provider, workload: Workload, mode: str, device: torch.device
    ) -> Failure | None:
        """What is against running a mode on a workload in this process; None if nothing is."""
        if why := provider.lacks(workload):
            return "unsupported", why
        asked = provider.name, mode
        failed = self._failed[asked]
        for place, message in failed:
            if place == workload:
                return "error", message
        if asked in self._given_up:
            return "error", f"{NOT_TRIED}{failed[-1][1]}"
        said, why = self._ask(provider.prepare, workload, mode, str(device))
        if why is None:
            return said
        self.end()
        message = f"in a process of its own, on {workload.name}, it {why}"
        if said is not None:
            message += f": {said[1]}"
        failed.append((workload, message))
        if why.startswith(_LATE) or len(failed) == FAILURES:
            self._given_up.add(asked)
        return "error", message

    def _ask(
        self, prepare: Callable[[Batch], Prepared], workload: Workload, mode: str, device: str
    ) -> tuple[Failure | None, str | None]:
        """(what went wrong, what became of the process, None if it goes on)."""
        if self._other is None:
            spawn = multiprocessing.get_context("spawn")
            pipe, far_end = spawn.Pipe()
            process = spawn.Process(target=_try_what_is_asked, args=(far_end,), daemon=True)
            process.start()
            far_end.close()
            self._other = process, pipe
        _, pipe = self._other
        try:
            pipe.send((prepare, workload, mode, device))
            if not pipe.poll(self.seconds):
                return None, f"{_LATE} within {self.seconds:g} s"
            said, is_broken = pipe.recv()
        except (EOFError, OSError):
            return None, "ended that process"
        return said, "broke the device" if is_broken else None

    def end(self) -> None:
        """End the process, if there is one."""
        if self._other is not None:
            process, pipe = self._other
            pipe.close()
            process.kill()
            process.join()
        self._other = None


# One for a process, which takes some seconds to start: a study measures batch by batch.
TRIALS = Trials()


def _try_what_is_asked(pipe: Any) -> None:
    end_worker_with_parent()
    is_broken = False
    while not is_broken:
        try:
            prepare, workload, mode, name = pipe.recv()
        except EOFError:
            return
        device, said = torch.device(name), None
        try:
            prepare(setup(workload, device)).run(mode)
            wait(device)
        except Exception as error:
            said = explain(error)
        try:
            wait(device)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # whoever is measured has the memory
        except RuntimeError:  # torch.AcceleratorError is one
            is_broken = True
        pipe.send((said, is_broken))
