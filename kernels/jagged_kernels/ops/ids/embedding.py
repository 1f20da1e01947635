"""`jagged_embedding`: the vectors of several features of a token, looked up and added up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.contents import readable
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.ops.ids.keyed_sums import sort_ids, sum_sorted_rows
from jagged_kernels.tensors.checks import FLOATS, check_same_offsets
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested

# Of tables that are sorted together, so that keys have 16 bits; and up to so many ids in all, every
# table is: what a sort takes then is its launches.
_SHARED_ROWS = 2**15
_SHARED_IDS = 2**18
# Bytes of a part of the tokens' gradients at least: they stay in cache (50 MB on an H100) while
# several tables take them, and each part more has sums of its own to be added up.
_PART_BYTES = 2**25


@takes_nested
def jagged_embedding(
    ids: Sequence[JaggedTensor | Tensor],
    tables: Sequence[Tensor],
    *,
    sparse: bool = False,
    backend: Backend = "auto",
) -> JaggedTensor:
    """Sum of tables[i][ids[i]] over the features i: item, category, time bucket, position, ...

    Args:
        ids: one for each feature, int32 or int64: `JaggedTensor`s [T] of the same offsets, at
            least one, or tensors [T]. Ids outside the table raise on a CPU; on CUDA, where
            looking would wait, triton counts them as a vector of zeros and gives no gradient.
        tables: [V_i, D] of one floating dtype.
        sparse: gradients of the tables as `torch.sparse_coo` with the rows that were looked up,
            for tables too large for dense ones. Their number depends on the ids, so the backward
            waits for the device twice a sort; it cannot be traced by `torch.compile`.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Returns:
        [T, D] with the offsets of the ids. Triton adds up in float32.

    Raises:
        TypeError, ValueError, IndexError: arguments of wrong kind, shape, dtype, device or range.

    Triton's gradients sum the tokens of an id in their order (a stable sort, then sums of equal
    shares of it), without atomics, and sparse ones have each row once. Scratch memory of the
    backward: an order [T] for each of the tables that are sorted together (up to 32,768 rows in
    all, and every larger one by itself; all for few ids), a row of float32 for 64 of its numbers
    (32 in float32), and 32,768 more for tables that are sorted together.

    >>> item = JaggedTensor(torch.tensor([1, 0, 1]), torch.tensor([0, 2, 3]))
    >>> tables = [torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])]
    >>> jagged_embedding([item, torch.tensor([0, 1, 0])], tables).values.tolist()
    [[12.0], [21.0], [12.0]]
    """
    first, numbers = _check(ids, tables)
    chosen = choose_backend(backend, tables[0])
    if chosen == "triton":
        values = call(embed, list(tables), numbers, sparse)
    else:
        parts = [
            torch.nn.functional.embedding(n, table, sparse=sparse)
            for n, table in zip(numbers, tables, strict=True)
        ]
        if chosen == "reference":
            values = torch.stack(parts).sum(0).to(parts[0].dtype)
        else:
            values = parts[0]
            for part in parts[1:]:
                values = values + part
    return first.with_values(values)


def _check(
    ids: Sequence[JaggedTensor | Tensor], tables: Sequence[Tensor]
) -> tuple[JaggedTensor, list[Tensor]]:
    """The first jagged ids, and the numbers [T] of all."""
    jagged = [x for x in ids if isinstance(x, JaggedTensor)]
    if not jagged:
        kinds = ", ".join(type(x).__name__ for x in ids)
        raise TypeError(f"ids must be tensors, at least one a JaggedTensor; got [{kinds}]")
    if len(ids) != len(tables):
        raise ValueError(f"each feature needs a table, got {len(ids)} ids, {len(tables)} tables")
    first = jagged[0]
    numbers = [x.values if isinstance(x, JaggedTensor) else x for x in ids]
    # Each look at a tensor takes time, and there are many.
    shape, device = first.values.shape, first.values.device
    if not isinstance(tables[0], Tensor):
        raise TypeError(f"tables must be tensors, got {type(tables[0]).__name__} as tables 0")
    width, dtype = tables[0].shape[-1:], tables[0].dtype
    for index, (feature, n, table) in enumerate(zip(ids, numbers, tables, strict=True)):
        if not isinstance(n, Tensor) or not isinstance(table, Tensor):
            kinds = f"{type(n).__name__} and {type(table).__name__}"
            raise TypeError(f"ids {index} and its table must be tensors, got {kinds}")
        if n.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"ids {index} must be int32 or int64, got {n.dtype}")
        if n.shape != shape or len(shape) != 1:
            raise ValueError(
                f"ids must be [T] of the same T, got {tuple(n.shape)} and {tuple(shape)}"
            )
        rows = table.shape
        if len(rows) != 2 or rows[1:] != width:
            raise ValueError(
                f"tables must be [V, D] of the same D, got {tuple(rows)} and "
                f"{tuple(tables[0].shape)}"
            )
        if table.dtype != dtype or dtype not in FLOATS:
            raise TypeError(f"tables must be of one floating dtype, got {dtype} and {table.dtype}")
        if not n.device == table.device == device:
            raise ValueError(
                f"ids and tables must be on one device, got {n.device}, {table.device} and {device}"
            )
        if isinstance(feature, JaggedTensor) and feature is not first:
            check_same_offsets(f"ids {index}", first.offsets, feature.offsets)
        if readable(n) and n.numel() and (int(n.min()) < 0 or int(n.max()) >= rows[0]):
            raise IndexError(
                f"ids {index} must lie in [0, {rows[0]}), got {int(n.min())} to {int(n.max())}"
            )
    return first, numbers


def _embed(tables: Sequence[Tensor], ids: Sequence[Tensor], sparse: bool) -> Tensor:
    """[T, D]"""
    from jagged_kernels.ops.ids.triton_embedding import launch_embed

    return launch_embed(tables, ids)


def _empty_vectors(tables: Sequence[Tensor], ids: Sequence[Tensor], sparse: bool) -> Tensor:
    return tables[0].new_empty((ids[0].shape[0], tables[0].shape[1]))


embed = define_op(_embed, fake=_empty_vectors)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    tables, ids, sparse = inputs
    return ([table.shape[0] for table in tables], sparse, *ids)


def _gradient(
    saved: Sequence[Any], wanted: Sequence[Any], d_out: Tensor
) -> tuple[list[Tensor | None]]:
    sizes, sparse, *ids = saved
    found: list[Tensor | None] = [None] * len(ids)
    needed = [feature for feature, need in enumerate(wanted[0]) if need]
    for group in _sorted_together(needed, sizes, d_out.shape[0]):
        heights = [sizes[feature] for feature in group]
        parts = 1 if sparse else _parts(heights, d_out.numel() * d_out.element_size())
        keys, order = call(sort_ids, [ids[feature] for feature in group], heights, parts)
        if sparse:
            gradients = _sparse_gradients(d_out, keys, order, heights)
        else:
            rows, dtype = sum(heights), d_out.dtype if parts == 1 else torch.float32
            sums = call(sum_sorted_rows, d_out, order, keys, parts * rows, dtype)
            if parts > 1:
                sums = sums.unflatten(0, (parts, rows)).sum(0).to(d_out.dtype)
            gradients = (sums,) if len(group) == 1 else sums.split_with_sizes(heights)
        for feature, gradient in zip(group, gradients, strict=True):
            found[feature] = gradient
    return (found,)


define_gradient(embed, save=_save, gradient=_gradient)


def _sorted_together(features: Sequence[int], sizes: Sequence[int], tokens: int) -> list[list[int]]:
    """Small tables whose rows together have numbers of 16 bits share a sort, which is then two
    passes; every other has one of its own. For few ids one sort is faster than several."""
    ordered = sorted(features, key=lambda feature: sizes[feature])
    if len(ordered) * tokens <= _SHARED_IDS:
        return [ordered]
    groups: list[list[int]] = []
    rows = 0
    for feature in ordered:
        rows += sizes[feature]
        if groups and rows <= _SHARED_ROWS:
            groups[-1].append(feature)
        else:
            groups.append([feature])
    return groups


def _parts(heights: Sequence[int], size: int) -> int:
    """Parts of the tokens, whose gradients have `size` bytes, whose rows are summed apart, of
    tables that are sorted together."""
    if len(heights) == 1:
        return 1
    return max(min(size // _PART_BYTES, _SHARED_ROWS // max(sum(heights), 1)), 1)


def _sparse_gradients(
    d_out: Tensor, keys: Tensor, order: Tensor, heights: Sequence[int]
) -> list[Tensor]:
    """Of tables that were sorted together."""
    valid = keys >= 0
    first = valid.clone()
    first[1:] &= keys.diff() != 0
    places = torch.where(valid, first.cumsum(0) - 1, -1)
    rows = keys[first].long()  # waits
    sums = call(sum_sorted_rows, d_out, order, places, rows.shape[0], d_out.dtype)
    bases = [0, *accumulate(heights)]
    ends = torch.searchsorted(rows, rows.new_tensor(bases)).tolist()  # waits
    return [
        torch.sparse_coo_tensor(
            rows[None, begin:end] - base, sums[begin:end], (height, d_out.shape[1]),
            is_coalesced=True, check_invariants=False,
        )
        for base, height, (begin, end) in zip(bases, heights, pairwise(ends), strict=False)
    ]  # fmt: skip
