"""`jagged_weighted_sum`: pooling with a weight for each token, or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend_for_rows
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.ops.users import sum_users, zeros_of
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
def jagged_weighted_sum(
    x: JaggedTensor, weights: JaggedTensor | Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """The sum of w_t * x_t over each user's tokens, for each of H sets of weights.

    Args:
        x: [T, ...] of a floating dtype.
        weights: [T] or [T, H] in the dtype of x; a `JaggedTensor` with the offsets of x or its
            values.
        backend: "triton" (up to 8192 columns), "native", "reference" or "auto" (triton on CUDA
            tensors, beyond 8192 columns native).

    Returns:
        [B, ...] for weights [T], [B, H, ...] for [T, H], in the dtype of x, summed in float32
        (float64 for float64); 0 for a user without tokens. Both operands get gradients.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype, shape or device, before any launch.
        NotImplementedError: more than 8192 columns on the triton backend.

    The native backend makes an intermediate [T, H, ...].

    >>> x = JaggedTensor(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3]))
    >>> jagged_weighted_sum(x, torch.tensor([1.0, 0.5, 2.0]))
    tensor([2., 0., 8.])
    """
    check_floats("x", x)
    if isinstance(weights, JaggedTensor):
        check_same_offsets("weights", x.offsets, weights.offsets)
        weights = weights.values
    check_like("weights", weights, x.values)
    if weights.dim() not in (1, 2) or weights.shape[0] != x.values.shape[0]:
        raise ValueError(
            f"weights must be [T] or [T, H] for x {tuple(x.values.shape)}, "
            f"got {tuple(weights.shape)}"
        )
    values = as_columns(x.values)
    functions: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "triton": partial(call, weighted_sum_op),
        "native": _weighted_sum_native,
        "reference": _weighted_sum_reference,
    }
    chosen = choose_backend_for_rows(backend, values)
    out = functions[chosen](values, as_columns(weights), x.offsets)
    return reshaped(out, (len(x), *weights.shape[1:], *x.values.shape[1:]))


def _weighted_sum_reference(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """The specification, x [T, C], weights [T, H] -> [B, H, C]."""
    compute = torch.promote_types(x.dtype, torch.float32)
    rows = [zeros_of((0, weights.shape[1], x.shape[1]), x[:0], weights[:0])]
    for first, end in user_bounds(offsets):
        terms = weights[first:end, :, None].to(compute) * x[first:end, None, :].to(compute)
        rows.append(terms.sum(0, keepdim=True).to(x.dtype))
    return torch.cat(rows)


def _weighted_sum_native(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    compute = torch.promote_types(x.dtype, torch.float32)
    terms = weights.to(compute)[:, :, None] * x.to(compute)[:, None, :]
    return sum_users(terms.flatten(1), offsets).unflatten(1, terms.shape[1:]).to(x.dtype)


def _weighted_sum_triton(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """x [T, C], weights [T, H] -> [B, H, C]."""
    from jagged_kernels.ops.pooling.triton_sum import launch_sum

    return launch_sum(x, offsets, weights=weights)


def _weighted_sum_triton_backward(
    d_out: Tensor, x: Tensor, weights: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, C] and weights [T, H]."""
    from jagged_kernels.ops.pooling.triton_weighted_sum import launch_weighted_sum_backward

    return launch_weighted_sum_backward(d_out, x, weights, offsets)


def _empty_sum(x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((offsets.shape[0] - 1, weights.shape[1], x.shape[1]))


def _empty_gradients(
    d_out: Tensor, x: Tensor, weights: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weights.new_empty(weights.shape)


weighted_sum_op = define_op(_weighted_sum_triton, fake=_empty_sum)
weighted_sum_backward_op = define_op(_weighted_sum_triton_backward, fake=_empty_gradients)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    return inputs


def _gradient(saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor) -> tuple[Tensor, Tensor]:
    return call(weighted_sum_backward_op, d_out, *saved)


define_gradient(weighted_sum_op, save=_save, gradient=_gradient)
