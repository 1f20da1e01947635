"""The device that work runs on: which one, its name, its driver and its clocks.

torch is imported by the functions that need it: it takes seconds, and who asks nothing of a device
does without.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jagged_ranking.first_line import first_line

if TYPE_CHECKING:
    import torch

# What the name of a device that is none begins with.
CPU = "CPU"


def default_device() -> str:
    """ "cuda" where there is one, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def given_device(name: str) -> torch.device:
    """The device that `--device` names: cpu, cuda, or a GPU by its number.

    Raises:
        ValueError: any other name, a GPU that is not there, or one that does not work.
    """
    import torch

    if not (named := re.fullmatch(r"cpu|cuda(?::(\d+))?", name)):
        raise ValueError(f"--device {name}: must be cpu, cuda, or a GPU by its number, as cuda:1")
    number, found = named[1], torch.cuda.device_count()
    if number is not None and int(number) >= found:
        raise ValueError(f"--device {name}: GPUs are numbered from 0, and there are {found} here")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {name}: {first_line(error)}") from error
    return device


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_name(device: Any = "cpu") -> str:
    """The name of a CUDA device as its driver says it, or "CPU (model)"."""
    import torch

    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    return f"{CPU} ({_cpu_model()})"


def clocks(device: Any = "cpu") -> dict[str, int] | None:
    """{"sm_mhz", "memory_mhz", "temperature_c", "power_w"} now; None on a CPU or without NVML."""
    import torch

    if torch.device(device).type != "cuda":
        return None
    try:
        with _nvml() as nvml:
            uuid = str(torch.cuda.get_device_properties(torch.device(device)).uuid)
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
            return {
                "sm_mhz": int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
                "memory_mhz": int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
                "temperature_c": int(
                    nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
                ),
                "power_w": int(nvml.nvmlDeviceGetPowerUsage(handle) // 1000),
            }
    except Exception:  # the clocks are a remark on a measurement, never a reason to lose it
        return None


def driver_version() -> str | None:
    """Of the NVIDIA driver; None without NVML."""
    try:
        with _nvml() as nvml:
            return str(nvml.nvmlSystemGetDriverVersion())
    except Exception:  # as in `clocks`
        return None


@contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
