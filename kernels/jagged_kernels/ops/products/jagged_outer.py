"""`jagged_outer` and `jagged2_matmul`: scores between a user's tokens, and sums they weigh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged_kernels.core.autocast import as_autocast
from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.contents import total_of
from jagged_kernels.core.flops import define_flops
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.ops.products.checks import check_matrix, check_pair
from jagged_kernels.ops.products.matmul import matmul
from jagged_kernels.ops.products.native_tiles import (
    TILE,
    TokenTiles,
    from_places,
    sum_into,
    take,
    to_places,
    token_tiles,
)
from jagged_kernels.ops.squares import user_matrices
from jagged_kernels.ops.users import zeros_of
from jagged_kernels.tensors.checks import check_layout, check_like, user_bounds
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.jagged2 import Jagged2Tensor, jagged2_offsets
from jagged_kernels.tensors.nested import takes_nested


@takes_nested
def jagged_outer(
    x: JaggedTensor,
    y: JaggedTensor,
    *,
    like: Jagged2Tensor | None = None,
    backend: Backend = "auto",
) -> Jagged2Tensor:
    """x_b @ y_b^T for each user b: the scores of all pairs of its tokens.

    Args:
        x: [T, D].
        y: [T, D], with the offsets of `x`.
        like: the layout of the result, from `jagged2_like` or another operation on this batch.
            None: made here, which waits for the device, and by native is not one graph of
            `torch.compile`.
        backend: "triton", "native", "reference" or "auto" (see `choose_backend`).

    Returns:
        Values [sum of n_b ** 2] in the dtype of `x`; gradients for x and y.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype, shape or device, before any launch.

    Source: the jagged-jagged product of arXiv 2409.15373 (attention scores before the softmax).

    >>> x = JaggedTensor(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 2, 3]))
    >>> jagged_outer(x, x).values
    tensor([1., 2., 2., 4., 9.])
    """
    if torch._C._is_any_autocast_enabled():
        x, y = as_autocast(x, y)
    check_pair(x, y)
    if x.values.shape[1] != y.values.shape[1]:
        raise ValueError(
            "x and y must have the same width D, got "
            f"{tuple(x.values.shape)} and {tuple(y.values.shape)}"
        )
    if like is None:
        matrix_offsets = jagged2_offsets(x.offsets)
        total = total_of(matrix_offsets, None, "scores", "like")
    else:
        check_layout("like", like, x)
        matrix_offsets, total = like.matrix_offsets, like.values.shape[0]
    chosen = choose_backend(backend, x.values)
    function = {
        "triton": partial(call, jagged_outer_triton),
        "native": _outer_native,
        "reference": _outer_reference,
    }[chosen]
    values = function(x.values, y.values, x.offsets, matrix_offsets, total)
    return Jagged2Tensor._trusted(values, x.offsets, matrix_offsets)


@takes_nested
def jagged2_matmul(
    m: Jagged2Tensor, x: JaggedTensor, *, transpose: bool = False, backend: Backend = "auto"
) -> JaggedTensor:
    """m_b @ x_b for each user b, or m_b^T @ x_b.

    Args:
        m: a matrix [n_b, n_b] for each user of `x`.
        x: [T, D].
        transpose: take the transpose of every matrix.
        backend: as in `jagged_outer`.

    Returns:
        [T, D] in the dtype of `x`; gradients for m and x.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype, shape or device, before any launch.

    >>> x = JaggedTensor(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 2, 3]))
    >>> jagged2_matmul(jagged_outer(x, x), x).values.T
    tensor([[ 5., 10., 27.]])
    """
    if torch._C._is_any_autocast_enabled():
        m, x = as_autocast(m, x)
    check_matrix("x", x)
    check_layout("m", m, x)
    check_like("m", m.values, x.values)
    chosen = choose_backend(backend, x.values)
    function = {
        "triton": partial(call, jagged2_matmul_triton),
        "native": _matmul_native,
        "reference": _matmul_reference,
    }[chosen]
    return x.with_values(function(m.values, x.values, x.offsets, m.matrix_offsets, transpose))


def _outer_reference(
    x: Tensor, y: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int
) -> Tensor:
    """The specification: a loop over users."""
    parts = [matmul(x[first:end], y[first:end].T) for first, end in user_bounds(offsets)]
    return torch.cat([zeros_of((0,), x[:0], y[:0]), *[part.flatten() for part in parts]])


def _matmul_reference(
    m: Tensor, x: Tensor, offsets: Tensor, matrix_offsets: Tensor, transpose: bool
) -> Tensor:
    """The specification: a loop over users."""
    parts = [zeros_of((0, x.shape[1]), m[:0], x[:0])]
    matrices = user_matrices(m, offsets, matrix_offsets)
    for (first, end), matrix in zip(user_bounds(offsets), matrices, strict=True):
        parts.append(matmul(matrix.T if transpose else matrix, x[first:end]))
    return torch.cat(parts)


class _MatrixTiles(NamedTuple):
    """[TILE, TILE] tiles of the users' matrices, of which n / TILE + 1 by n / TILE + 1 are
    enough; those that a user does not need are empty."""

    row: Tensor  # [R], which of the token tiles its rows are
    column: Tensor  # [R]
    value: Tensor  # [R, TILE, TILE], value of each place; 0 where there is none
    valid: Tensor  # [R, TILE, TILE]
    place: Tensor  # [sum of n ** 2], where a value is among the places


def _matrix_tiles(
    tokens: TokenTiles, offsets: Tensor, matrix_offsets: Tensor, count: int, total: int
) -> _MatrixTiles:
    """`count`: of all tokens; `total`: of all values."""
    device, users = offsets.device, offsets.shape[0] - 1
    offsets = offsets.long()
    lengths = offsets.diff()
    side = (lengths + TILE - 1) // TILE
    first = (matrix_offsets + 2 * TILE * offsets) // TILE**2
    first = first + torch.arange(users + 1, device=device)
    tile = torch.arange((total + 2 * TILE * count) // TILE**2 + users, device=device)
    user = torch.searchsorted(first, tile, right=True) - 1
    number = tile - first[user]
    used = number < side[user] ** 2
    number = torch.where(used, number, 0)
    across = side[user].clamp(min=1)
    row, column = number // across, number % across
    inside = torch.arange(TILE, device=device)
    i = (row * TILE)[:, None, None] + inside[:, None]
    j = (column * TILE)[:, None, None] + inside
    n = lengths[user][:, None, None]
    valid = used[:, None, None] & (i < n) & (j < n)
    index = torch.where(valid, matrix_offsets[user][:, None, None] + i * n + j, 0)

    value = torch.arange(total, device=device)
    owner = torch.searchsorted(matrix_offsets, value, right=True) - 1
    value, n = value - matrix_offsets[owner], lengths[owner]
    i, j = value // n, value % n
    place = (first[owner] + i // TILE * side[owner] + j // TILE) * TILE**2
    place = place + i % TILE * TILE + j % TILE
    begin = tokens.first[user]
    return _MatrixTiles(begin + row, begin + column, index, valid, place)


def _outer_native(
    x: Tensor, y: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int
) -> Tensor:
    count = x.shape[0]
    if count == 0 or total == 0:
        return zeros_of((total,), x, y)
    compute = torch.promote_types(x.dtype, torch.float32)
    tokens = token_tiles(offsets, count)
    matrices = _matrix_tiles(tokens, offsets, matrix_offsets, count, total)
    places = (tokens.token, tokens.valid, tokens.place)
    rows = take(to_places(x.to(compute), *places), matrices.row)
    columns = take(to_places(y.to(compute), *places), matrices.column)
    return from_places(matmul(rows, columns.mT), *matrices[2:]).to(x.dtype)


def _matmul_native(
    m: Tensor, x: Tensor, offsets: Tensor, matrix_offsets: Tensor, transpose: bool
) -> Tensor:
    count, total = x.shape[0], m.shape[0]
    if count == 0 or total == 0:
        return zeros_of(x.shape, m, x)
    compute = torch.promote_types(x.dtype, torch.float32)
    tokens = token_tiles(offsets, count)
    matrices = _matrix_tiles(tokens, offsets, matrix_offsets, count, total)
    places = (tokens.token, tokens.valid, tokens.place)
    matrix, source, target = to_places(m.to(compute), *matrices[2:]), *matrices[1::-1]
    if transpose:
        matrix, source, target = matrix.mT, target, source
    parts = matmul(matrix, take(to_places(x.to(compute), *places), source))
    out = sum_into(parts, target, tokens.user.shape[0])
    return from_places(out, *places).to(x.dtype)


def _jagged_outer_triton(
    x: Tensor, y: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int
) -> Tensor:
    from jagged_kernels.ops.products.triton_jagged_outer import launch_outer

    return launch_outer(x, y, offsets, matrix_offsets, total)


def _jagged2_matmul_triton(
    m: Tensor, x: Tensor, offsets: Tensor, matrix_offsets: Tensor, transpose: bool
) -> Tensor:
    from jagged_kernels.ops.products.triton_jagged2_matmul import launch_matmul

    return launch_matmul(m, x, offsets, matrix_offsets, transpose=transpose)


def _jagged_outer_triton_backward(
    d_out: Tensor, x: Tensor, y: Tensor, offsets: Tensor, matrix_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, dy)"""
    from jagged_kernels.ops.products.triton_jagged2_matmul import launch_outer_backward

    return launch_outer_backward(d_out, x, y, offsets, matrix_offsets)


