"""Offsets: what they must be, and how lengths become offsets."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.core.contents import check_token_count, readable
from jagged_kernels.tensors.arguments import not_a_tensor


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """[B] lengths -> [B + 1] offsets: int32 for int32, int64 for every other integer dtype.

    Raises:
        TypeError: `lengths` is not a tensor, or not of integers.
        ValueError: another shape; or, of lengths on a CPU (elsewhere looking would wait, and sums
            wrap), one that is negative, or a sum that int32 does not hold.

    >>> lengths_to_offsets(torch.tensor([2, 0, 1])).tolist()
    [0, 2, 2, 3]
    """
    if not isinstance(lengths, Tensor):
        raise not_a_tensor("lengths", lengths)
    dtype = lengths.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"lengths must be integers, got {dtype}")
    if lengths.dim() != 1:
        raise ValueError(f"lengths must be [B], got shape {tuple(lengths.shape)}")
    if dtype != torch.int32:
        lengths = lengths.long()
    if readable(lengths) and lengths.numel():
        if (smallest := int(lengths.min())) < 0:
            raise ValueError(f"lengths must be at least 0, got {smallest}")
        if dtype == torch.int32:
            check_token_count(int(lengths.sum()), dtype)
    return cumulative(lengths)


def cumulative(lengths: Tensor) -> Tensor:
    """`lengths_to_offsets` of int32 or int64, for lengths that are known to be good."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=lengths.dtype), (1, 0))


def check_form(values: Tensor, offsets: Tensor) -> None:
    """What can be said of the arguments without reading device memory."""
    if not isinstance(values, Tensor) or not isinstance(offsets, Tensor):
        kinds = f"{type(values).__name__} and {type(offsets).__name__}"
        raise TypeError(f"values and offsets must be tensors, got {kinds}")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"offsets must be int32 or int64, got {offsets.dtype}")
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ValueError(f"offsets must be [B + 1], got shape {tuple(offsets.shape)}")
    if values.dim() == 0:
        raise ValueError("values must be [T, ...], got a scalar")
    if offsets.device != values.device:
        raise ValueError(
            f"values and offsets must be on one device, got {values.device} and {offsets.device}"
        )


def check_contents(offsets: Tensor, tokens: int | None = None) -> None:
    """Reads the offsets once (one wait for a GPU, whatever B is); `tokens` None: of any number."""
    # Not by differences, which wrap.
    decreases = offsets[1:] < offsets[:-1]
    first, last, any_decrease = torch.stack([offsets[0], offsets[-1], decreases.any()]).tolist()
    if first != 0:
        raise ValueError(f"offsets must start at 0, got offsets[0] = {first}")
    if any_decrease:
        user = int(decreases.int().argmax())
        raise ValueError(
            f"offsets must not decrease, got offsets[{user}] = {int(offsets[user])} and "
            f"offsets[{user + 1}] = {int(offsets[user + 1])}"
        )
    if tokens is not None and last != tokens:
        raise ValueError(
            f"offsets must end at the number of tokens, got offsets[-1] = {last} and values of "
            f"{tokens} tokens"
        )
