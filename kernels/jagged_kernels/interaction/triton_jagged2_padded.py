"""Between a user's matrix [n, n], stored flat, and [max_len, max_len] of a dense tensor."""

# Triton's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.interaction.triton_users import user_of
from jagged_kernels.launch import cdiv, launch

_ROWS, _COLUMNS, _BLOCK = 32, 64, 1024


def launch_pad_matrices(
    values: Tensor, offsets: Tensor, matrix_offsets: Tensor, max_len: int, value: float
) -> Tensor:
    """[B, max_len, max_len]; the first rows and columns of users with more."""
    users = offsets.shape[0] - 1
    padded = values.new_empty((users, max_len, max_len))
    if values.numel() == 0:
        return padded.fill_(value)
    # Triton has no bool in memory.
    as_bytes = values.dtype == torch.bool
    source, target = (x.view(torch.uint8) if as_bytes else x for x in (values, padded))
    tiles = (cdiv(max_len, _ROWS), cdiv(max_len, _COLUMNS))
    if padded.numel():
        number = float(value) if source.is_floating_point() else int(value)
        launch(
            _pad_matrices_kernel, users * tiles[0] * tiles[1],
            (source.contiguous(), target, offsets, matrix_offsets, number, *tiles, max_len),
            {"ROWS": _ROWS, "COLUMNS": _COLUMNS},
        )  # fmt: skip
    return padded


def launch_cut_matrices(
    padded: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int
) -> Tensor:
    """[total]: the reverse; 0 where `padded` ends before the matrix."""
    values = padded.new_empty(total)
    if padded.numel() == 0:
        return values.zero_()
    if total:
        launch(
            _cut_matrices_kernel, cdiv(total, _BLOCK),
            (padded.contiguous(), values, offsets, matrix_offsets, *padded.shape[:2], total),
            {"SMALL": total < 2**31, "BLOCK": _BLOCK},
        )  # fmt: skip
    return values


@triton.jit(do_not_specialize=["value", "row_tiles", "column_tiles", "max_len"])
def _pad_matrices_kernel(
    values_ptr, padded_ptr, offsets_ptr, matrix_offsets_ptr,
    value, row_tiles, column_tiles, max_len,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(0) // (row_tiles * column_tiles)
    tile = tl.program_id(0) % (row_tiles * column_tiles)
    row = (tile // column_tiles * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    n = tl.load(offsets_ptr + user + 1).to(tl.int32) - tl.load(offsets_ptr + user).to(tl.int32)
    # int64: users x max_len x max_len passes 2^31 in large batches, and so may n x n.
    source = tl.load(matrix_offsets_ptr + user) + row.to(tl.int64) * n + column
    numbers = tl.load(values_ptr + source, mask=(row < n) & (column < n), other=value)
    target = (user.to(tl.int64) * max_len + row) * max_len + column
    tl.store(padded_ptr + target, numbers, mask=(row < max_len) & (column < max_len))


@triton.jit(do_not_specialize=["users", "max_len", "total"])
def _cut_matrices_kernel(
    padded_ptr, values_ptr, offsets_ptr, matrix_offsets_ptr, users, max_len, total,
    SMALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    score = start + tl.arange(0, BLOCK)
    inside = score < total
    score = tl.minimum(score, total - 1)
    user = user_of(matrix_offsets_ptr, users, start) + tl.zeros([BLOCK], tl.int64)
    if tl.load(matrix_offsets_ptr + tl.max(user, 0) + 1) < tl.minimum(start + BLOCK, total):
        # The block does not end with the user that it begins with.
        user = user_of(matrix_offsets_ptr, users, score)
    n = (tl.load(offsets_ptr + user + 1) - tl.load(offsets_ptr + user)).to(tl.int64)
    place = score - tl.load(matrix_offsets_ptr + user)
    if SMALL:
        # Dividing 64 bits takes several times as long.
        place, n = place.to(tl.int32), n.to(tl.int32)
    row, column = place // n, place % n
    seen = inside & (row < max_len) & (column < max_len)
    address = (user * max_len + row) * max_len + column
    numbers = tl.load(padded_ptr + address, mask=seen, other=0.0)
    tl.store(values_ptr + score, numbers, mask=inside)
