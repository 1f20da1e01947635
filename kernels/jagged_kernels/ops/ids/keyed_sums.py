"""Sums of rows that share a key, in a fixed order: the gradient of a lookup."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jagged_kernels.core.operators import define_op
from jagged_kernels.core.sizes import integer_dtype


def _sort_ids(ids: Sequence[Tensor], sizes: Sequence[int], parts: int) -> tuple[Tensor, Tensor]:
    """(keys, order) [features x T], sorted by key: ids of later features behind the tables, of
    `sizes`, before them; -1 for those outside their table. Order i is token i % T of a feature.

    The tokens are in `parts` equal parts, and the keys of one behind all tables of those before it.
    """
    from jagged_kernels.ops.ids.triton_keyed_sums import launch_keys

    dtype = integer_dtype(parts * sum(sizes) - 1)
    keys, order = launch_keys(ids, sizes, parts, dtype).sort(stable=True)
    return keys, order


def _empty_keys(ids: Sequence[Tensor], sizes: Sequence[int], parts: int) -> tuple[Tensor, Tensor]:
    count = len(ids) * ids[0].shape[0]
    keys = ids[0].new_empty(count, dtype=integer_dtype(parts * sum(sizes) - 1))
    return keys, keys.new_empty(count, dtype=torch.int64)


def _sum_sorted_rows(
    rows: Tensor, order: Tensor, keys: Tensor, size: int, dtype: torch.dtype
) -> Tensor:
    """[size, D] of `dtype`: row k is the sum of rows[order[i] % T] where keys[i] == k, in the order
    of i.

    Args:
        rows: [T, D] floating.
        order: [N] integers; N < 2^31, as in what PyTorch sorts.
        keys: [N] integers; equal ones beside each other. Those outside [0, size) are left out.
    """
    from jagged_kernels.ops.ids.triton_keyed_sums import launch_sum_sorted_rows

    return launch_sum_sorted_rows(rows, order, keys, size, dtype)


def _empty_sums(rows: Tensor, order: Tensor, keys: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return rows.new_empty((size, rows.shape[1]), dtype=dtype)


sort_ids = define_op(_sort_ids, fake=_empty_keys)
sum_sorted_rows = define_op(_sum_sorted_rows, fake=_empty_sums)
