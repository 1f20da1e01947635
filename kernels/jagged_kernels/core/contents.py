"""When the contents of a tensor can be looked at: not in a trace, and not where that would wait.

With JAGGED_CHECK=1 in the environment, set before Python starts, they are looked at where it does
wait: for finding what is wrong, not for speed.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from jagged_kernels.core.sizes import as_int

_MOST_INT32_TOKENS = 2**31 - 1
_CHECKING = os.environ.get("JAGGED_CHECK") == "1"


def checking() -> bool:
    """Whether to look at what is trusted otherwise: JAGGED_CHECK=1."""
    return _CHECKING


def is_tracing(tensor: Tensor) -> bool:
    """Contents cannot be read: `torch.compile` traces, or the tensor is fake."""
    return torch.compiler.is_compiling() or isinstance(tensor, torch._subclasses.FakeTensor)


def can_be_read(tensor: Tensor) -> bool:
    """Contents can be read, if need be by waiting for a device: there are some, nothing traces,
    and no CUDA graph is being captured."""
    if tensor.is_meta or is_tracing(tensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def readable(tensor: Tensor) -> bool:
    """Contents can be read without waiting for a device; or where it waits, while `checking`."""
    return (tensor.device.type == "cpu" or checking()) and can_be_read(tensor)


def refuse_meta(tensor: Tensor, why: str) -> None:
    """Raises a ValueError where contents must be read and `tensor`, on "meta", has none."""
    if tensor.is_meta:
        raise ValueError(f"{why}, and tensors on meta have no contents")


def total_of(
    offsets: Tensor, total: int | None, what: str = "tokens", argument: str = "total"
) -> int:
    """`offsets[-1]`, from the caller where it knows, else waiting for the device.

    Args:
        argument: by which the caller can say it, for the message.
    """
    if total is None:
        refuse_meta(offsets, f"without {argument}, offsets are read for the number of {what}")
        return int(offsets[-1])
    if not isinstance(total, int):  # before a call: most are
        total = as_int(argument, total, otherwise=" or None")
    if total < 0:
        raise ValueError(f"total must be at least 0, got {total}")
    check_token_count(total, offsets.dtype)
    if readable(offsets) and int(offsets[-1]) != total:
        raise ValueError(f"total is {total}, but the result has {int(offsets[-1])} {what}")
    return total


def check_token_count(tokens: int, dtype: torch.dtype) -> None:
    """ValueError where offsets of this dtype cannot end at `tokens`."""
    if dtype != torch.int32 or torch.compiler.is_compiling():
        return
    if isinstance(tokens, int) and tokens > _MOST_INT32_TOKENS:
        raise ValueError(
            f"int32 offsets hold at most {_MOST_INT32_TOKENS} tokens, got {tokens}; use int64"
        )


def known_to_differ(offsets: Tensor, others: Tensor) -> bool:
    """Whether offsets of int32 or int64 are seen to be others. Not known where not readable."""
    if offsets is others or not (readable(offsets) and readable(others)):
        return False
    return not torch.equal(offsets.long(), others.long())


def equal_offsets(offsets: Tensor, others: Tensor) -> bool:
    """Whether offsets of int32 or int64 are seen to be others, waiting for a device if need be."""
    if offsets is others:
        return True
    if not (can_be_read(offsets) and can_be_read(others)):
        return False
    return torch.equal(offsets.long(), others.long())


def demand_equal(offsets: Tensor, others: Tensor, what: str, where: tuple[str, str]) -> bool:
    """Offsets of int32 or int64 must be others of as many users. Nobody waits for a GPU: it
    compares for itself and, where they differ, stops at its next operation.

    Args:
        what: is wrong if they differ, for the message.
        where: each of them is found, for the message.

    Returns:
        Whether a GPU was told to compare.

    Raises:
        ValueError: they are seen to differ.
    """
    if not (can_be_read(offsets) and can_be_read(others)):
        return False
    if not (readable(offsets) and readable(others)):
        torch._assert_async(  # pyright: ignore[reportPrivateImportUsage]
            (offsets == others).all(), f"{what}; run with JAGGED_CHECK=1 to see where"
        )
        return True
    if known_to_differ(offsets, others):
        place = int((offsets != others).nonzero()[0])
        raise ValueError(
            f"{what}: offsets[{place}] is {int(offsets[place])} in {where[0]} and "
            f"{int(others[place])} in {where[1]}"
        )
    return False
