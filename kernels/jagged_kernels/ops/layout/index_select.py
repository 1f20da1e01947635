"""`jagged_index_select`: users by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.contents import readable, total_of
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.ops.layout.slice import LONGEST, cut_users
from jagged_kernels.ops.users import token_positions
from jagged_kernels.tensors.jagged import JaggedTensor, called_by_methods
from jagged_kernels.tensors.nested import takes_nested
from jagged_kernels.tensors.offsets import lengths_to_offsets


@called_by_methods
@takes_nested
def jagged_index_select(
    x: JaggedTensor, users: Tensor, *, total: int | None = None, backend: Backend = "auto"
) -> JaggedTensor:
    """The tokens of users[0], users[1], ..., as the N users of a new batch; repeats are allowed.

    Args:
        x: [T, ...], of the dtypes of `jagged_slice`.
        users: [N] int32 or int64 in [0, B). Others raise on a CPU; on CUDA, where looking would
            wait, triton counts them as users without tokens.
        total: tokens of the result, where the caller knows it. Without it this waits for the
            device, in a compiled graph too; a wrong one raises on a CPU and, on CUDA, is not
            noticed by triton.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Returns:
        [total, ...] with offsets [N + 1] in the dtype of those of `x`.

    Raises:
        TypeError, ValueError, IndexError: arguments of wrong kind, shape, dtype, device or range.
        NotImplementedError: float64 or a complex dtype on the triton backend.

    The gradient of a user that is there several times is the sum over them in their order, in
    float32, without atomics. One program sums a token over all its copies: the time of the
    backward grows with the copies of the most frequent user.

    >>> x = JaggedTensor(torch.arange(6), torch.tensor([0, 4, 4, 6]))
    >>> [user.tolist() for user in jagged_index_select(x, torch.tensor([2, 1, 2])).unbind()]
    [[4, 5], [], [4, 5]]
    """
    _check(x, users)
    users = users.contiguous()
    chosen = choose_backend(backend, x.values)
    if chosen == "triton":
        offsets, _ = call(cut_users, x.offsets, users, None, 0, None, LONGEST)
    else:
        offsets = lengths_to_offsets(x.lengths.index_select(0, users))
    tokens = total_of(offsets, total)
    if chosen == "reference":
        parts = x.unbind()
        values = torch.cat([x.values[:0], *[parts[user] for user in users.tolist()]])
    elif chosen == "native":
        user, place = token_positions(offsets, tokens)
        values = x.values[x.offsets[users][user] + place]
    else:
        values = call(select_rows, x.values, x.offsets, users, offsets, tokens)
    return JaggedTensor._trusted(values, offsets)


def _check(x: JaggedTensor, users: Tensor) -> None:
    if not isinstance(x, JaggedTensor) or not isinstance(users, Tensor):
        kinds = f"{type(x).__name__} and {type(users).__name__}"
        raise TypeError(f"x must be a JaggedTensor and users a tensor, got {kinds}")
    if users.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"users must be int32 or int64, got {users.dtype}")
    if users.dim() != 1 or users.device != x.device:
        raise ValueError(
            f"users must be [N] on {x.device}, got {tuple(users.shape)} on {users.device}"
        )
    if readable(users) and bool(((users < 0) | (users >= len(x))).any()):
        raise IndexError(
            f"users must lie in [0, {len(x)}), got {int(users.min())} to {int(users.max())}"
        )


def _select_rows(
    values: Tensor, offsets: Tensor, users: Tensor, out_offsets: Tensor, tokens: int
) -> Tensor:
    """[tokens, ...]: the tokens of `users` in their order."""
    from jagged_kernels.ops.layout.triton_copies import launch_place_rows

    return launch_place_rows(
        values, offsets, out_offsets, None, 1, users=users.shape[0], tokens=tokens, source_len=0,
        out_len=0, source_end=False, out_end=False, value=0.0, select=users,
    )  # fmt: skip


def _select_rows_backward(
    d_out: Tensor, offsets: Tensor, users: Tensor, out_offsets: Tensor, tokens: int
) -> Tensor:
    """[tokens, ...]: the gradient of the values."""
    from jagged_kernels.ops.layout.triton_select import launch_select_rows_backward

    return launch_select_rows_backward(d_out, offsets, users, out_offsets, tokens)


def _empty_rows(
    values: Tensor, offsets: Tensor, users: Tensor, out_offsets: Tensor, tokens: int
) -> Tensor:
    return values.new_empty((tokens, *values.shape[1:]))


select_rows = define_op(_select_rows, fake=_empty_rows)
select_rows_backward = define_op(_select_rows_backward, fake=_empty_rows)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    values, offsets, users, out_offsets, _ = inputs
    return offsets, users, out_offsets, values.shape[0]


def _gradient(saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor) -> tuple[Tensor]:
    return (call(select_rows_backward, d_out, *saved),)


define_gradient(select_rows, save=_save, gradient=_gradient)
