"""When the contents of a tensor can be looked at: not in a trace, and not where that would wait."""

from __future__ import annotations

import torch
from torch import Tensor


def is_tracing(tensor: Tensor) -> bool:
    """Contents cannot be read: `torch.compile` traces, or the tensor is fake."""
    return torch.compiler.is_compiling() or isinstance(tensor, torch._subclasses.FakeTensor)


def readable(tensor: Tensor) -> bool:
    """Contents can be read without waiting for a device."""
    return tensor.device.type == "cpu" and not is_tracing(tensor)


def total_of(offsets: Tensor, total: int | None, what: str = "tokens") -> int:
    """`offsets[-1]`, from the caller where it knows, else waiting for the device."""
    if total is None:
        return int(offsets[-1])
    if total < 0:
        raise ValueError(f"total must be at least 0, got {total}")
    if readable(offsets) and int(offsets[-1]) != total:
        raise ValueError(f"total is {total}, but the result has {int(offsets[-1])} {what}")
    return total


def known_to_differ(offsets: Tensor, others: Tensor) -> bool:
    """Whether offsets of int32 or int64 are seen to be others. Not known where not readable."""
    if offsets is others or not (readable(offsets) and readable(others)):
        return False
    return not torch.equal(offsets.long(), others.long())
