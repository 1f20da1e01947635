"""Sums of rows that share a key, in a fixed order: the gradient of a lookup."""

from __future__ import annotations

from torch import Tensor

from jagged_kernels.operators import define_op


def _sum_sorted_rows(rows: Tensor, order: Tensor, keys: Tensor, size: int) -> Tensor:
    """[size, D]: row k is the sum of rows[order[i]] where keys[i] == k, in the order of i.

    Args:
        rows: [T, D] floating.
        order: [T] integers.
        keys: [T] integers; equal ones beside each other. Those outside [0, size) are left out.
    """
    from jagged_kernels.interaction.triton_row_sums import launch_sum_sorted_rows

    return launch_sum_sorted_rows(rows, order, keys, size)


def _empty_sums(rows: Tensor, order: Tensor, keys: Tensor, size: int) -> Tensor:
    return rows.new_empty((size, rows.shape[1]))


sum_sorted_rows = define_op(_sum_sorted_rows, fake=_empty_sums)
