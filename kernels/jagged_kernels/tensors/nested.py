"""PyTorch's nested tensors where a `JaggedTensor` goes: `takes_nested`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from jagged_kernels.core.contents import readable
from jagged_kernels.tensors.jagged import JaggedTensor

P = ParamSpec("P")
R = TypeVar("R")

# Where a nested tensor is ragged, its batch being dimension 0.
_TOKENS_FIRST, _HEADS_FIRST = 1, 2


def takes_nested(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which also takes `torch.nested` tensors of jagged layout for `JaggedTensor`s.

    An argument, or one in a list or a mapping, may be [B, n*, ...], ragged in dimension 1; or
    [B, H, n*, ...], ragged in dimension 2, as `transpose(1, 2)` lays out heads for SDPA, which is
    read as [B, n*, H, ...]. With one such argument every `JaggedTensor` of the result is a nested
    tensor, laid out as the first of them; dense tensors stay as they are. Nothing but the layout
    changes hands: values are views, and gradients flow to where the nested tensors came from.

    Raises:
        ValueError: a nested tensor of another layout, with holes, or ragged in another dimension.

    >>> from jagged_kernels.tensors.nested import takes_nested
    >>> @takes_nested
    ... def double(x: JaggedTensor) -> JaggedTensor:
    ...     return x.with_values(2 * x.values)
    >>> nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    >>> [user.tolist() for user in double(nested).unbind()]
    [[2.0, 2.0], [2.0]]
    """

    @functools.wraps(function)
    def converting(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception:
            # No function works on nested tensors. To look for them here costs others nothing.
            like = _first_nested((args, kwargs))
            if like is None:
                raise
        again: Callable[..., R] = function
        return _to_nested(again(*_to_jagged(args), **_to_jagged(kwargs)), like)

    return converting


def _first_nested(arguments: Any) -> Tensor | None:
    if isinstance(arguments, Mapping):
        arguments = tuple(arguments.values())
    if isinstance(arguments, (list, tuple)):
        for x in arguments:
            if (found := _first_nested(x)) is not None:
                return found
        return None
    return arguments if isinstance(arguments, Tensor) and arguments.is_nested else None


def _to_jagged(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [_to_jagged(part) for part in x]
    if isinstance(x, Mapping):
        return {key: _to_jagged(part) for key, part in x.items()}
    if not (isinstance(x, Tensor) and x.is_nested):
        return x
    heads_first = x.layout == torch.jagged and _ragged_dim(x) == _HEADS_FIRST
    tokens_first = x.transpose(1, 2) if heads_first else x
    return JaggedTensor.from_nested(tokens_first, validate=readable(x))


def _to_nested(result: Any, like: Tensor) -> Any:
    if isinstance(result, tuple):
        return tuple([_to_nested(part, like) for part in result])
    if not isinstance(result, JaggedTensor):
        return result
    parts: Any = like
    known = {}
    if result.offsets is parts.offsets():
        # Else SDPA, in a later layer, would wait for the device to know them again.
        known = {"min_seqlen": parts._maybe_min_seqlen, "max_seqlen": parts._maybe_max_seqlen}
    nested = torch.nested.nested_tensor_from_jagged(result.values, result.offsets, **known)
    heads_first = _ragged_dim(like) == _HEADS_FIRST and result.values.dim() > 1
    return nested.transpose(1, 2) if heads_first else nested


def _ragged_dim(nested: Any) -> int:
    return nested._ragged_idx
