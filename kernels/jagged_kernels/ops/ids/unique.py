"""`jagged_unique`: the distinct ids of each user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.contents import refuse_meta
from jagged_kernels.core.operators import call, define_op
from jagged_kernels.core.sizes import integer_dtype
from jagged_kernels.ops.users import token_users
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested

_DTYPES = (torch.int16, torch.int32, torch.int64)


@takes_nested
def jagged_unique(
    ids: JaggedTensor, *, backend: Backend = "auto"
) -> tuple[JaggedTensor, Tensor, Tensor]:
    """The distinct ids of each user in increasing order, how often each is there, and where.

    Args:
        ids: [T], int16, int32 or int64; any numbers.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Returns:
        (unique, counts, inverse): a `JaggedTensor` [U] with offsets of its own; [U] int64; and
        [T] int64, the row of `unique.values` that each token is.

    Raises:
        TypeError, ValueError: arguments of wrong kind, shape or dtype.

    U depends on the ids, so this waits for the device, and to trace it, `torch.compile` needs
    `torch._dynamo.config.capture_dynamic_output_shape_ops`. The triton backend sorts every user by
    itself, and waits once more where one has more than 1024 tokens; its results keep memory for T.
    Where a user has more than 4096 tokens, or ids that are 2^50 or more apart, it sorts all tokens
    by keys of user and id instead, as the native backend does. That waits once more, to know how
    many bits the keys need.

    >>> ids = JaggedTensor(torch.tensor([7, 3, 7, 3]), torch.tensor([0, 3, 4]))
    >>> unique, counts, inverse = jagged_unique(ids)
    >>> [user.tolist() for user in unique.unbind()], counts.tolist(), inverse.tolist()
    ([[3, 7], [3]], [1, 2, 1], [1, 0, 1, 2])
    """
    if not isinstance(ids, JaggedTensor):
        raise TypeError(f"ids must be a JaggedTensor, got {type(ids).__name__}")
    if ids.values.dim() != 1:
        raise ValueError(f"ids must be [T], got {tuple(ids.values.shape)}")
    if ids.dtype not in _DTYPES:
        raise TypeError(f"ids must be int16, int32 or int64, got {ids.dtype}")
    refuse_meta(ids.values, "ids are read for the number of distinct ones")
    chosen = choose_backend(backend, ids.values)
    if chosen == "reference":
        values, offsets, counts, inverse = _reference(ids.values, ids.offsets)
    else:
        operator = unique_triton if chosen == "triton" else unique_native
        values, offsets, counts, inverse = call(operator, ids.values, ids.offsets)
    return JaggedTensor._trusted(values, offsets), counts, inverse


def _reference(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lengths, rows = [0], 0
    parts = [(values[:0], offsets[:0].long(), offsets[:0].long())]
    for part in JaggedTensor._trusted(values, offsets).unbind():
        distinct, inverse, counts = part.unique(return_inverse=True, return_counts=True)
        parts.append((distinct, counts, inverse + rows))
        rows += distinct.shape[0]
        lengths.append(rows)
    distinct, counts, inverse = (torch.cat(column) for column in zip(*parts, strict=True))
    return distinct, offsets.new_tensor(lengths), counts, inverse


def _unique_native(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _unique_by_keys(values, offsets, _range, _unique_keys)


def _unique_triton(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from jagged_kernels.ops.ids.triton_unique import launch_range, launch_unique
    from jagged_kernels.ops.ids.triton_user_unique import launch_user_unique

    found = launch_user_unique(values, offsets) if values.shape[0] else None
    return found or _unique_by_keys(values, offsets, launch_range, launch_unique)


def _unique_by_keys(
    values: Tensor,
    offsets: Tensor,
    range_of: Callable[[Tensor], tuple[int, int]],
    unique_keys: Callable[[Tensor, Tensor, int, int], tuple[Tensor, Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(unique [U], its offsets [B + 1], counts [U], inverse [T]), by a backend's two parts."""
    if values.shape[0] == 0:
        return _nothing(values, offsets)
    lowest, highest = range_of(values)
    bits = (highest - lowest).bit_length()
    if _fits(offsets, bits):
        return unique_keys(values, offsets, lowest, bits)
    ids, ranks, bits = _rank_ids(values)
    rank, begins, counts, inverse = unique_keys(ranks, offsets, 0, bits)
    return ids[rank], begins, counts, inverse


def _nothing(values: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    none = values.new_empty(0, dtype=torch.int64)
    return values.new_empty(0), torch.zeros_like(offsets), none, none.clone()


def _fits(offsets: Tensor, bits: int) -> bool:
    return bits + offsets.shape[0].bit_length() < 63


def _rank_ids(values: Tensor) -> tuple[Tensor, Tensor, int]:
    """(the ids that there are, the rank of each token's among these, bits that hold a rank):
    however large ids are, ranks are small."""
    ids, ranks = values.unique(return_inverse=True)
    return ids, ranks, values.shape[0].bit_length()


def _range(values: Tensor) -> tuple[int, int]:
    lowest, highest = torch.stack(values.aminmax()).tolist()
    return lowest, highest


def _unique_keys(
    values: Tensor, offsets: Tensor, lowest: int, bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`_unique_by_keys` of ids from `lowest` on that differ in the last `bits` bits."""
    users = offsets.shape[0] - 1
    behind = users << bits
    keys = (values.long() - lowest).add_(token_users(offsets, values.shape[0]), alpha=1 << bits)
    keys = keys.to(integer_dtype(behind + 1))
    found, inverse, counts = keys.unique(return_inverse=True, return_counts=True)
    firsts = torch.arange(0, behind + 1, 1 << bits, dtype=keys.dtype, device=keys.device)
    begins = torch.searchsorted(found, firsts).to(offsets.dtype)
    ids = (found.long() & (1 << bits) - 1) + lowest
    return ids.to(values.dtype), begins, counts, inverse


def _empty_unique(values: Tensor, offsets: Tensor) -> tuple[Any, ...]:
    distinct = torch.library.get_ctx().new_dynamic_size()
    return (
        values.new_empty(distinct),
        offsets.new_empty(offsets.shape),
        offsets.new_empty(distinct, dtype=torch.int64),
        offsets.new_empty(values.shape, dtype=torch.int64),
    )


unique_native = define_op(_unique_native, fake=_empty_unique)
unique_triton = define_op(_unique_triton, fake=_empty_unique)
