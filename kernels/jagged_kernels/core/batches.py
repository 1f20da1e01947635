"""Batches of calls, one call after another: `torch.func.vmap`, and gradients that are batched.

A jagged batch is one call already; what is mapped over it are few, such as the rows of a Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

_apart, _together = torch._remove_batch_dim, torch._add_batch_dim  # pyright: ignore[reportPrivateImportUsage]
# One more than the levels of nested batches that PyTorch has.
_LEVELS = 64


def is_batched(gradient: Tensor) -> bool:
    """As `is_grads_batched` of `torch.autograd.grad` makes them; `torch.func.vmap` has tensors of
    its own. What traces a backward knows none, nor this question."""
    return not torch.compiler.is_compiling() and is_legacy_batchedtensor(gradient)


def call_in_turn(op: Any) -> Callable[..., tuple[Any, Any]]:
    """The rule of an operator for `torch.library.register_vmap`. One that returns nothing writes to
    its arguments, of which there is one for all calls: it raises NotImplementedError."""
    name, returns = op.name(), op._schema.returns

    def rule(info: Any, in_dims: Sequence[Any], *inputs: Any) -> tuple[Any, Any]:
        if not returns:
            raise NotImplementedError(f"{name} changes its arguments: not under torch.func.vmap")
        results = [
            op(*[_pick(x, dim, index) for x, dim in zip(inputs, in_dims, strict=True)])
            for index in range(info.batch_size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        columns = type(results[0])(torch.stack(column) for column in zip(*results, strict=True))
        return columns, type(columns)(0 for _ in columns)

    return rule


def _pick(x: Any, dim: Any, index: int) -> Any:
    """Of an input that is batched in `dim` the one at `index`; for a list, both are lists."""
    if isinstance(dim, (list, tuple)):
        return [_pick(part, of_part, index) for part, of_part in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, index)


def map_in_turn(
    function: Callable[..., Sequence[Tensor | None]], gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """`function(*gradients)` of gradients of which at least one `is_batched`."""
    level, size = _batch_of(next(d for d in gradients if d is not None and is_batched(d)))
    # What is not batched at this level is expanded.
    apart = [d if d is None else _apart(d, level, size, 0) for d in gradients]
    results = [function(*[d if d is None else d[index] for d in apart]) for index in range(size)]
    return tuple(
        None if column[0] is None else _together(torch.stack(column), 0, level)
        for column in zip(*results, strict=True)
    )


def _batch_of(batched: Tensor) -> tuple[int, int]:
    """The level of a batch and its size. Asked of the tensor: another thread runs the backward on
    a GPU, and what is nested there is not known to it."""
    for level in range(1, _LEVELS):
        # At a level where it is not batched, it is expanded: to the 0 that no batch has.
        size = _apart(batched, level, 0, 0).shape[0]
        if size:
            return level, size
    raise ValueError("a batch of gradients is empty")
