"""Tokens in and out of a kernel: addresses, tiles of tokens and of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.sizes import cdiv, power_of_two

# A program of copies.
_BYTES_PER_PROGRAM = 16384
_MAX_COLUMNS = 512
# A program of what computes: enough loads in flight, few registers.
_ELEMENTS = 4096


def as_rows(x: Tensor) -> Tensor:
    """[T, ...] as [T, width] with unit stride within a row; bool as bytes."""
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    rows = x.flatten(1) if x.dim() > 1 else x[:, None]
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def row_tiles(tokens: int, width: int, element_size: int) -> tuple[tuple[int, int], dict[str, int]]:
    """Grid (chunks of tokens, blocks of columns) and the constants WIDTH, COLUMNS, BLOCK."""
    columns = min(1 << (width - 1).bit_length(), _MAX_COLUMNS)
    # Rows that are not all aligned to 16 bytes are loaded number by number: half as many.
    size = _BYTES_PER_PROGRAM if width * element_size % 16 == 0 else _BYTES_PER_PROGRAM // 2
    block = min(max(size // (columns * element_size), 16), 1024)
    grid = (cdiv(tokens, block), cdiv(width, columns))
    return grid, {"WIDTH": width, "COLUMNS": columns, "BLOCK": block}


def column_tile(columns: int) -> tuple[int, int]:
    """(rows, columns) of a tile, for columns that do not need each other."""
    block = min(power_of_two(columns), 128)
    return min(_ELEMENTS // block, 1024), block


def row_tile(columns: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a tile of whole rows, for sums along them."""
    if columns > 8192:
        raise NotImplementedError(f"the triton backend goes to 8192 columns, got {columns}")
    block = power_of_two(columns)
    return max(min(_ELEMENTS // block, 128), 1), block, 8 if block > 2048 else 4


@triton.jit
def load_tile(
    ptr, start, end, stride, column, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """[TILE, BLOCK] from token `start` and from `column`; 0 from token `end` and from COLUMNS."""
    token = start + tl.arange(0, TILE)
    columns = column + tl.arange(0, BLOCK)
    # int64: tokens x columns passes 2^31 in large batches.
    address = ptr + token.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = token[:, None] < end
    if COLUMNS % BLOCK != 0:
        inside = inside & (columns[None, :] < COLUMNS)
    return tl.load(address, mask=inside, other=0.0)


@triton.jit
def store_tile(
    ptr, block, start, end, column, COLUMNS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Into a contiguous [T, COLUMNS], in its dtype, what `load_tile` would read."""
    token = start + tl.arange(0, TILE)
    columns = column + tl.arange(0, BLOCK)
    address = ptr + token.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    inside = token[:, None] < end
    if COLUMNS % BLOCK != 0:
        inside = inside & (columns[None, :] < COLUMNS)
    tl.store(address, block.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def address_of(ptr, row, column, STRIDE: tl.constexpr):
    """[rows, columns] addresses; int64, for tokens x columns passes 2^31 in large batches."""
    return ptr + row.to(tl.int64)[:, None] * STRIDE + column[None, :]


@triton.jit
def row_addresses(row, STRIDE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """[BLOCK, COLUMNS]: elements from the start of the tensor, for the program's columns, and
    which of the columns exist."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    # int64: tokens x width passes 2^31 in large batches.
    return row.to(tl.int64)[:, None] * STRIDE + column[None, :], (column < WIDTH)[None, :]


@triton.jit
def padded_rows(first_row, length, users, ROWS: tl.constexpr):
    """([ROWS] user, place among the user's padded rows, is there one) from `first_row`, int64."""
    # One long division; the rows of a tile are few enough for short ones.
    place = (first_row % length).to(tl.int32) + tl.arange(0, ROWS)
    user = (first_row // length).to(tl.int32) + place // length
    return tl.minimum(user, users - 1), place % length, user < users
