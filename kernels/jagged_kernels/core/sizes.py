"""Sizes: what is rounded up to what, and how a kernel is launched."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor


def as_int(name: str, number: int | torch.SymInt, *, otherwise: str = "") -> int:
    """`number` where it is one, of numpy too; else a TypeError, as for tensors: reading one waits.

    Args:
        otherwise: what else the argument may be, for the message.
    """
    if isinstance(number, int | torch.SymInt):
        return number  # pyright: ignore[reportReturnType]
    if not isinstance(number, Tensor) and hasattr(number, "__index__"):
        return operator.index(number)
    raise TypeError(f"{name} must be an int{otherwise}, got {type(number).__name__}")


def power_of_two(size: int) -> int:
    """The least one that is not below `size`, from 1 on."""
    return 1 << (size - 1).bit_length()


def padded_dim(dim: int) -> int:
    """Triton's blocks are powers of two, and its matrix products at least 16 deep."""
    return max(16, power_of_two(dim))


def block_size(size: int, most: int) -> int:
    """`padded_dim`, or `most` at a time."""
    return min(most, padded_dim(size))


def cdiv(total: int, each: int) -> int:
    """How many pieces of `each` hold `total`. `triton.cdiv` takes longer than an allocation."""
    return -(-total // each)


def integer_dtype(largest: int) -> torch.dtype:
    """The smallest integers for numbers from -1 to `largest`: a radix sort goes over each byte."""
    for dtype in (torch.int16, torch.int32):
        if largest <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


@dataclass(frozen=True)
class LaunchConfig:
    """How one kernel walks a row.

    Attributes:
        block: tokens of the range taken at a time.
        num_warps, num_stages: Triton's launch options.
        registers: of a thread at most, so that one more program fits a multiprocessor; None for
            as many as the compiler likes.
    """

    block: int
    num_warps: int
    num_stages: int
    registers: int | None = None

    def options(self) -> dict[str, int]:
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.registers is None else {**options, "maxnreg": self.registers}
