"""`jagged_self_difference`: all differences between a user's numbers, as between event times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.ops.squares import row_offsets, score_places
from jagged_kernels.ops.users import spread_users
from jagged_kernels.tensors.checks import check_layout, user_bounds
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.jagged2 import Jagged2Tensor, jagged2_like
from jagged_kernels.tensors.nested import takes_nested

_DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64,
)  # fmt: skip


@takes_nested
def jagged_self_difference(
    x: JaggedTensor, *, like: Jagged2Tensor | None = None, backend: Backend = "auto"
) -> Jagged2Tensor:
    """x_i - x_j for all pairs of a user's tokens, [n, n] a user.

    Args:
        x: [T] of a floating dtype, int32 or int64 (timestamps, for example).
        like: any `Jagged2Tensor` over the same offsets, to take the layout from. Without it the
            call waits for the device: how many differences there are depends on the offsets. By
            native it then is not one graph of `torch.compile`.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Returns:
        [sum of n ** 2] in the dtype of x; differences of half types are rounded once, those of
        integers are exact where they fit. Floating x gets a gradient: the sums of its rows less
        those of its columns.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype or shape, before any launch.

    >>> times = JaggedTensor(torch.tensor([3, 5, 9]), torch.tensor([0, 2, 3]))
    >>> jagged_self_difference(times).values
    tensor([ 0, -2,  2,  0,  0])
    """
    if not isinstance(x, JaggedTensor):
        raise TypeError(f"x must be a JaggedTensor, got {type(x).__name__}")
    if x.dtype not in _DTYPES:
        raise TypeError(f"x must be of a floating dtype, int32 or int64, got {x.dtype}")
    if x.values.dim() != 1:
        raise ValueError(f"x must be [T], got {tuple(x.values.shape)}")
    if like is None:
        like = jagged2_like(x)
    check_layout("like", like, x)
    functions: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
        "triton": partial(call, difference_op),
        "native": _difference_native,
        "reference": _difference_reference,
    }
    function = functions[choose_backend(backend, x.values)]
    total = like.values.shape[0]
    values = function(x.values, x.offsets, like.matrix_offsets, total)
    return Jagged2Tensor._trusted(values, x.offsets, like.matrix_offsets)


def _difference_reference(x: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int) -> Tensor:
    """The specification, [T] -> [total]."""
    users = [x[first:end] for first, end in user_bounds(offsets)]
    return torch.cat([x[:0], *[(u[:, None] - u[None, :]).flatten() for u in users]])


def _difference_native(x: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int) -> Tensor:
    compute = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
    rows = row_offsets(offsets, matrix_offsets, x.shape[0], total)
    of_row = spread_users(x.to(compute)[:, None], rows, total)[:, 0]
    of_column = of_row[score_places(offsets, matrix_offsets, total).transposed]
    return (of_row - of_column).to(x.dtype)


def _difference_triton(x: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int) -> Tensor:
    """[T] -> [total]."""
    from jagged_kernels.ops.elementwise.triton_self_difference import launch_difference

    return launch_difference(x, offsets, matrix_offsets, total)


def _difference_triton_backward(
    d_out: Tensor, offsets: Tensor, matrix_offsets: Tensor, tokens: int
) -> Tensor:
    """[sum of n ** 2] -> [T]: sums of rows less sums of columns."""
    from jagged_kernels.ops.elementwise.triton_self_difference import launch_difference_backward

    return launch_difference_backward(d_out, offsets, matrix_offsets, tokens)


def _empty_numbers(x: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int) -> Tensor:
    return x.new_empty(total)


difference_op = define_op(_difference_triton, fake=_empty_numbers)
difference_backward_op = define_op(
    _difference_triton_backward,
    fake=lambda d_out, offsets, matrix_offsets, tokens: d_out.new_empty(tokens),
)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    x, offsets, matrix_offsets, _total = inputs
    return offsets, matrix_offsets, x.shape[0]


def _gradient(saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor) -> tuple[Tensor]:
    return (call(difference_backward_op, d_out, *saved),)


define_gradient(difference_op, save=_save, gradient=_gradient)
