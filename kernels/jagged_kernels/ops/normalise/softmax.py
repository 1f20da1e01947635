"""Softmax over a jagged dimension: of [T, ...], and of each user's square matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.ops.squares import row_offsets, score_places, user_matrices
from jagged_kernels.ops.users import spread_users, sum_users, token_users
from jagged_kernels.tensors.checks import (
    as_columns,
    check_floats,
    check_squares,
    reshaped,
    user_bounds,
)
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.jagged2 import Jagged2Tensor
from jagged_kernels.tensors.nested import takes_nested


@takes_nested
def jagged_softmax(x: JaggedTensor, *, backend: Backend = "auto") -> JaggedTensor:
    """Softmax over each user's tokens, for each column by itself.

    Args:
        x: [T, ...] of a floating dtype; users of any length.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Returns:
        [T, ...] with the offsets and dtype of x; computed in float32 (float64 for float64).

    Raises:
        TypeError: not a `JaggedTensor` of a floating dtype.

    A user's result is the same to the bit wherever in a batch the user lies.

    >>> x = JaggedTensor(torch.tensor([0.0, 0.0, 5.0]), torch.tensor([0, 2, 2, 3]))
    >>> jagged_softmax(x).values
    tensor([0.5000, 0.5000, 1.0000])
    """
    check_floats("x", x)
    values = as_columns(x.values)
    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "triton": partial(call, softmax_op),
        "native": _softmax_native,
        "reference": _softmax_reference,
    }
    y = functions[choose_backend(backend, values)](values, x.offsets)
    return x.with_values(reshaped(y, x.values.shape))


def jagged2_softmax(
    m: Jagged2Tensor, *, dim: Literal[-1, -2] = -1, backend: Backend = "auto"
) -> Jagged2Tensor:
    """Softmax of each user's [n, n] along its rows (dim -1) or its columns (dim -2).

    Args:
        m: [sum of n ** 2] of a floating dtype.
        dim: -1: each row sums to 1; -2: each column.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Returns:
        The layout and dtype of m; computed in float32 (float64 for float64).

    Raises:
        TypeError, ValueError: not a `Jagged2Tensor` of a floating dtype, or another dim.

    >>> from jagged_kernels import jagged2_like
    >>> x = JaggedTensor(torch.zeros(3), torch.tensor([0, 2, 3]))
    >>> jagged2_softmax(jagged2_like(x)).values
    tensor([0.5000, 0.5000, 0.5000, 0.5000, 1.0000])
    """
    check_squares("m", m)
    if dim not in (-1, -2):
        raise ValueError(f"dim must be -1 or -2, got {dim}")
    functions: dict[str, Callable[[Tensor, Tensor, Tensor, bool], Tensor]] = {
        "triton": partial(call, softmax2_op),
        "native": softmax2_native_op,
        "reference": _softmax2_reference,
    }
    function = functions[choose_backend(backend, m.values)]
    return m.with_values(function(m.values, m.offsets, m.matrix_offsets, dim == -1))


def _softmax_reference(x: Tensor, offsets: Tensor) -> Tensor:
    """The specification of `jagged_softmax`, [T, C]."""
    return torch.cat([x[:0], *[x[a:b].softmax(0).to(x.dtype) for a, b in user_bounds(offsets)]])


def _softmax_native(x: Tensor, offsets: Tensor) -> Tensor:
    (tokens, columns), users = x.shape, offsets.shape[0] - 1
    scores = x.to(torch.promote_types(x.dtype, torch.float32))
    # The largest is the same in every order: a rerun gives the same bits. It needs no gradient.
    user = token_users(offsets, tokens)[:, None].expand(-1, columns)
    top = scores.new_full((users, columns), -torch.inf)
    top = top.scatter_reduce(0, user, scores.detach(), "amax")
    weights = (scores - spread_users(top, offsets, tokens)).exp()
    return (weights / spread_users(sum_users(weights, offsets), offsets, tokens)).to(x.dtype)


def _softmax2_reference(x: Tensor, offsets: Tensor, matrix_offsets: Tensor, by_row: bool) -> Tensor:
    """The specification of `jagged2_softmax`, [sum of n ** 2]."""
    matrices, dim = user_matrices(x, offsets, matrix_offsets), -1 if by_row else -2
    return torch.cat([x[:0], *[m.softmax(dim).flatten().to(x.dtype) for m in matrices]])


def _native_softmax2(x: Tensor, offsets: Tensor, matrix_offsets: Tensor, by_row: bool) -> Tensor:
    """An operator, and so opaque to tracing, because the number of rows depends on sizes."""
    order, rows = _rows(x, offsets, matrix_offsets, by_row)
    y = _softmax_native(x[order, None], rows)[:, 0]
    return torch.empty_like(y).index_put_((order,), y)


def _native_softmax2_backward(
    d_y: Tensor, y: Tensor, offsets: Tensor, matrix_offsets: Tensor, by_row: bool
) -> Tensor:
    order, rows = _rows(y, offsets, matrix_offsets, by_row)
    compute = torch.promote_types(y.dtype, torch.float32)
    y_rows, d_rows = y[order, None].to(compute), d_y[order, None].to(compute)
    total = spread_users(sum_users(y_rows * d_rows, rows), rows, y.shape[0])
    d_x = (y_rows * (d_rows - total))[:, 0].to(y.dtype)
    return torch.empty_like(d_x).index_put_((order,), d_x)


def _rows(
    x: Tensor, offsets: Tensor, matrix_offsets: Tensor, by_row: bool
) -> tuple[Tensor, Tensor]:
    """(scores in the order of rows, or of columns; where each of those begins)."""
    total, users = x.shape[0], offsets.shape[0] - 1
    # At least the number of tokens (Cauchy-Schwarz), without waiting for the device.
    rows = row_offsets(offsets, matrix_offsets, math.isqrt(users * total), total)
    if by_row:
        return torch.arange(total, device=x.device), rows
    return score_places(offsets, matrix_offsets, total).transposed, rows


def _softmax_triton(x: Tensor, offsets: Tensor) -> Tensor:
    """[T, C]."""
    from jagged_kernels.ops.normalise.triton_softmax import launch_softmax

    return launch_softmax(x, offsets)


def _softmax_triton_backward(d_y: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    from jagged_kernels.ops.normalise.triton_softmax import launch_softmax_backward

    return launch_softmax_backward(d_y, y, offsets)


def _softmax2_triton(x: Tensor, offsets: Tensor, matrix_offsets: Tensor, by_row: bool) -> Tensor:
    """[sum of n ** 2]."""
    from jagged_kernels.ops.normalise.triton_softmax2 import launch_softmax2

    return launch_softmax2(x, offsets, matrix_offsets, by_row=by_row)


def _softmax2_triton_backward(
    d_y: Tensor, y: Tensor, offsets: Tensor, matrix_offsets: Tensor, by_row: bool
) -> Tensor:
    from jagged_kernels.ops.normalise.triton_softmax2 import launch_softmax2

    return launch_softmax2(y, offsets, matrix_offsets, by_row=by_row, d_y=d_y)


def _empty_output(x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


softmax_op = define_op(_softmax_triton, fake=_empty_output)
softmax_backward_op = define_op(_softmax_triton_backward, fake=_empty_output)
softmax2_op = define_op(_softmax2_triton, fake=_empty_output)
softmax2_backward_op = define_op(_softmax2_triton_backward, fake=_empty_output)
softmax2_native_op = define_op(_native_softmax2, fake=_empty_output)
softmax2_native_backward_op = define_op(_native_softmax2_backward, fake=_empty_output)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    return (output, *inputs[1:])


def _define_gradient_of(op: Any, backward_op: Any) -> None:
    def gradient(saved: Sequence[Any], wanted: Sequence[bool], d_y: Tensor) -> tuple[Tensor]:
        return (call(backward_op, d_y, *saved),)

    define_gradient(op, save=_save, gradient=gradient)


_define_gradient_of(softmax_op, softmax_backward_op)
_define_gradient_of(softmax2_op, softmax2_backward_op)
_define_gradient_of(softmax2_native_op, softmax2_native_backward_op)
