"""Jagged products in plain PyTorch: tokens in tiles of one user each, for batched matrix products.

No tile has tokens of two users and no user pads another, so padding is less than a tile a user. How
many tiles there can be is known from the numbers of tokens and users: nothing waits for a device.
Gradients are gathers and sums in a fixed order, so that they repeat to the last bit; each step is
the gradient of another, so that a derivative of any order is there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged_kernels.core.operators import transforms
from jagged_kernels.ops.users import token_users

TILE = 32


class TokenTiles(NamedTuple):
    """R = T // TILE + B tiles; those that a user does not need are empty.

    User b owns tiles offsets[b] // TILE + b up to that of user b + 1.
    """

    user: Tensor  # [R]
    first: Tensor  # [B + 1], first tile of each user, and R
    token: Tensor  # [R, TILE], token of each place; 0 where there is none
    valid: Tensor  # [R, TILE]
    place: Tensor  # [T], where a token is among the R * TILE places


def token_tiles(offsets: Tensor, tokens: int) -> TokenTiles:
    """For at least one user."""
    users = offsets.shape[0] - 1
    count = tokens // TILE + users
    device = offsets.device
    offsets = offsets.long()
    first = offsets // TILE + torch.arange(users + 1, device=device)
    tile = torch.arange(count, device=device)
    user = torch.searchsorted(first, tile, right=True) - 1
    start = offsets[user] + (tile - first[user]) * TILE
    index = start[:, None] + torch.arange(TILE, device=device)
    valid = index < offsets[user + 1][:, None]
    token = torch.arange(tokens, device=device)
    owner = token_users(offsets, tokens)
    place = first[owner] * TILE + token - offsets[owner]
    return TokenTiles(user, first, torch.where(valid, index, 0), valid, place)


def to_places(x: Tensor, index: Tensor, valid: Tensor, place: Tensor) -> Tensor:
    """[N, ...] -> [*index.shape, ...]: x[index], 0 where not valid.

    Args:
        place: [N], where each of x is in the flat result; the inverse of `index`.
    """
    if transforms():
        return _gather(x, index, valid)
    return _ToPlaces.apply(x, index, valid, place)  # pyright: ignore[reportReturnType]


def from_places(padded: Tensor, index: Tensor, valid: Tensor, place: Tensor) -> Tensor:
    """The inverse of `to_places`."""
    if transforms():
        return _flat(padded, index, place)
    return _FromPlaces.apply(padded, index, valid, place)  # pyright: ignore[reportReturnType]


def take(x: Tensor, index: Tensor) -> Tensor:
    """x[index] for an index [M] with repetitions."""
    if transforms():
        return x[index]
    return _Take.apply(x, index)  # pyright: ignore[reportReturnType]


def sum_into(x: Tensor, index: Tensor, count: int) -> Tensor:
    """[M, ...] -> [count, ...]: the sum of all x with each index; the transpose of `take`."""
    if transforms():
        return _sum(x, index, count)
    return _SumInto.apply(x, index, count)  # pyright: ignore[reportReturnType]


def sum_tiles(x: Tensor, tiles: TokenTiles) -> Tensor:
    """[R, ...] -> [B, ...]: the sum of each user's tiles."""
    if transforms():
        return _sum_segments(x, tiles.first.diff())
    return _SumTiles.apply(x, tiles.user, tiles.first)  # pyright: ignore[reportReturnType]


def _gather(x: Tensor, index: Tensor, valid: Tensor) -> Tensor:
    if x.shape[0] == 0:
        return x.new_zeros((*index.shape, *x.shape[1:]))
    return x[index].masked_fill(~valid.view(*valid.shape, *[1] * (x.dim() - 1)), 0.0)


def _flat(padded: Tensor, index: Tensor, place: Tensor) -> Tensor:
    # Not `flatten`, which has no rule for batched gradients.
    return padded.reshape(index.numel(), *padded.shape[index.dim() :])[place]


def _sum(x: Tensor, index: Tensor, count: int) -> Tensor:
    order = torch.argsort(index, stable=True)
    bounds = torch.arange(count + 1, device=index.device)
    return _sum_segments(x[order], torch.searchsorted(index[order], bounds).diff())


def _sum_segments(x: Tensor, lengths: Tensor) -> Tensor:
    return torch.segment_reduce(x, "sum", lengths=lengths, axis=0, unsafe=True)


class _ToPlaces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, valid: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(index, valid, place)
        return _gather(x, index, valid)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return from_places(d_out, *ctx.saved_tensors), None, None, None


class _FromPlaces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, padded: Tensor, index: Tensor, valid: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(index, valid, place)
        return _flat(padded, index, place)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return to_places(d_out, *ctx.saved_tensors), None, None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = x.shape[0]
        return x[index]

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return sum_into(d_out, ctx.saved_tensors[0], ctx.count), None


class _SumInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index)
        return _sum(x, index, count)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return take(d_out, ctx.saved_tensors[0]), None, None


class _SumTiles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, user: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(user)
        return _sum_segments(x, first.diff())

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return take(d_out, ctx.saved_tensors[0]), None, None
