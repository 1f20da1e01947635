"""What native implementations are built from: sums over a user's tokens, and the reverse.

Both are vectorised, without padding or atomics, and each is the other's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.operators import define_gradient, define_op
from jagged_kernels.core.sizes import integer_dtype

# Sums of so many tokens are added in float64: one long float32 sum would cost digits.
_PIECE = 32


def token_users(offsets: Tensor, tokens: int) -> Tensor:
    """[T]: the user of each token."""
    token = torch.arange(tokens, device=offsets.device, dtype=offsets.dtype)
    # Not in offsets[1:], without the - 1: Inductor loses where a view of boundaries begins.
    return torch.searchsorted(offsets, token, right=True) - 1


def token_positions(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """([T] user, [T] place among the user's tokens), int64."""
    user = token_users(offsets, tokens)
    token = torch.arange(tokens, device=offsets.device)
    return user, token - offsets.long()[user]


def zeros_of(shape: Sequence[int], *inputs: Tensor) -> Tensor:
    """Zeros of a shape that are a function of the inputs, which so get gradients of 0.

    For results without numbers, or of inputs without any: a sum of numbers need not be finite.
    In the dtype of the first input.
    """
    first = inputs[0]
    # From the zeros on: the 0 of Python's own would make integers of bools.
    return sum((x.sum(dtype=first.dtype) for x in inputs), first.new_zeros(shape))


def sum_users(x: Tensor, offsets: Tensor) -> Tensor:
    """[T, C] -> [B, C], in x's dtype: float32 or float64. Differentiable."""
    return _sum_users_op(x, offsets)


def spread_users(per_user: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    """[B, C] -> [T, C]: each token gets the row of its user. Differentiable."""
    return _spread_users_op(per_user, offsets, tokens)


def _native_sum_users(x: Tensor, offsets: Tensor) -> Tensor:
    tokens, users = x.shape[0], offsets.shape[0] - 1
    if x.numel() == 0 or users == 0:
        return x.new_zeros((users, x.shape[1]))
    offsets = offsets.long()
    # User b's pieces are those from offsets[b] // _PIECE + b on; at most one of them is empty.
    first_piece = offsets // _PIECE + torch.arange(users + 1, device=x.device)
    piece = torch.arange(tokens // _PIECE + users, device=x.device)
    user = (torch.searchsorted(first_piece, piece, right=True) - 1).clamp(max=users - 1)
    begin = offsets[user] + (piece - first_piece[user]) * _PIECE
    sums = _sum_rows(x, torch.minimum(begin, offsets[user + 1]))
    return _sum_rows(sums.double(), first_piece[:-1]).to(x.dtype)


def _sum_rows(x: Tensor, begin: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device)
    return torch.nn.functional.embedding_bag(rows, x.contiguous(), begin, mode="sum")


def _native_spread_users(per_user: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    return per_user.repeat_interleave(offsets.diff(), dim=0, output_size=tokens)


def _empty_sum(x: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty((offsets.shape[0] - 1, x.shape[1]))


def _empty_spread(per_user: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    return per_user.new_empty((tokens, per_user.shape[1]))


_sum_users_op = define_op(_native_sum_users, fake=_empty_sum)
_spread_users_op = define_op(_native_spread_users, fake=_empty_spread)


def _save_sum(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    x, offsets = inputs
    return offsets, x.shape[0]


def _sum_gradient(saved: Sequence[Any], wanted: Sequence[bool], d_sum: Tensor) -> tuple[Tensor]:
    return (spread_users(d_sum, *saved),)


def _save_spread(inputs: tuple[Any, ...], output: Tensor) -> tuple[Tensor]:
    return (inputs[1],)


def _spread_gradient(saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor) -> tuple[Tensor]:
    return (sum_users(d_out, *saved),)


define_gradient(_sum_users_op, save=_save_sum, gradient=_sum_gradient)
define_gradient(_spread_users_op, save=_save_spread, gradient=_spread_gradient)


def by_user(offsets: Tensor, order: Tensor) -> Tensor:
    """[T] tokens in `order`, those of a user before those of the next."""
    users = token_users(offsets, order.shape[0]).to(integer_dtype(offsets.shape[0]))
    return order[users[order].sort(stable=True).indices]
