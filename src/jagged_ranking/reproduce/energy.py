"""The energy that a GPU takes for some work, by NVML.

By the counter of the board where it has one (since Volta), which says millijoules and moves some
tens of times a second; else by its power, asked as often.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from jagged_ranking.measure.providers import Unavailable

COUNTER, POWER = "energy counter", "sampled power"
_EVERY_SECONDS = 0.02
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
        seconds: at least; a few times what the counter takes to move, which it does at least once.

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
    def taken() -> int:
        return nvml.nvmlDeviceGetTotalEnergyConsumption(board) - before

    before = nvml.nvmlDeviceGetTotalEnergyConsumption(board)
    calls, _ = _repeated(call, seconds, until=lambda: taken() > 0)
    if (millijoules := taken()) <= 0:
        raise Unavailable("unsupported", "the board's counter of energy does not move")
    return Energy(millijoules / 1e3, calls, COUNTER)


def _by_power(nvml: Any, board: Any, call: Callable[[], object], seconds: float) -> Energy:
    watts, done = [nvml.nvmlDeviceGetPowerUsage(board) / 1e3], threading.Event()

    def sample() -> None:
        while not done.wait(_EVERY_SECONDS):
            watts.append(nvml.nvmlDeviceGetPowerUsage(board) / 1e3)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        calls, took = _repeated(call, seconds)
    finally:
        done.set()
        sampler.join()
    return Energy(took * sum(watts) / len(watts), calls, POWER)


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
