"""`jagged_collate`: samples of a data set into a batch, for `torch.utils.data.DataLoader`."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from jagged_kernels.core.contents import check_token_count
from jagged_kernels.tensors.jagged import JaggedTensor, of_one_dtype


def jagged_collate(samples: Sequence[Any], *, dense: Collection[str | int] = ()) -> Any:
    """A batch of samples whose tensors [n, ...] have other lengths; `DataLoader(collate_fn=...)`.

    Args:
        samples: at least one, all of one structure: tensors, or dicts, tuples and lists of them,
            nested or not. A sample that is a `JaggedTensor` counts for all of its users.
        dense: keys of dicts, or places in tuples and lists, whose tensors all have one shape and
            are stacked, as features [D] are; pass it by `functools.partial`.

    Returns:
        The structure of a sample, mappings as dicts. Tensors and numpy arrays [n, ...] become one
        `JaggedTensor` with a user for each sample; those of one length in every sample, such as
        the columns of one history, share one offsets object, which tells attention that they are of
        the same users. `JaggedTensor`s become one, their users one after another. What else there
        is, numbers and tensors without dimensions too, `default_collate` makes a tensor [B] of.

    Raises:
        TypeError: `dense` is no collection of keys, or samples of several kinds or dtypes.
        ValueError: no samples, samples that do not fit each other, or a key of `dense` that they
            do not have.

    >>> items = torch.tensor([3, 5]), torch.tensor([4])
    >>> batch = jagged_collate([{"item": items[0], "label": 1}, {"item": items[1], "label": 0}])
    >>> batch["item"].to_padded().tolist(), batch["label"].tolist()
    ([[3, 5], [4, 0]], [1, 0])
    """
    if not samples:
        raise ValueError("jagged_collate needs at least one sample")
    if isinstance(dense, str) or not isinstance(dense, Collection):
        raise TypeError(
            f"dense must be a collection of keys, as ('label',), got {type(dense).__name__}"
        )
    stacked = frozenset(dense)
    if missing := stacked and stacked - _keys(samples[0]):
        names = ", ".join(sorted(map(repr, missing)))
        raise ValueError(f"dense has keys that no sample has: {names}")
    return _collate(samples, stacked, {})


def _collate(
    samples: Sequence[Any], dense: frozenset[str | int], known: dict[Hashable, Tensor]
) -> Any:
    """`known`: the offsets so far, by the lengths, or the offsets, that they come from."""
    first = samples[0]

    def part(key: Any, column: list[Any]) -> Any:
        return default_collate(column) if key in dense else _collate(column, dense, known)

    if isinstance(first, JaggedTensor):
        _check_kind(samples, JaggedTensor)
        return _users_of(samples, known)
    if isinstance(first, Mapping):
        _check_kind(samples, Mapping)
        _check_same("keys", [sorted(map(str, sample)) for sample in samples])
        return {key: part(key, [sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        _check_kind(samples, tuple | list)
        numbers = all(isinstance(x, int | float) for sample in samples for x in sample)
        hint = "; a history must be a tensor or an array, not a list of numbers" if numbers else ""
        _check_same("numbers of values", [len(sample) for sample in samples], hint=hint)
        columns = [part(place, list(c)) for place, c in enumerate(zip(*samples, strict=True))]
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if getattr(first, "ndim", 0):
        return _histories([torch.as_tensor(sample) for sample in samples], known)
    return default_collate(list(samples))


def _keys(sample: Any) -> set[Any]:
    """All keys and places there are in a sample."""
    if isinstance(sample, Mapping):
        keys, parts = set(sample), list(sample.values())
    elif isinstance(sample, tuple | list):
        keys, parts = set(range(len(sample))), list(sample)
    else:
        return set()
    return keys.union(*map(_keys, parts))


def _check_kind(samples: Sequence[Any], kind: Any) -> None:
    for place, sample in enumerate(samples):
        if not isinstance(sample, kind):
            raise TypeError(
                f"samples must have one structure, but where sample 0 has a "
                f"{type(samples[0]).__name__} sample {place} has a {type(sample).__name__}"
            )


def _check_same(what: str, parts: Sequence[Any], *, hint: str = "") -> None:
    for place, other in enumerate(parts):
        if other != parts[0]:
            raise ValueError(
                f"samples must have one structure, but the {what} are {parts[0]} in sample 0 and "
                f"{other} in sample {place}{hint}"
            )


def _histories(tensors: list[Tensor], known: dict[Hashable, Tensor]) -> JaggedTensor:
    x = JaggedTensor.from_list(tensors)
    lengths = tuple(tensor.shape[0] for tensor in tensors)
    offsets = known.setdefault(("lengths", x.device, lengths), x.offsets)
    return JaggedTensor._trusted(x.values, offsets)


def _users_of(parts: Sequence[JaggedTensor], known: dict[Hashable, Tensor]) -> JaggedTensor:
    """Batches one after another."""
    wide = any(part.offsets.dtype == torch.int64 for part in parts)
    dtype = torch.int64 if wide else torch.int32
    check_token_count(sum(part.values.shape[0] for part in parts), dtype)
    key = ("offsets", tuple(id(part.offsets) for part in parts))
    if key not in known:
        begin, ends = 0, [parts[0].offsets[:1].to(dtype)]
        for part in parts:
            ends.append(part.offsets[1:].to(dtype) + begin)
            begin += part.values.shape[0]
        known[key] = torch.cat(ends)
    values = torch.cat(of_one_dtype([part.values for part in parts], "sample"))
    return JaggedTensor._trusted(values, known[key])
