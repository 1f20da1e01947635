"""Batches made on a GPU while it is at work on the batch before."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from torch import Tensor

from jagged_kernels import JaggedTensor
from jagged_ranking.data.batch import JaggedBatch

# Batches that may wait for the device: the memory of each is free again only behind its step.
AHEAD = 8


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def beside_the_step(batches: Iterator[JaggedBatch], device: torch.device) -> Iterator[JaggedBatch]:
    """The same batches; on a GPU, each is made while the one before is trained on.

    A thread of the host makes it, in a stream of its own: a step of a small model is over on the
    device before the host has launched the next, and then all that the host does beside that is
    waited for. PyTorch leaves Python's lock in every operation and in most of a backward pass.
    A batch is ordered before whatever is launched, once it is there, in the stream that was current
    when the first was asked for. Making it takes no matrix products, which cuBLAS would not repeat
    to the bit in two streams, and draws no random numbers.
    """
    if device.type != "cuda":
        yield from batches
        return
    side, main, behind_steps = _side_stream(device), torch.cuda.current_stream(device), deque[Any]()
    side.wait_stream(main)

    def make() -> tuple[JaggedBatch, Any] | None:
        with torch.cuda.stream(side):  # streams are a thread's own
            batch = next(batches, None)
            if batch is None:
                return None
            for tensor in tensors_of(batch):
                tensor.record_stream(main)
            return batch, side.record_event()

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        coming = thread.submit(make)
        while (made := coming.result()) is not None:
            coming = thread.submit(make)
            batch, ready = made
            main.wait_event(ready)
            yield batch
            behind_steps.append(main.record_event())
            if len(behind_steps) > AHEAD:
                behind_steps.popleft().synchronize()


def tensors_of(batch: JaggedBatch) -> Iterator[Tensor]:
    """All tensors of a batch, those that share offsets once for each."""
    for spec in fields(batch):
        value = getattr(batch, spec.name)
        if isinstance(value, JaggedTensor):
            yield value.values
            yield value.offsets
        elif isinstance(value, Tensor):
            yield value
