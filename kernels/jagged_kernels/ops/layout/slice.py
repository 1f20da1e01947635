"""`jagged_slice`, `jagged_recent`: a part of each user's tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.contents import total_of
from jagged_kernels.core.operators import call, define_op
from jagged_kernels.core.sizes import as_int
from jagged_kernels.ops.layout.copies import place_rows
from jagged_kernels.ops.users import token_positions
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested
from jagged_kernels.tensors.offsets import cumulative

LONGEST = 2**31 - 1


@takes_nested
def jagged_slice(
    x: JaggedTensor,
    start: int | Tensor,
    length: int | Tensor,
    *,
    total: int | None = None,
    backend: Backend = "auto",
) -> JaggedTensor:
    """`length` tokens of each user from its token `start` on.

    Args:
        x: [T, ...], any dtype but float8 and unsigned integers of more than 8 bits; complex ones
            not by triton.
        start: token of the user, an int or [B] integers; clamped to 0 ... n_b.
        length: tokens, an int or [B] integers; clamped to 0 ... n_b - start.
        total: tokens of the result, where the caller knows it. Without it this waits for the
            device, in a compiled graph too; a wrong one raises on a CPU and, on CUDA, is not
            noticed by triton.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Returns:
        [total, ...] with offsets of its own, in the dtype of those of `x`.

    Raises:
        TypeError, ValueError: arguments of wrong kind, shape, dtype or device.
        NotImplementedError: float64 or a complex dtype on the triton backend.

    >>> x = JaggedTensor(torch.arange(6), torch.tensor([0, 4, 4, 6]))
    >>> [user.tolist() for user in jagged_slice(x, 1, 2).unbind()]
    [[1, 2], [], [5]]
    """
    return _cut(x, _per_user(x, start, "start"), _per_user(x, length, "length"), total, backend)


@takes_nested
def jagged_recent(
    x: JaggedTensor, length: int | Tensor, *, total: int | None = None, backend: Backend = "auto"
) -> JaggedTensor:
    """The last `length` tokens of each user: its most recent events. See `jagged_slice`.

    Args:
        length: tokens, an int or [B] integers; clamped to 0 ... n_b.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    >>> x = JaggedTensor(torch.arange(6), torch.tensor([0, 4, 4, 6]))
    >>> [user.tolist() for user in jagged_recent(x, 3).unbind()]
    [[1, 2, 3], [], [4, 5]]
    """
    return _cut(x, None, _per_user(x, length, "length"), total, backend)


def _cut(
    x: JaggedTensor,
    start: int | Tensor | None,
    length: int | Tensor,
    total: int | None,
    backend: Backend,
) -> JaggedTensor:
    """`start` None: the last `length` tokens."""
    chosen = choose_backend(backend, x.values)
    if chosen == "triton":
        offsets, begins = call(cut_users, x.offsets, None, *_either(start), *_either(length))
    else:
        begins, lengths = _clamped(x, start, length)
        offsets = cumulative(lengths)
    tokens = total_of(offsets, total)
    if chosen == "reference":
        values = _reference(x, begins, offsets.diff())
    elif chosen == "native":
        user, place = token_positions(offsets, tokens)
        values = x.values.index_select(0, (x.offsets[:-1] + begins)[user] + place)
    else:
        values = call(
            place_rows, x.values, x.offsets, offsets, begins, 1, len(x), tokens, 0, 0,
            False, False, 0.0,
        )  # fmt: skip
    return JaggedTensor._trusted(values, offsets)


def _either(number: int | Tensor | None) -> tuple[Tensor | None, int | None]:
    return (number, None) if isinstance(number, Tensor) else (None, number)


def _clamped(
    x: JaggedTensor, start: int | Tensor | None, length: int | Tensor
) -> tuple[Tensor, Tensor]:
    """Both [B], inside the users."""
    lengths = x.lengths
    if isinstance(length, int):
        length = lengths.new_full((1,), length)
    if start is None:
        length = torch.minimum(length.clamp(min=0), lengths)
        return lengths - length, length
    if isinstance(start, int):
        start = lengths.new_full((1,), start)
    start = torch.minimum(start.clamp(min=0), lengths)
    return start, torch.minimum(length.clamp(min=0), lengths - start)


def _cut_users(
    offsets: Tensor,
    select: Tensor | None,
    starts: Tensor | None,
    start: int | None,
    lengths: Tensor | None,
    length: int | None,
) -> tuple[Tensor, Tensor]:
    """(offsets of the parts [N + 1], their starts in the users [N]).

    Args:
        select: [N], whose tokens each part is of; nobody's where there is no such user. None: all
            users in turn.
        starts, start, lengths, length: of each pair one is given; of the first it may be none,
            for the last tokens.
    """
    from jagged_kernels.ops.layout.triton_copies import launch_cut_users

    return launch_cut_users(offsets, select, starts, start, lengths, length)


def _empty_cut(offsets: Tensor, select: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    users = offsets.shape[0] - 1 if select is None else select.shape[0]
    return offsets.new_empty(users + 1), offsets.new_empty(users)


cut_users = define_op(_cut_users, fake=_empty_cut)


def _reference(x: JaggedTensor, start: Tensor, length: Tensor) -> Tensor:
    parts = [
        part[first : first + count]
        for part, first, count in zip(x.unbind(), start.tolist(), length.tolist(), strict=True)
    ]
    return torch.cat([x.values[:0], *parts])


def _per_user(x: JaggedTensor, number: int | Tensor, name: str) -> int | Tensor:
    """An int, or [B] in the dtype of the offsets."""
    if not isinstance(x, JaggedTensor):
        raise TypeError(f"x must be a JaggedTensor, got {type(x).__name__}")
    if not isinstance(number, Tensor):
        number = as_int(name, number, otherwise=" or integers [B]")
        return min(max(number, -LONGEST), LONGEST)
    dtype = number.dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise TypeError(f"{name} must be an int or integers [B], got {dtype}")
    if number.shape != (len(x),) or number.device != x.device:
        raise ValueError(
            f"{name} must be an int or [B] = [{len(x)}] on {x.device}, "
            f"got {tuple(number.shape)} on {number.device}"
        )
    if number.dtype == x.offsets.dtype:
        return number
    # An int64 that is far too long must not wrap round in int32, nor these bounds in fewer bits.
    return number.long().clamp(-LONGEST, LONGEST).to(x.offsets.dtype)
