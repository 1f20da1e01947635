"""`jagged_add` and `jagged_mul`: tokens with a jagged, a padded or a per-user operand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.ops.users import spread_users, token_positions, zeros_of
from jagged_kernels.tensors.checks import (
    as_columns,
    check_floats,
    check_like,
    check_same_offsets,
    reshaped,
    user_bounds,
)
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested


@takes_nested
def jagged_add(
    x: JaggedTensor, other: JaggedTensor | Tensor, *, backend: Backend = "auto"
) -> JaggedTensor:
    """x + other, token by token.

    Args:
        x: [T, ...] of a floating dtype.
        other: in the dtype of x, one of
            a `JaggedTensor` [T, ...] with the offsets of x;
            dense [B, L, ...]: position i of user b takes other[b, i]; positions from L on take 0,
            and what lies behind a user's last token is not read;
            per user [B, ...]: all tokens of user b take other[b].
            A dense one has one dimension more than x, a per-user one as many.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Returns:
        [T, ...] with the offsets and dtype of x. Both operands get gradients.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype, shape or device, before any launch.

    >>> x = JaggedTensor(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 3]))
    >>> jagged_add(x, torch.tensor([10.0, 20.0])).values
    tensor([11., 12., 24.])
    """
    return _join(x, other, backend, multiply=False)


@takes_nested
def jagged_mul(
    x: JaggedTensor, other: JaggedTensor | Tensor, *, backend: Backend = "auto"
) -> JaggedTensor:
    """x * other, token by token: operands and results as in `jagged_add`.

    Positions from L on of a dense operand take 0: the result is 0 there, or NaN where x is infinite
    or NaN.

    >>> x = JaggedTensor(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 3]))
    >>> jagged_mul(x, torch.tensor([[10.0], [20.0]])).values
    tensor([10.,  0., 80.])
    """
    return _join(x, other, backend, multiply=True)


def _join(
    x: JaggedTensor, other: JaggedTensor | Tensor, backend: Backend, *, multiply: bool
) -> JaggedTensor:
    check_floats("x", x)
    chosen = choose_backend(backend, x.values)
    if isinstance(other, JaggedTensor):
        check_same_offsets("other", x.offsets, other.offsets)
        check_like("other", other.values, x.values)
        if other.values.shape != x.values.shape:
            raise ValueError(
                f"other must be {tuple(x.values.shape)} like x, got {tuple(other.values.shape)}"
            )
        # Nothing about it is irregular.
        return x.with_values(x.values * other.values if multiply else x.values + other.values)
    check_like("other", other, x.values)
    padded = other.dim() == x.values.dim() + 1
    if other.shape[:1] != (len(x),) or other.shape[1 + padded :] != x.values.shape[1:]:
        raise ValueError(
            f"other must be a JaggedTensor, [B, ...] or [B, L, ...] for x {_wanted(x)}, "
            f"got {tuple(other.shape)}"
        )
    functions: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]] = {
        "triton": partial(call, join_op),
        "native": _join_native,
        "reference": _join_reference,
    }
    values = as_columns(x.values)
    rows = reshaped(other, (*other.shape[: 1 + padded], values.shape[1]))
    out = functions[chosen](values, rows, x.offsets, multiply)
    return x.with_values(reshaped(out, x.values.shape))


def _wanted(x: JaggedTensor) -> str:
    return f"{tuple(x.values.shape)} with B = {len(x)}"


def _join_reference(x: Tensor, other: Tensor, offsets: Tensor, multiply: bool) -> Tensor:
    """The specification, x [T, C] and other [B, C] or [B, L, C] -> [T, C]."""
    users = [zeros_of((0, x.shape[1]), x[:0], other[:0])]
    for user, (first, end) in enumerate(user_bounds(offsets)):
        row = other[user].expand(end - first, -1) if other.dim() == 2 else other[user]
        row = row[: end - first]
        row = torch.cat([row, row.new_zeros((end - first - len(row), x.shape[1]))])
        users.append(x[first:end] * row if multiply else x[first:end] + row)
    return torch.cat(users)


def _join_native(x: Tensor, other: Tensor, offsets: Tensor, multiply: bool) -> Tensor:
    if other.dim() == 2:
        row = spread_users(other, offsets, x.shape[0])
    else:
        row = _take_native(other, offsets, x.shape[0])
    return x * row if multiply else x + row


def _take_native(padded: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    """[B, L, C] -> [T, C], 0 from L on."""
    users, length, columns = padded.shape
    if users == 0 or length == 0:
        return zeros_of((tokens, columns), padded)
    user, position = token_positions(offsets, tokens)
    row = user * length + position.clamp(max=length - 1)
    return padded.flatten(0, 1)[row].masked_fill((position >= length)[:, None], 0.0)


def _join_triton(x: Tensor, other: Tensor, offsets: Tensor, multiply: bool) -> Tensor:
    """x [T, C] with other [B, C] or [B, L, C] -> [T, C]."""
    from jagged_kernels.ops.layout.triton_spread import launch_spread

    join = "mul" if multiply else "add"
    return launch_spread(other, offsets, x.shape[0], x=x, join=join)


def _gather_triton(d_out: Tensor, x: Tensor | None, offsets: Tensor, length: int | None) -> Tensor:
    """The gradient of `other`: d_out [T, C], times x if given, summed to [B, C] or laid out as
    [B, length, C]."""
    from jagged_kernels.ops.layout.triton_spread import launch_pad
    from jagged_kernels.ops.pooling.triton_sum import launch_sum

    if length is None:
        return launch_sum(d_out, offsets, times=x)
    return launch_pad(d_out, offsets, length, times=x)


def _empty_join(x: Tensor, other: Tensor, offsets: Tensor, multiply: bool) -> Tensor:
    return x.new_empty(x.shape)


def _empty_gather(d_out: Tensor, x: Tensor | None, offsets: Tensor, length: int | None) -> Tensor:
    users, columns = offsets.shape[0] - 1, d_out.shape[1]
    return d_out.new_empty((users, columns) if length is None else (users, length, columns))


join_op = define_op(_join_triton, fake=_empty_join)
gather_op = define_op(_gather_triton, fake=_empty_gather)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    x, other, offsets, multiply = inputs
    length = other.shape[1] if other.dim() == 3 else None
    return x if multiply else None, other if multiply else None, offsets, length, multiply


def _gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    x, other, offsets, length, multiply = saved
    d_x = None
    if wanted[0]:
        d_x = call(join_op, d_out, other, offsets, True) if multiply else d_out
    return d_x, call(gather_op, d_out, x, offsets, length) if wanted[1] else None


define_gradient(join_op, save=_save, gradient=_gradient)
