"""`jagged2_to_padded`: a square matrix for each user, as one dense tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.core.sizes import as_int
from jagged_kernels.ops.squares import user_matrices
from jagged_kernels.ops.users import token_positions, zeros_of
from jagged_kernels.tensors.checks import as_fill
from jagged_kernels.tensors.jagged2 import Jagged2Tensor


def jagged2_to_padded(
    m: Jagged2Tensor, max_len: int, *, value: float = 0.0, backend: Backend = "auto"
) -> Tensor:
    """As dense [B, max_len, max_len], with `value` outside each user's matrix. Does not wait.

    Args:
        m: per-user [n_b, n_b], of the dtypes of `to_padded`; of larger users the first `max_len`
            rows and columns.
        backend: "triton", "native", "reference" or "auto" (triton on CUDA tensors).

    Raises:
        TypeError, ValueError: arguments of wrong kind or value, or a complex dtype.
        NotImplementedError: float64 on the triton backend.

    >>> offsets = torch.tensor([0, 2, 3])
    >>> m = Jagged2Tensor(torch.arange(5), offsets, torch.tensor([0, 4, 5]))
    >>> jagged2_to_padded(m, 2, value=-1).tolist()
    [[[0, 1], [2, 3]], [[4, -1], [-1, -1]]]
    """
    if not isinstance(m, Jagged2Tensor):
        raise TypeError(f"m must be a Jagged2Tensor, got {type(m).__name__}")
    max_len = as_int("max_len", max_len)
    if max_len < 0:
        raise ValueError(f"max_len must be at least 0, got {max_len}")
    value = as_fill(value, m.dtype)
    chosen = choose_backend(backend, m.values)
    if chosen == "reference":
        return _reference(m, max_len, value)
    if chosen == "native":
        return _native(m, max_len, value)
    return call(pad_matrices, m.values, m.offsets, m.matrix_offsets, max_len, value)


def _reference(m: Jagged2Tensor, max_len: int, value: float) -> Tensor:
    rows = [zeros_of((0, max_len, max_len), m.values[:0])]
    for matrix in user_matrices(m.values, m.offsets, m.matrix_offsets):
        kept = min(len(matrix), max_len)
        row = m.values.new_full((max_len, max_len), value)
        row[:kept, :kept] = matrix[:kept, :kept]
        rows.append(row[None])
    return torch.cat(rows)


def _native(m: Jagged2Tensor, max_len: int, value: float) -> Tensor:
    user, place = token_positions(m.matrix_offsets, m.values.shape[0])
    n = m.lengths[user]
    row, column = place // n, place % n
    # What is cut off goes to a place behind the output.
    places = len(m) * max_len * max_len
    inside = (row < max_len) & (column < max_len)
    target = torch.where(inside, (user * max_len + row) * max_len + column, places)
    padded = m.values.new_full((places + 1,), value).index_copy(0, target, m.values)
    return padded[:places].view(len(m), max_len, max_len)


def _pad_matrices(
    values: Tensor, offsets: Tensor, matrix_offsets: Tensor, max_len: int, value: float
) -> Tensor:
    """[B, max_len, max_len]"""
    from jagged_kernels.ops.layout.triton_jagged2_padded import launch_pad_matrices

    return launch_pad_matrices(values, offsets, matrix_offsets, max_len, value)


def _cut_matrices(padded: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int) -> Tensor:
    """[total]: what `padded` has of each user's matrix, 0 elsewhere."""
    from jagged_kernels.ops.layout.triton_jagged2_padded import launch_cut_matrices

    return launch_cut_matrices(padded, offsets, matrix_offsets, total)


def _empty_padded(
    values: Tensor, offsets: Tensor, matrix_offsets: Tensor, max_len: int, value: float
) -> Tensor:
    return values.new_empty((offsets.shape[0] - 1, max_len, max_len))


def _empty_values(padded: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int) -> Tensor:
    return padded.new_empty(total)


pad_matrices = define_op(_pad_matrices, fake=_empty_padded)
cut_matrices = define_op(_cut_matrices, fake=_empty_values)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    values, offsets, matrix_offsets, _, _ = inputs
    return offsets, matrix_offsets, values.shape[0]


def _gradient(saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor) -> tuple[Tensor]:
    return (call(cut_matrices, d_out, *saved),)


define_gradient(pad_matrices, save=_save, gradient=_gradient)
