"""`jagged_top_k`: the k highest scores of each user, and where they are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend, or_native
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.core.sizes import as_int
from jagged_kernels.ops.users import by_user, zeros_of
from jagged_kernels.tensors.checks import FLOATS
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested

_MAX_TRITON_K = 128


@takes_nested
def jagged_top_k(x: JaggedTensor, k: int, *, backend: Backend = "auto") -> tuple[Tensor, Tensor]:
    """The k highest scores of each user, decreasing; of equal ones the earlier token first.

    Args:
        x: scores [T], floating. NaN counts as higher than any number, as in `torch.topk`.
        k: at least 1. Triton goes to 128, beyond which "auto" is native.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Returns:
        (values [B, k], positions [B, k] int64): the scores, and the token of the user, counted
        from its first. A user of fewer than k tokens is filled up with -inf and -1. Values have a
        gradient.

    Raises:
        TypeError, ValueError: arguments of wrong kind, shape, dtype or value.
        NotImplementedError: more than 128 on the triton backend.

    Does not wait. Scratch memory: 8 k bytes for each user and for every 1024 tokens.

    >>> x = JaggedTensor(torch.tensor([0.5, 2.0, 2.0, 7.0]), torch.tensor([0, 3, 4]))
    >>> [part.tolist() for part in jagged_top_k(x, 2)]
    [[[2.0, 2.0], [7.0, -inf]], [[1, 2], [0, -1]]]
    """
    if not isinstance(x, JaggedTensor):
        raise TypeError(f"x must be a JaggedTensor, got {type(x).__name__}")
    if x.values.dim() != 1:
        raise ValueError(f"x must be scores [T], got {tuple(x.values.shape)}")
    if x.dtype not in FLOATS:
        raise TypeError(f"x must be floating, got {x.dtype}")
    k = as_int("k", k)
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    chosen = choose_backend(backend, x.values)
    if chosen == "triton" and k > _MAX_TRITON_K:
        chosen = or_native(backend, f"the triton backend goes to k = {_MAX_TRITON_K}, got {k}")
    if chosen == "reference":
        return _reference(x, k)
    if chosen == "native":
        return _native(x, k)
    return call(top_k, x.values, x.offsets, k)


def _reference(x: JaggedTensor, k: int) -> tuple[Tensor, Tensor]:
    values = [zeros_of((0, k), x.values[:0])]
    positions = [x.offsets.new_zeros((0, k), dtype=torch.int64)]
    for scores in x.unbind():
        order = scores.detach().sort(descending=True, stable=True).indices[:k]
        missing = (0, k - order.shape[0])
        values.append(torch.nn.functional.pad(scores[order], missing, value=-math.inf)[None])
        positions.append(torch.nn.functional.pad(order, missing, value=-1)[None])
    return torch.cat(values), torch.cat(positions)


def _native(x: JaggedTensor, k: int) -> tuple[Tensor, Tensor]:
    """A stable sort of all tokens by score, then one by user."""
    tokens = x.values.shape[0]
    order = by_user(x.offsets, x.values.detach().sort(descending=True, stable=True).indices)
    first = x.offsets[:-1, None].long()
    rank = torch.arange(k, device=x.device)
    exists = rank < x.lengths[:, None]
    # One more token behind the last, for ranks that a user does not have.
    order = torch.nn.functional.pad(order, (0, 1), value=tokens)
    token = order[torch.where(exists, first + rank, tokens)]
    values = torch.nn.functional.pad(x.values, (0, 1), value=-math.inf)[token]
    return values, (token - first).masked_fill(~exists, -1)


def _top_k(scores: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(values [B, k], positions [B, k] int64)"""
    from jagged_kernels.ops.ids.triton_top_k import launch_top_k

    return launch_top_k(scores, offsets, k)


def _top_k_backward(d_values: Tensor, offsets: Tensor, positions: Tensor, tokens: int) -> Tensor:
    """[tokens]: the gradient of the scores."""
    from jagged_kernels.ops.ids.triton_top_k import launch_top_k_backward

    return launch_top_k_backward(d_values, offsets, positions, tokens)


def _empty_top_k(scores: Tensor, offsets: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shape = (offsets.shape[0] - 1, k)
    return scores.new_empty(shape), offsets.new_empty(shape, dtype=torch.int64)


def _empty_scores(d_values: Tensor, offsets: Tensor, positions: Tensor, tokens: int) -> Tensor:
    return d_values.new_empty(tokens)


top_k = define_op(_top_k, fake=_empty_top_k)
top_k_backward = define_op(_top_k_backward, fake=_empty_scores)


def _save(inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    scores, offsets, _ = inputs
    return scores.shape[0], offsets, output[1]


def _gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_values: Tensor, d_positions: None
) -> tuple[Tensor]:
    tokens, offsets, positions = saved
    return (call(top_k_backward, d_values, offsets, positions, tokens),)


define_gradient(top_k, save=_save, gradient=_gradient)
