"""To and from TorchRec's `JaggedTensor` and `KeyedJaggedTensor`: `from_torchrec`, `to_torchrec`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any, Literal, Protocol, overload

import torch
from torch import Tensor

from jagged_kernels.tensors.checks import check_same_offsets
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested
from jagged_kernels.tensors.offsets import lengths_to_offsets


class _Jagged(Protocol):
    def values(self) -> Tensor: ...


class _Keyed(_Jagged, Protocol):
    def keys(self) -> Sequence[str]: ...


# What has keys is jagged, too: the first overload that fits is meant.
@overload
def from_torchrec(  # pyright: ignore[reportOverlappingOverload]
    x: _Keyed, *, weights: Literal[False] | None = ..., validate: bool = ...
) -> dict[str, JaggedTensor]: ...
@overload
def from_torchrec(  # pyright: ignore[reportOverlappingOverload]
    x: _Keyed, *, weights: Literal[True], validate: bool = ...
) -> tuple[dict[str, JaggedTensor], dict[str, JaggedTensor]]: ...
@overload
def from_torchrec(
    x: _Jagged, *, weights: Literal[False] | None = ..., validate: bool = ...
) -> JaggedTensor: ...
@overload
def from_torchrec(
    x: _Jagged, *, weights: Literal[True], validate: bool = ...
) -> tuple[JaggedTensor, JaggedTensor]: ...
def from_torchrec(x: Any, *, weights: bool | None = None, validate: bool = True) -> Any:
    """From a TorchRec `JaggedTensor` or `KeyedJaggedTensor`, or what has their methods.

    Args:
        x: has `values()`, [T, ...], and `lengths()`, [B], or `offsets()`, [B + 1], of int32 or
            int64. With `keys()`, K names, it is keyed: lengths are those of the users of the first
            key, then of the second, ...; as many users a key as `stride_per_key()` says, else
            B / K. `weights()`, [T, ...], may be there or not. For each of them `*_or_none()` is
            asked first. TorchRec itself is not imported.
        weights: also return them. None: there are none, or this raises, so that none are lost;
            False leaves them behind.
        validate: as for `JaggedTensor`.

    Returns:
        A `JaggedTensor`, or for keyed `x` a dict of one for each key. With `weights=True` two of
        those: the values, and weights with the same offsets. Values and weights are views, and so
        are the offsets of what is not keyed.

    Raises:
        TypeError: something of `x` is missing or of another kind.
        ValueError: contents that do not fit, a key that is there twice, or weights that were not
            expected, or are not there.

    Of keyed `x` this waits for the device, unless `validate` is off and `x` knows its
    `offset_per_key()`. The inverse indices of deduplicated users stay with `x`.

    Source: TorchRec, Ivchenko et al., RecSys 2022.

    >>> class Keyed:
    ...     keys = lambda self: ["item", "shop"]
    ...     values = lambda self: torch.tensor([1, 2, 3, 4])
    ...     lengths = lambda self: torch.tensor([2, 0, 1, 1])
    >>> x = from_torchrec(Keyed())
    >>> {key: [user.tolist() for user in part.unbind()] for key, part in x.items()}
    {'item': [[1, 2], []], 'shop': [[3], [4]]}
    """
    values, of_weights = _part(x, "values"), _part(x, "weights")
    if not isinstance(values, Tensor):
        raise TypeError(f"x must have values() that are a tensor, got {type(x).__name__}")
    if weights is None and of_weights is not None:
        raise ValueError("x has weights: weights=True returns them, too, weights=False does not")
    parts = [values]
    if weights:
        if not isinstance(of_weights, Tensor):
            raise ValueError("weights=True, but x has no weights")
        if of_weights.shape[:1] != values.shape[:1]:
            raise ValueError(
                f"x must have a weight for each of {values.shape[0]} values, got {len(of_weights)}"
            )
        parts.append(of_weights)
    jagged = JaggedTensor(values, _offsets(x), validate=validate)
    if hasattr(x, "keys"):
        tokens = _tokens_of_keys(x, jagged.offsets)
        found = [_by_key(part, tokens) for part in parts]
    else:
        found = [jagged.with_values(part) for part in parts]
    return tuple(found) if weights else found[0]


@takes_nested
def to_torchrec(
    x: JaggedTensor | Mapping[str, JaggedTensor],
    weights: JaggedTensor | Mapping[str, JaggedTensor] | None = None,
) -> Any:
    """As a TorchRec `JaggedTensor`, or of a mapping as a `KeyedJaggedTensor`.

    Args:
        x: [T, ...], or one for each key, in this order: of one dtype, device and shape of a token.
            Keys may have different numbers of users.
        weights: of the form of `x`, with the same keys and offsets.

    Returns:
        Of one `JaggedTensor`, TorchRec's over the same values and offsets. Of a mapping, a new
        `KeyedJaggedTensor` of all, with `lengths`; it knows its `length_per_key()`, and so does
        not wait for the device. Gradients flow.

    Raises:
        ImportError: TorchRec is not installed.
        TypeError, ValueError: parts of wrong kind, or that do not fit each other.

    `from_torchrec` is the reverse.

    >>> x = JaggedTensor(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]))
    >>> both = to_torchrec({"item": x, "shop": x})
    >>> both.keys(), both.lengths().tolist()
    (['item', 'shop'], [2, 1, 2, 1])
    """
    if isinstance(x, Mapping):
        return _to_keyed(x, weights)
    _check_part("x", x)
    of_weights = None
    if weights is not None:
        part = _check_part("weights", weights)
        check_same_offsets("weights", x.offsets, part.offsets)
        of_weights = part.values
    return _torchrec().JaggedTensor(values=x.values, offsets=x.offsets, weights=of_weights)


def _to_keyed(x: Mapping[str, JaggedTensor], weights: Any) -> Any:
    _check_alike("x", x)
    if weights is not None:
        if not isinstance(weights, Mapping) or weights.keys() != x.keys():
            got = list(weights) if isinstance(weights, Mapping) else type(weights).__name__
            raise ValueError(f"weights must have the keys of x, {list(x)}, got {got}")
        _check_alike("weights", weights)
        for key, part in x.items():
            check_same_offsets(f"weights[{key!r}]", part.offsets, weights[key].offsets)
    kind = _torchrec().KeyedJaggedTensor
    if not x:
        return kind.empty(is_weighted=weights is not None)
    parts = list(x.values())
    users = [len(part) for part in parts]
    same = len(set(users)) == 1
    return kind(
        keys=list(x),
        values=_joined([part.values for part in parts]),
        weights=None if weights is None else _joined([weights[key].values for key in x]),
        lengths=_joined([part.lengths for part in parts]),
        stride=users[0] if same else None,
        stride_per_key_per_rank=None if same else [[n] for n in users],
        length_per_key=[part.values.shape[0] for part in parts],
    )


def _part(x: Any, name: str) -> Any:
    """`x.name_or_none()`, else `x.name()` or `x.name`, else None."""
    part = getattr(x, f"{name}_or_none", None) or getattr(x, name, None)
    return part() if callable(part) else part


def _offsets(x: Any) -> Tensor:
    offsets = _part(x, "offsets")
    # TorchRec's empty ones have no offset at all.
    if offsets is not None and offsets.numel() > 0:
        return offsets
    lengths = _part(x, "lengths")
    if lengths is None:
        raise TypeError(f"x must have lengths() or offsets(), got {type(x).__name__}")
    return lengths_to_offsets(lengths)


def _tokens_of_keys(x: Any, offsets: Tensor) -> dict[str, tuple[int, int, Tensor]]:
    """For each key its first token, the end of its tokens, and their offsets."""
    keys, users = list(x.keys()), offsets.shape[0] - 1
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is there twice: select one of them before")
    strides = _part(x, "stride_per_key")
    if strides is None:
        strides = [users // max(len(keys), 1)] * len(keys)
    if sum(strides) != users:
        raise ValueError(f"{len(keys)} keys have {users} lengths, and strides {list(strides)}")
    firsts = [0, *accumulate(strides)]
    starts = _part(x, "offset_per_key")
    if starts is None:
        starts = offsets[torch.tensor(firsts, device=offsets.device)].tolist()
    tokens = {}
    for key, (first, end), (start, stop) in zip(
        keys, pairwise(firsts), pairwise(starts), strict=True
    ):
        own = offsets[first : end + 1]
        tokens[key] = (start, stop, own - start if start else own)
    return tokens


def _by_key(
    values: Tensor, tokens: Mapping[str, tuple[int, int, Tensor]]
) -> dict[str, JaggedTensor]:
    return {
        key: JaggedTensor._trusted(values[start:stop], offsets)
        for key, (start, stop, offsets) in tokens.items()
    }


def _check_part(name: str, x: Any) -> JaggedTensor:
    if not isinstance(x, JaggedTensor):
        raise TypeError(f"{name} must be a JaggedTensor, got {type(x).__name__}")
    return x


def _check_alike(name: str, parts: Mapping[str, Any]) -> None:
    """That these `JaggedTensor`s make up one keyed tensor."""
    first, wanted = "", ""
    for key, part in parts.items():
        form = _form(_check_part(f"{name}[{key!r}]", part))
        if not wanted:
            first, wanted = key, form
        if form != wanted:
            raise ValueError(
                f"{name}[{key!r}] must be like {name}[{first!r}], {wanted}, got {form}"
            )


def _form(x: JaggedTensor) -> str:
    token = "".join(f", {n}" for n in x.values.shape[1:])
    return f"[T{token}] of {x.dtype} on {x.device}"


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _torchrec() -> Any:
    """TorchRec's module of jagged tensors, which takes seconds to import."""
    try:
        return import_module("torchrec.sparse.jagged_tensor")
    except ImportError as error:
        raise ImportError(
            "to_torchrec needs TorchRec: pip install torchrec fbgemm-gpu, or on a machine without "
            "a GPU, pip install --no-deps torchrec fbgemm-gpu-cpu, and what TorchRec asks for "
            f"({error})"
        ) from error
