"""`block_means`: the mean of each block of a history, which stands for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import triton_runs
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.ops.pooling.pooling import jagged_mean, spread_op
from jagged_kernels.schedule.keys.blocks import check_block, first_tiles, tile_count
from jagged_kernels.tensors.checks import as_columns, check_floats, reshaped
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested


@takes_nested
def block_means(x: JaggedTensor, block: int) -> JaggedTensor:
    """The mean of each block of `block` tokens, counted from its user's first token.

    Args:
        x: [T, ...] of a floating dtype.
        block: a power of two from 16 to 128.

    Returns:
        [T // block + B, ...] in the dtype of x, summed in float32 (float64 for float64). User b's
        blocks begin at offsets[b] // block + b, and where that leaves room for one more before the
        next user's, it is 0. Differentiable.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype or value.

    >>> x = JaggedTensor(torch.arange(20.0), torch.tensor([0, 18, 20]))
    >>> [means.tolist() for means in block_means(x, 16)]
    [[7.5, 16.5], [18.5]]
    """
    check_floats("x", x)
    block = check_block(block)
    steps = torch.arange(len(x) + 1, device=x.device, dtype=x.offsets.dtype)
    return JaggedTensor._trusted(mean_values(x, block), x.offsets // block + steps)


def mean_values(x: JaggedTensor, block: int) -> Tensor:
    """The values of `block_means`."""
    if not (triton_runs(x.values) and x.dtype != torch.float64):
        blocks = _block_offsets(x.offsets, x.values.shape[0], block)
        return jagged_mean(JaggedTensor._trusted(x.values, blocks), backend="native")
    means = call(block_means_op, as_columns(x.values), x.offsets, block)
    return reshaped(means, (means.shape[0], *x.values.shape[1:]))


def _block_offsets(offsets: Tensor, tokens: int, block: int) -> Tensor:
    """[T // block + B + 1]: where each number's tokens begin."""
    number = torch.arange(tile_count(tokens, offsets.shape[0] - 1, block), device=offsets.device)
    first = first_tiles(offsets, block)
    user = torch.searchsorted(first, number, right=True) - 1
    start, end = offsets[:-1].long(), offsets[1:].long()
    begin = torch.minimum(start[user] + (number - first[user]) * block, end[user])
    return torch.cat([begin, begin.new_full((1,), tokens)]).to(offsets.dtype)


def _block_means(x: Tensor, offsets: Tensor, block: int) -> Tensor:
    """[T, C] -> [T // block + B, C]."""
    from jagged_kernels.attention.retrieval.triton_block_means import launch_block_means

    return launch_block_means(x, offsets, block)


def _empty_means(x: Tensor, offsets: Tensor, block: int) -> Tensor:
    return x.new_empty((tile_count(x.shape[0], offsets.shape[0] - 1, block), x.shape[1]))


block_means_op = define_op(_block_means, fake=_empty_means, name="block_means")


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    x, offsets, block = inputs
    return offsets, x.shape[0], block


def _gradient(saved: Sequence[Any], wanted: Sequence[bool], d_means: Tensor) -> tuple[Tensor]:
    offsets, tokens, block = saved
    return (call(spread_op, d_means, _block_offsets(offsets, tokens, block), tokens, True),)


define_gradient(block_means_op, save=_save, gradient=_gradient)
