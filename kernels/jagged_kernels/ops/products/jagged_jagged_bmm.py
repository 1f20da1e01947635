"""`jagged_jagged_bmm`: x^T y of each user, summed over its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.autocast import as_autocast
from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.flops import define_flops
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.ops.products.checks import check_pair
from jagged_kernels.ops.products.jagged_linear import jagged_linear_triton
from jagged_kernels.ops.products.matmul import matmul
from jagged_kernels.ops.products.native_tiles import sum_tiles, to_places, token_tiles
from jagged_kernels.ops.users import zeros_of
from jagged_kernels.tensors.checks import user_bounds
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested


@takes_nested
def jagged_jagged_bmm(x: JaggedTensor, y: JaggedTensor, *, backend: Backend = "auto") -> Tensor:
    """x_b^T @ y_b for each user b.

    Args:
        x: [T, D].
        y: [T, K], with the offsets of `x`.
        backend: "triton", "native", "reference" or "auto" (see `choose_backend`).

    Returns:
        [B, D, K] in the dtype of `x`, 0 for a user without tokens; gradients for x and y. Triton
        sums in float32 and takes scratch memory for two results a program, of which there are at
        most five a multiprocessor; the order of a sum does not change from run to run.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype, shape or device, before any launch.

    Source: the jagged-jagged product of arXiv 2409.15373.

    >>> x = JaggedTensor(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 2, 2]))
    >>> jagged_jagged_bmm(x, x)[0]
    tensor([[10., 14.],
            [14., 20.]])
    """
    if torch._C._is_any_autocast_enabled():
        x, y = as_autocast(x, y)
    check_pair(x, y)
    chosen = choose_backend(backend, x.values)
    function = {
        "triton": partial(call, jagged_jagged_triton),
        "native": _native,
        "reference": _reference,
    }[chosen]
    return function(x.values, y.values, x.offsets)


def _reference(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """The specification: a loop over users."""
    parts = [matmul(x[first:end].T, y[first:end]) for first, end in user_bounds(offsets)]
    return torch.stack(parts) if parts else zeros_of((0, x.shape[1], y.shape[1]), x, y)


def _native(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    tokens, users = x.shape[0], offsets.shape[0] - 1
    if tokens == 0 or users == 0:
        return zeros_of((users, x.shape[1], y.shape[1]), x, y)
    compute = torch.promote_types(x.dtype, torch.float32)
    tiles = token_tiles(offsets, tokens)
    places = (tiles.token, tiles.valid, tiles.place)
    rows, columns = (to_places(z.to(compute), *places) for z in (x, y))
    return sum_tiles(matmul(rows.mT, columns), tiles).to(x.dtype)


def _jagged_jagged_triton(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    from jagged_kernels.ops.products.triton_products import launch_products

    return launch_products(x, y, offsets, offsets.shape[0] - 1)[0]


def _empty_output(x: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((offsets.shape[0] - 1, x.shape[1], y.shape[1]))


jagged_jagged_triton = define_op(_jagged_jagged_triton, fake=_empty_output)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    return inputs


def _gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    x, y, offsets = saved
    d_x = d_y = None
    if wanted[0]:
        d_x = call(jagged_linear_triton, y, d_out.mT, None, offsets, None, "none")
    if wanted[1]:
        d_y = call(jagged_linear_triton, x, d_out, None, offsets, None, "none")
    return d_x, d_y


define_gradient(jagged_jagged_triton, save=_save, gradient=_gradient)
define_flops(jagged_jagged_triton, lambda x, y, offsets: 2 * x.numel() * y.shape[1])
