"""`jagged_last_k`: each user's most recent tokens, at the end of dense rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.core.sizes import as_int
from jagged_kernels.ops.users import zeros_of
from jagged_kernels.tensors.checks import as_columns, check_floats, reshaped, user_bounds
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested


@takes_nested
def jagged_last_k(x: JaggedTensor, k: int, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """The last k tokens of each user, the most recent at k - 1.

    Args:
        x: [T, ...] of a floating dtype.
        k: at least 1.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Returns:
        [B, k, ...] in the dtype of x, 0 before the tokens of users with fewer than k; and [B],
        how many there are, in the dtype of the offsets.

    Raises:
        TypeError, ValueError: not a `JaggedTensor` of a floating dtype, or k no int or below 1.

    >>> x = JaggedTensor(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 3, 3, 4]))
    >>> jagged_last_k(x, 2)
    (tensor([[2., 4.],
            [0., 0.],
            [0., 8.]]), tensor([2, 0, 1]))
    """
    check_floats("x", x)
    k = as_int("k", k)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    values = as_columns(x.values)
    functions: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
        "triton": partial(call, last_k_op),
        "native": _last_k_native,
        "reference": _last_k_reference,
    }
    out = functions[choose_backend(backend, values)](values, x.offsets, k)
    return reshaped(out, (len(x), k, *x.values.shape[1:])), x.lengths.clamp(max=k)


def _last_k_reference(x: Tensor, offsets: Tensor, k: int) -> Tensor:
    """The specification, [T, C] -> [B, k, C]."""
    users = [zeros_of((0, k, x.shape[1]), x[:0])]
    for first, end in user_bounds(offsets):
        last = x[max(first, end - k) : end]
        users.append(torch.cat([x.new_zeros((k - len(last), x.shape[1])), last])[None])
    return torch.cat(users)


def _last_k_native(x: Tensor, offsets: Tensor, k: int) -> Tensor:
    if x.shape[0] == 0:
        return zeros_of((offsets.shape[0] - 1, k, x.shape[1]), x)
    token = offsets[1:, None] - k + torch.arange(k, device=x.device)
    is_before = token < offsets[:-1, None]
    return x[token.clamp(min=0)].masked_fill(is_before[:, :, None], 0.0)


def _last_k_triton(x: Tensor, offsets: Tensor, k: int) -> Tensor:
    """[T, C] -> [B, k, C]."""
    from jagged_kernels.ops.layout.triton_spread import launch_pad

    return launch_pad(x, offsets, k, at_end=True)


def _last_k_triton_backward(d_out: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    """[B, k, C] -> [T, C]."""
    from jagged_kernels.ops.layout.triton_spread import launch_spread

    return launch_spread(d_out, offsets, tokens, at_end=True)


def _empty_last(x: Tensor, offsets: Tensor, k: int) -> Tensor:
    return x.new_empty((offsets.shape[0] - 1, k, x.shape[1]))


def _empty_tokens(d_out: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    return d_out.new_empty((tokens, d_out.shape[2]))


last_k_op = define_op(_last_k_triton, fake=_empty_last)
last_k_backward_op = define_op(_last_k_triton_backward, fake=_empty_tokens)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    x, offsets, _k = inputs
    return offsets, x.shape[0]


def _gradient(saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor) -> tuple[Tensor]:
    return (call(last_k_backward_op, d_out, *saved),)


define_gradient(last_k_op, save=_save, gradient=_gradient)
