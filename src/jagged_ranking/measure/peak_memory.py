"""Peak memory of one call, and how much of it are the inputs.

On a GPU the peak of PyTorch's allocator (`max_memory_allocated`: what tensors hold, not what the
allocator keeps in reserve). On a CPU the peak of the live bytes in the replayed `[memory]` events
of `torch.profiler`, which sees every allocation through PyTorch's CPU allocator, temporaries
inside operators included, and is the same at every run.
"""

import gc
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class Peak:
    """Bytes. `total` counts the inputs, `beyond_inputs` does not."""

    total: int
    beyond_inputs: int


def peak_memory(
    call: Callable[[], object], *, inputs: Iterable[Tensor], device: torch.device, floor: int = 0
) -> Peak:
    """The peak while `call` runs, after one call that warms up.

    Args:
        call: does the work once; what it returns is dropped.
        inputs: the tensors that exist before the call and stay (CPU accounting).
        device: where they live.
        floor: bytes that were allocated on the device before the inputs were made, and are
            nobody's business (workspaces of libraries, caches of earlier work).
    """
    call()
    gc.collect()
    if device.type == "cuda":
        _await_gradients(device)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device)
        return Peak(total=peak - floor, beyond_inputs=peak - before)
    beyond = _profiled_peak(call)
    return Peak(total=beyond + storage_bytes(inputs), beyond_inputs=beyond)


def allocated(device: torch.device) -> int:
    """Bytes that tensors hold on a GPU now; 0 on a CPU, where only events are counted."""
    if device.type != "cuda":
        return 0
    gc.collect()
    _await_gradients(device)
    torch.cuda.synchronize(device)
    return torch.cuda.memory_allocated(device)


def _await_gradients(device: torch.device) -> None:
    """Waits until the last backward holds none of its tensors. PyTorch's thread for the gradients
    of a GPU may do so when the backward has returned already; it does one thing after another, and
    this one needs no memory."""
    x = torch.empty(0, device=device, requires_grad=True)
    torch.autograd.grad(x.neg(), x, torch.empty_like(x))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the distinct storages behind `tensors`; views of one storage count once."""
    storages = {}
    for tensor in tensors:
        plain: Tensor = tensor.values() if tensor.is_nested else tensor
        storage = plain.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _profiled_peak(call: Callable[[], object]) -> int:
    # Kineto announces each start and stop on stderr at its default level.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    inner = profiler.profiler
    assert inner is not None
    assert inner.kineto_results is not None
    events: list[Any] = inner.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    live = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        live += change.nbytes()
        peak = max(peak, live)
    return peak
