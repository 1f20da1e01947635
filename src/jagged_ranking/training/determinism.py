"""What makes a training repeat itself: kernels that do, and seeds that follow from the step."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def seed_of(*entropy: int) -> int:
    """A seed for torch's generators, in [0, 2**63)."""
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Kernels of PyTorch that repeat themselves, where it has two: by default a GPU adds up the
    gradient of an embedding by atomics, in whatever order they come.

    Not for a CPU, where nothing would change but the time.
    """
    if device.type != "cuda":
        yield
        return
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic  # its attribute is a property that type checks miss
    fills = memory.fill_uninitialized_memory
    with warnings.catch_warnings():
        # It warns of cuBLAS, which only varies with several streams, and of sums of integers.
        warnings.filterwarnings("ignore", message=".*determinis.*", category=UserWarning)
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(was_on, warn_only=only_warns)
            memory.fill_uninitialized_memory = fills


def generators_of(device: torch.device) -> list[torch.Generator]:
    """What dropout may draw from. torch.manual_seed, which seeds them and those of all devices
    there could be, takes a twentieth of a small model's step."""
    if device.type != "cuda":
        return [torch.default_generator]
    number = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[number]]
