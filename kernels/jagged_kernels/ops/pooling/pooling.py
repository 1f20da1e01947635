"""Sum, mean and maximum of each user's tokens: [T, ...] -> [B, ...]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.ops.users import sum_users, token_users, zeros_of
from jagged_kernels.tensors.checks import as_columns, check_floats, reshaped, user_bounds
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested


@takes_nested
def jagged_sum(x: JaggedTensor, *, backend: Backend = "auto") -> Tensor:
    """The sum of each user's tokens; 0 for a user without any.

    Args:
        x: [T, ...] of a floating dtype.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Returns:
        [B, ...] in the dtype of x, summed in float32 (float64 for float64).

    Raises:
        TypeError: not a `JaggedTensor` of a floating dtype.

    A user's sum is the same to the bit wherever in a batch the user lies.

    >>> x = JaggedTensor(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3]))
    >>> jagged_sum(x)
    tensor([3., 0., 4.])
    """
    return _pool(x, backend, mean=False)


@takes_nested
def jagged_mean(x: JaggedTensor, *, backend: Backend = "auto") -> Tensor:
    """The mean of each user's tokens; 0 for a user without any. Else as `jagged_sum`.

    >>> x = JaggedTensor(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3]))
    >>> jagged_mean(x)
    tensor([1.5000, 0.0000, 4.0000])
    """
    return _pool(x, backend, mean=True)


@overload
def jagged_max(
    x: JaggedTensor, *, return_indices: Literal[False] = ..., backend: Backend = ...
) -> Tensor: ...
@overload
def jagged_max(
    x: JaggedTensor, *, return_indices: Literal[True], backend: Backend = ...
) -> tuple[Tensor, Tensor]: ...
@takes_nested
def jagged_max(
    x: JaggedTensor, *, return_indices: bool = False, backend: Backend = "auto"
) -> Tensor | tuple[Tensor, Tensor]:
    """The largest of each user's tokens, for each column by itself.

    Args:
        x: [T, ...] of a floating dtype.
        return_indices: also return where each lies.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Returns:
        [B, ...] in the dtype of x, and its place among the user's tokens [B, ...], int64. The
        first of equals; it alone gets the gradient. As in torch, NaN is larger than all. A user
        without tokens has 0 (finite, unlike -inf, so that what comes next stays finite) at -1.

    Raises:
        TypeError: not a `JaggedTensor` of a floating dtype.

    >>> x = JaggedTensor(torch.tensor([1.0, 4.0, 4.0]), torch.tensor([0, 3, 3]))
    >>> jagged_max(x, return_indices=True)
    (tensor([4., 0.]), tensor([ 1, -1]))
    """
    check_floats("x", x)
    values = as_columns(x.values)
    chosen = choose_backend(backend, values)
    if chosen == "triton":
        largest, place = call(max_op, values, x.offsets)
    else:
        function = _max_reference if chosen == "reference" else _max_native
        largest, place = function(values, x.offsets)
    shape = (len(x), *x.values.shape[1:])
    largest, place = reshaped(largest, shape), reshaped(place, shape)
    return (largest, place) if return_indices else largest


def _pool(x: JaggedTensor, backend: Backend, *, mean: bool) -> Tensor:
    check_floats("x", x)
    values = as_columns(x.values)
    chosen = choose_backend(backend, values)
    functions: dict[str, Callable[[Tensor, Tensor, bool], Tensor]] = {
        "triton": partial(call, pool_op),
        "native": _pool_native,
        "reference": _pool_reference,
    }
    out = functions[chosen](values, x.offsets, mean)
    return reshaped(out, (len(x), *x.values.shape[1:]))


def _pool_reference(x: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    """The specification of `jagged_sum` and `jagged_mean`, [T, C] -> [B, C]."""
    compute = torch.promote_types(x.dtype, torch.float32)
    rows = [x[:0]]
    for first, end in user_bounds(offsets):
        total = x[first:end].to(compute).sum(0, keepdim=True)
        rows.append((total / max(end - first, 1) if mean else total).to(x.dtype))
    return torch.cat(rows)


def _pool_native(x: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    total = sum_users(x.to(torch.promote_types(x.dtype, torch.float32)), offsets)
    if mean:
        total = total / offsets.diff().clamp(min=1)[:, None]
    return total.to(x.dtype)


def _max_reference(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The specification of `jagged_max`, [T, C] -> [B, C] twice."""
    empty = x.new_zeros((1, x.shape[1]))
    nowhere = torch.full((1, x.shape[1]), -1, device=x.device)
    tops, places = [x[:0]], [nowhere[:0]]
    for first, end in user_bounds(offsets):
        top, place = empty, nowhere
        if end > first:
            tokens = x[first:end]
            is_top = (tokens == tokens.amax(0)) | tokens.isnan()
            place = is_top.int().argmax(0, keepdim=True)
            top = tokens.gather(0, place)
        tops.append(top)
        places.append(place)
    return torch.cat(tops), torch.cat(places)


