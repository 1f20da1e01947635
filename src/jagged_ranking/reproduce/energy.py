"""The energy that a GPU takes for some work, by NVML.

By the counter of the board where it has one (since Volta), which says millijoules and moves some
times a second: what it says at a moment is as old as its last move, and so the power between two
moves is what counts. Else by the board's power, asked some tens of times a second.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from jagged_ranking.measure.providers import Unavailable

COUNTER, POWER = "energy counter", "sampled power"
_POWER_EVERY, _COUNTER_EVERY = 0.02, 0.005  # seconds between two looks
# How long a counter may stand still before it is taken for broken.
_STILL_SECONDS = 2.0


@dataclass(frozen=True)
class Energy:
    """joules, by the `means`, of `calls`."""

    joules: float
    calls: int
    means: str


def energy_of(call: Callable[[], object], *, device: torch.device, seconds: float) -> Energy:
    """Of calls that are repeated for so many seconds.

    Args:
        call: ends when the device has.
        device: a CUDA device.
        seconds: at least; a few times what the counter takes to move, which it does at least twice.

    Raises:
        Unavailable: a CPU, no NVML that knows the device, or a counter that does not move.
    """
    if device.type != "cuda":
        raise Unavailable("unsupported", "energy is measured on a GPU alone")
    with _board(device) as (nvml, board):
        try:
            nvml.nvmlDeviceGetTotalEnergyConsumption(board)
        except nvml.NVMLError:
            return _by_power(nvml, board, call, seconds)
        return _by_counter(nvml, board, call, seconds)


def _by_counter(nvml: Any, board: Any, call: Callable[[], object], seconds: float) -> Energy:
    with _looked_at(
        lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(board), _COUNTER_EVERY
    ) as seen:
        calls, took = _repeated(call, seconds, until=lambda: len(moves(seen)) > 1)
        known = moves(seen)  # before the board is idle again
    if len(known) < 2:
        raise Unavailable("unsupported", "the board's counter of energy does not move")
    (begun, before), (ended, after) = known[0], known[-1]
    watts = (after - before) / 1e3 / (ended - begun)
    return Energy(took * watts, calls, COUNTER)


def moves(seen: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Of looks at a counter, (moment, what it said), those at which it had moved; not the first,
    since how old that was nobody knows."""
    looks = list(seen)  # of a thread, which goes on
    return [look for last, look in itertools.pairwise(looks) if look[1] != last[1]]


def _by_power(nvml: Any, board: Any, call: Callable[[], object], seconds: float) -> Energy:
    with _looked_at(lambda: nvml.nvmlDeviceGetPowerUsage(board), _POWER_EVERY) as seen:
        calls, took = _repeated(call, seconds)
    watts = sum(milliwatts for _, milliwatts in seen) / 1e3 / len(seen)
    return Energy(took * watts, calls, POWER)


@contextmanager
def _looked_at(read: Callable[[], int], every: float) -> Iterator[list[tuple[float, int]]]:
    """Inside, a thread looks at a number again and again: (moment, number) of each look so far,
    one at least."""
    seen, done = [(time.perf_counter(), read())], threading.Event()

    def look() -> None:
        while not done.wait(every):
            number = read()
            seen.append((time.perf_counter(), number))

    looker = threading.Thread(target=look, daemon=True)
    looker.start()
    try:
        yield seen
    finally:
        done.set()
        looker.join()


def _repeated(
    call: Callable[[], object], seconds: float, until: Callable[[], bool] = lambda: True
) -> tuple[int, float]:
    """How often it was called, and how long that took: for so many seconds, and until `until` is
    so, for which it has `_STILL_SECONDS` more."""
    begun, calls = time.perf_counter(), 0
    while True:
        call()
        calls += 1
        took = time.perf_counter() - begun
        if took >= seconds and (until() or took > seconds + _STILL_SECONDS):
            return calls, took


@contextmanager
def _board(device: torch.device) -> Iterator[tuple[Any, Any]]:
    """NVML, and what it knows the device by."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no library, or no driver
        raise Unavailable("missing", f"no NVML ({error})") from error
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        try:
            board = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
        except pynvml.NVMLError as error:
            raise Unavailable("missing", f"NVML does not know the device ({error})") from error
        yield pynvml, board
    finally:
        pynvml.nvmlShutdown()
