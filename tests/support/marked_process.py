"""A command whose processes are all found, whoever their parent is by now."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

MARK = "JAGGED_KILLS"
# What may be alive so long after a kill. Orphans look for their parent every half second, and then
# end a kernel; a busy machine takes its time.
SECONDS_TO_END = 8.0


class MarkedProcess:
    """Python in a session of its own, with a variable in its environment that its children inherit.

    Args:
        arguments: of Python.
        mark: the variable's value; nobody else's.
        said: the file for what its processes print.
        environment: further variables. Settings of Triton and of this project are not inherited.
    """

    def __init__(
        self, arguments: Iterable[str], *, mark: str, said: Path, environment: Mapping[str, str]
    ) -> None:
        self._mark, self._said = mark, said
        own = ("TRITON_", "JAGGED_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        with said.open("wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**kept, **environment, MARK: mark},
                start_new_session=True,
            )

    def said(self) -> str:
        """What its processes have printed so far."""
        return self._said.read_text(encoding="utf-8", errors="replace")

    def ends_within(self, seconds: float) -> int | None:
        """Its status; None where it has not ended."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> bool:
        """SIGKILL to its first process alone; whether that is what it died of."""
        self._process.kill()
        return self._process.wait() == -signal.SIGKILL

    def alive(self) -> list[psutil.Process]:
        """Its processes."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                dead = process.status() == psutil.STATUS_ZOMBIE
                if not dead and process.environ().get(MARK) == self._mark:
                    found.append(process)
        return found

    def lines(self) -> list[str]:
        """What its processes were started as."""
        found = []
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                found.append(" ".join(process.cmdline()))
        return found

    def left(self) -> tuple[float, list[str]]:
        """How long its processes took to be gone, and those that are not."""
        began = time.monotonic()
        while alive := self.alive():
            if time.monotonic() - began > SECONDS_TO_END:
                return time.monotonic() - began, [_shown(process) for process in alive]
            time.sleep(0.1)
        return time.monotonic() - began, []

    def end(self) -> None:
        """Kill whatever is left."""
        for process in self.alive():
            with contextlib.suppress(psutil.Error):
                process.kill()
        self._process.wait()


def _shown(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"process {process.pid} is alive: {' '.join(process.cmdline())[:120]}"
    return f"process {process.pid} was alive"