def _max_native(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    (tokens, columns), users = x.shape, offsets.shape[0] - 1
    if tokens == 0:
        nowhere = torch.full((users, columns), -1, device=x.device)
        return zeros_of((users, columns), x), nowhere
    user = token_users(offsets, tokens)
    # Extremes are the same in every order: a rerun gives the same bits.
    lengths = offsets.diff().long()
    top = torch.segment_reduce(x.detach(), "max", lengths=lengths, axis=0, unsafe=True)
    is_top = (x == top[user]) | x.isnan()
    # In float64, which counts as far as there are tokens: there is no reduction of integers.
    token = torch.arange(tokens, device=x.device, dtype=torch.float64)[:, None]
    first = torch.segment_reduce(
        torch.where(is_top, token, tokens), "min", lengths=lengths, axis=0, unsafe=True
    )
    first = first.clamp(max=tokens).long()
    is_empty = (offsets.diff() == 0)[:, None]
    column = torch.arange(columns, device=x.device)
    largest = x[first.clamp(max=tokens - 1), column].masked_fill(is_empty, 0.0)
    return largest, (first - offsets[:-1, None]).masked_fill(is_empty, -1)


def _pool_triton(x: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    """[T, C] -> [B, C]."""
    from jagged_kernels.ops.pooling.triton_sum import launch_sum

    return launch_sum(x, offsets, mean=mean)


def _spread_triton(d_out: Tensor, offsets: Tensor, tokens: int, mean: bool) -> Tensor:
    """[B, C] -> [T, C]: the gradient of `_pool_triton`."""
    from jagged_kernels.ops.layout.triton_spread import launch_spread

    return launch_spread(d_out, offsets, tokens, mean=mean)


def _max_triton(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """[T, C] -> values [B, C] and places [B, C]."""
    from jagged_kernels.ops.pooling.triton_max import launch_max

    return launch_max(x, offsets)


def _max_triton_backward(d_out: Tensor, place: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    """[B, C] -> [T, C]: d_out where the largest was, 0 elsewhere."""
    from jagged_kernels.ops.pooling.triton_max import launch_max_backward

    return launch_max_backward(d_out, place, offsets, tokens)


def _empty_users(x: Tensor, offsets: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((offsets.shape[0] - 1, x.shape[1]))


def _empty_max(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    empty = _empty_users(x, offsets)
    return empty, empty.new_empty(empty.shape, dtype=torch.int64)


def _empty_spread(d_out: Tensor, offsets: Tensor, tokens: int, mean: bool) -> Tensor:
    return d_out.new_empty((tokens, d_out.shape[1]))


def _empty_max_backward(d_out: Tensor, place: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    return d_out.new_empty((tokens, d_out.shape[1]))


pool_op = define_op(_pool_triton, fake=_empty_users)
spread_op = define_op(_spread_triton, fake=_empty_spread)
max_op = define_op(_max_triton, fake=_empty_max)
max_backward_op = define_op(_max_triton_backward, fake=_empty_max_backward)


def _save_pool(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    x, offsets, mean = inputs
    return offsets, x.shape[0], mean


def _pool_gradient(saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor) -> tuple[Tensor]:
    return (call(spread_op, d_out, *saved),)


def _save_max(inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    x, offsets = inputs
    return output[1], offsets, x.shape[0]


def _max_gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor, d_place: None
) -> tuple[Tensor]:
    return (call(max_backward_op, d_out, *saved),)


define_gradient(pool_op, save=_save_pool, gradient=_pool_gradient)
define_gradient(max_op, save=_save_max, gradient=_max_gradient)
