"""`jagged2_mul`: each user's square matrix times another, number by number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.ops.squares import score_places, user_matrices
from jagged_kernels.ops.users import zeros_of
from jagged_kernels.tensors.checks import check_like, check_same_offsets, check_squares
from jagged_kernels.tensors.jagged2 import Jagged2Tensor


def jagged2_mul(
    m: Jagged2Tensor, other: Jagged2Tensor | Tensor, *, backend: Backend = "auto"
) -> Jagged2Tensor:
    """m * other, number by number.

    Args:
        m: [sum of n ** 2] of a floating dtype.
        other: in the dtype of m; a `Jagged2Tensor` over the same offsets, or dense [B, L, L]:
            [i, j] of user b takes other[b, i, j], or 0 where i or j is not below L.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Returns:
        The layout and dtype of m. Both operands get gradients.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype, shape or device, before any launch.

    >>> x = JaggedTensor(torch.ones(3), torch.tensor([0, 2, 3]))
    >>> ones = jagged2_like(x).with_values(torch.ones(5))
    >>> jagged2_mul(ones, torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])).values
    tensor([1., 2., 3., 4., 5.])
    """
    check_squares("m", m)
    chosen = choose_backend(backend, m.values)
    if isinstance(other, Jagged2Tensor):
        check_same_offsets("other", m.offsets, other.offsets, of="m")
        check_like("other", other.values, m.values, of="m")
        # Nothing about it is irregular.
        return m.with_values(m.values * m.with_values(other.values).values)
    check_like("other", other, m.values, of="m")
    if other.dim() != 3 or other.shape[0] != len(m) or other.shape[1] != other.shape[2]:
        raise ValueError(
            f"other must be a Jagged2Tensor or [B, L, L] with B = {len(m)}, "
            f"got {tuple(other.shape)}"
        )
    functions: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
        "triton": partial(call, mul2_op),
        "native": _mul2_native,
        "reference": _mul2_reference,
    }
    return m.with_values(functions[chosen](m.values, other, m.offsets, m.matrix_offsets))


def _mul2_reference(m: Tensor, other: Tensor, offsets: Tensor, matrix_offsets: Tensor) -> Tensor:
    """The specification, m [sum of n ** 2] and other [B, L, L]."""
    length, users = other.shape[1], [zeros_of((0,), m[:0], other[:0])]
    for user, matrix in enumerate(user_matrices(m, offsets, matrix_offsets)):
        n = matrix.shape[0]
        behind = max(n - length, 0)
        factor = torch.nn.functional.pad(other[user, :n, :n], (0, behind, 0, behind))
        users.append((matrix * factor).flatten())
    return torch.cat(users)


def _mul2_native(m: Tensor, other: Tensor, offsets: Tensor, matrix_offsets: Tensor) -> Tensor:
    users, length, _ = other.shape
    if users == 0 or length == 0:
        return m * zeros_of(m.shape, other)
    places = score_places(offsets, matrix_offsets, m.shape[0])
    inside = (places.row < length) & (places.column < length)
    index = (places.user * length + places.row) * length + places.column
    factor = other.flatten()[torch.where(inside, index, 0)]
    return m * factor.masked_fill(~inside, 0.0)


def _mul2_triton(m: Tensor, other: Tensor, offsets: Tensor, matrix_offsets: Tensor) -> Tensor:
    """m [sum of n ** 2] times other [B, L, L]."""
    from jagged_kernels.ops.elementwise.triton_jagged2_mul import launch_mul2

    return launch_mul2(m, other, offsets, matrix_offsets)


def _mul2_triton_pad(
    d_out: Tensor, m: Tensor, offsets: Tensor, matrix_offsets: Tensor, length: int
) -> Tensor:
    """d_out * m, laid out as [B, length, length]: the gradient of `other`."""
    from jagged_kernels.ops.elementwise.triton_jagged2_mul import launch_pad2

    return launch_pad2(d_out, m, offsets, matrix_offsets, length)


def _empty_padded(
    d_out: Tensor, m: Tensor, offsets: Tensor, matrix_offsets: Tensor, length: int
) -> Tensor:
    return m.new_empty((offsets.shape[0] - 1, length, length))


mul2_op = define_op(_mul2_triton, fake=lambda m, *rest: m.new_empty(m.shape))
pad2_op = define_op(_mul2_triton_pad, fake=_empty_padded)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    return inputs


def _gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    m, other, offsets, matrix_offsets = saved
    d_m = call(mul2_op, d_out, other, offsets, matrix_offsets) if wanted[0] else None
    if not wanted[1]:
        return d_m, None
    return d_m, call(pad2_op, d_out, m, offsets, matrix_offsets, other.shape[1])


define_gradient(mul2_op, save=_save, gradient=_gradient)
