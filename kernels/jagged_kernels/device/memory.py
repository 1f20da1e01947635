"""Tokens in and out of a kernel: addresses, tiles of tokens and of columns."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import cdiv, power_of_two

# A program of copies.
_BYTES_PER_PROGRAM = 16384
_MAX_COLUMNS = 512
# A program of what computes: enough loads in flight, few registers.
_ELEMENTS = 4096


def as_rows(x: Tensor) -> Tensor:
    """[T, ...] as [T, width] with unit stride within a row; bool as bytes."""
    x = x.view(torch.uint8) if x.dtype == torch.bool else x
    return rows_of_dims(x.flatten(1) if x.dim() > 1 else x[:, None])


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
def load_block(
    ptr, start, end, stride, BLOCK: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr, column=0,
    KEPT: tl.constexpr = True,
):  # fmt: skip
    """[BLOCK, PAD_D] from token `start` and from `column`; 0 from token `end` and column D on.

    KEPT: where each number lies in a block is worked out once for all blocks of a loop and stays
    in registers; False for loops that have none to spare.
    """
    address, token, columns = _addresses(ptr, start, stride, column, BLOCK, PAD_D, KEPT)
    if D % PAD_D != 0:
        return tl.load(address, mask=(token < end) & (columns < D), other=0.0)
    return tl.load(address, mask=token < end, other=0.0)


@triton.jit
def store_block(
    ptr, block, start, end, stride, BLOCK: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr,
    column=0, KEPT: tl.constexpr = True,
):  # fmt: skip
    """Where `load_block` would read, in the dtype of `ptr`."""
    address, token, columns = _addresses(ptr, start, stride, column, BLOCK, PAD_D, KEPT)
    inside = token < end
    if D % PAD_D != 0:
        inside = inside & (columns < D)
    tl.store(address, block.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def _addresses(
    ptr, start, stride, column, TILE: tl.constexpr, BLOCK: tl.constexpr, KEPT: tl.constexpr
):  # fmt: skip
    """Addresses [TILE, BLOCK], tokens [TILE, 1] and columns [1, BLOCK].

    Tokens x columns pass 2^31, a tile does not: KEPT, 64-bit products are for the tile's start
    alone, and what is left does not change from tile to tile.
    """
    index = tl.arange(0, TILE)[:, None]
    columns = column + tl.arange(0, BLOCK)[None, :]
    if KEPT:
        return _token_start(ptr, start, stride) + (index * stride + columns), start + index, columns
    token = start + index
    return ptr + token.to(tl.int64) * stride + columns, token, columns


@triton.jit
def _token_start(ptr, start, stride):
    # A sum, because the interpreter's loops count in Python integers, which cannot be cast.
    return ptr + (start + tl.full([], 0, tl.int64)) * stride


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


@triton.jit
def load_numbers(ptr, start, end, stride, BLOCK: tl.constexpr):
    """[BLOCK] numbers, one a token; 0 from `end` on."""
    index = tl.arange(0, BLOCK)
    address = _token_start(ptr, start, stride) + index * stride
    return tl.load(address, mask=start + index < end, other=0.0)


@triton.jit
def load_number_pairs(first_ptr, second_ptr, start, end, stride, BLOCK: tl.constexpr):
    """Two times [BLOCK] numbers, one a token; 0 from `end` on.

    For numbers that stand along the columns of scores. In one load of both there is a number for
    each thread, and Triton brings it through shared memory; two loads of BLOCK numbers it repeats
    in every thread that needs them, dozens of instructions in a loop of hundreds.
    """
    index = tl.arange(0, BLOCK)[:, None]
    which = tl.arange(0, 2)[None, :]
    first = _token_start(first_ptr, start, stride)
    second = _token_start(second_ptr, start, stride)
    address = tl.where(which == 0, first, second) + index * stride
    inside = (start + index < end) & (which < 2)
    return tl.split(tl.load(address, mask=inside, other=0.0))


@triton.jit
def store_numbers(ptr, numbers, start, end, stride, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    address = _token_start(ptr, start, stride) + index * stride
    tl.store(address, numbers, mask=start + index < end)