def _empty_outer(
    x: Tensor, y: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int
) -> Tensor:
    return x.new_empty(total)


def _empty_matmul(m: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape)


_SCHEMA = "Tensor offsets, Tensor matrix_offsets"
jagged_outer_triton = define_op(
    _jagged_outer_triton,
    fake=_empty_outer,
    schema=f"(Tensor x, Tensor y, {_SCHEMA}, SymInt total) -> Tensor",
)
jagged2_matmul_triton = define_op(
    _jagged2_matmul_triton,
    fake=_empty_matmul,
    schema=f"(Tensor m, Tensor x, {_SCHEMA}, bool transpose) -> Tensor",
)
jagged_outer_triton_backward = define_op(
    _jagged_outer_triton_backward,
    fake=lambda d_out, x, y, *rest: (x.new_empty(x.shape), y.new_empty(y.shape)),
)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    return inputs


def _outer_gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    x, y, offsets, matrix_offsets, _ = saved
    if all(wanted[:2]):
        return call(jagged_outer_triton_backward, d_out, x, y, offsets, matrix_offsets)
    d_x = d_y = None
    if wanted[0]:
        d_x = call(jagged2_matmul_triton, d_out, y, offsets, matrix_offsets, False)
    if wanted[1]:
        d_y = call(jagged2_matmul_triton, d_out, x, offsets, matrix_offsets, True)
    return d_x, d_y


def _matmul_gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    m, x, offsets, matrix_offsets, transpose = saved
    d_m = d_x = None
    if wanted[0]:
        pair = (x, d_out) if transpose else (d_out, x)
        d_m = call(jagged_outer_triton, *pair, offsets, matrix_offsets, m.shape[0])
    if wanted[1]:
        d_x = call(jagged2_matmul_triton, m, d_out, offsets, matrix_offsets, not transpose)
    return d_m, d_x


define_gradient(jagged_outer_triton, save=_save, gradient=_outer_gradient)
define_gradient(jagged2_matmul_triton, save=_save, gradient=_matmul_gradient)
define_flops(jagged_outer_triton, lambda x, y, *rest: 2 * x.shape[1] * rest[-1])
define_flops(jagged2_matmul_triton, lambda m, x, *rest: 2 * x.shape[1] * m.numel())
define_flops(
    jagged_outer_triton_backward, lambda d_out, x, *rest: 2 * 2 * x.shape[1] * d_out.numel()
)
