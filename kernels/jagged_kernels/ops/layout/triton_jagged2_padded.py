"""Between a user's matrix [n, n], stored flat, and [max_len, max_len] of a dense tensor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import cdiv
from jagged_kernels.device.search import search_steps, tile_count
from jagged_kernels.device.squares import (
    HEIGHT,
    ROW_OPTIONS,
    ROWS,
    WIDTH,
    aligned_rows,
    is_below,
    load_rows,
    token_bound,
)


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
    if padded.numel():
        number = float(value) if source.is_floating_point() else int(value)
        programs = users * cdiv(max_len, ROWS)
        _copy(source.contiguous(), target, offsets, matrix_offsets, max_len, number, programs)
    return padded


def launch_cut_matrices(
    padded: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int
) -> Tensor:
    """[total]: the reverse; 0 where `padded` ends before the matrix."""
    values, (users, max_len, _) = padded.new_empty(total), padded.shape
    if padded.numel() == 0:
        return values.zero_()
    if total:
        programs = tile_count(token_bound(values, offsets), users, ROWS)
        _copy(padded.contiguous(), values, offsets, matrix_offsets, max_len, None, programs)
    return values


def _copy(
    source: Tensor,
    target: Tensor,
    offsets: Tensor,
    matrix_offsets: Tensor,
    max_len: int,
    value: float | None,
    programs: int,
) -> None:
    """`value`, where the source has none: of the padded matrices. None for the reverse, and 0."""
    users = offsets.shape[0] - 1
    launch(
        _copy_kernel, programs,
        (
            source, target, offsets, matrix_offsets, value,
            max_len, users, search_steps(users),
        ),
        {"ROWS": ROWS, "HEIGHT": HEIGHT, "WIDTH": WIDTH}, **ROW_OPTIONS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["value", "max_len", "users", "steps"])
def _copy_kernel(
    source_ptr, target_ptr, offsets_ptr, matrix_offsets_ptr, value, max_len, users, steps,
    ROWS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows of `size` numbers in the target, of `side` in the source."""
    # int64: users x max_len x max_len passes 2^31 in large batches.
    square = max_len.to(tl.int64) * max_len
    if value is None:
        user, _, size, begin, row = load_rows(
            offsets_ptr, matrix_offsets_ptr, users, steps, tl.program_id(0), ROWS
        )
        side = max_len
        source_ptr += user * square
        other = 0
    else:
        tiles = tl.cdiv(max_len, ROWS)
        user, row = tl.program_id(0) // tiles, tl.program_id(0) % tiles * ROWS
        size, begin = max_len, user * square
        side = (tl.load(offsets_ptr + user + 1) - tl.load(offsets_ptr + user)).to(tl.int32)
        source_ptr += tl.load(matrix_offsets_ptr + user)
        other = value
    for first in range(row, tl.minimum(row + ROWS, size), HEIGHT):
        rows = first + tl.arange(0, HEIGHT)
        address, column, length = aligned_rows(target_ptr, begin, size, rows, WIDTH)
        source = (source_ptr + rows.to(tl.int64) * side)[:, None] + column
        columns = tl.where(rows < size, size, 0)
        filled = tl.where(rows < side, tl.minimum(columns, side), 0)[:, None]
        for block in range(0, length, WIDTH):
            numbers = tl.load(source + block, mask=is_below(block + column, filled), other=other)
            tl.store(address + block, numbers, mask=is_below(block + column, columns[:, None]))
