"""Sums of rows that share a key, however many they are: the gradient of a lookup.

A program takes a tile of sorted rows at once. Which of them have one of the tile's distinct keys is
a matrix of ones and zeros, and its product with the rows has the sums: of a few keys at a time, as
tiles mostly have no more. What begins and ends inside a tile is finished; of what goes on, every
tile leaves a partial sum, and a second launch adds those up, for each key where it begins. The
order of additions depends on nothing but the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import LaunchConfig, block_size, cdiv
from jagged_kernels.device.memory import as_rows, row_addresses

# By bytes of a number, of up to 64 columns and of more; `block` is the rows of a tile.
SUM_CONFIGS = {2: LaunchConfig(256, 4, 1, 128), 4: LaunchConfig(64, 4, 1, 128)}
WIDE_SUM_CONFIGS = {2: LaunchConfig(128, 4, 1, 128), 4: LaunchConfig(64, 4, 1, 168)}
# Distinct keys of a tile whose sums are made at a time, a product's fewest; and, by bytes of a
# number, up to how many are summed one by one.
KEYS, FEW_KEYS = 16, {2: 1, 4: 3}
# Partial sums that are added at first, mostly all that there are, and then at a time.
MERGE_FEW, MERGE_ROWS = 4, 128
_MAX_COLUMNS = 128
_KEY_BLOCK = 1024


def launch_keys(
    ids: Sequence[Tensor], sizes: Sequence[int], parts: int, dtype: torch.dtype
) -> Tensor:
    """[features x T]: ids, those of later features behind the tables before them, those of later
    parts of the tokens behind all tables of the parts before, and -1 for those outside their
    table."""
    tokens = ids[0].shape[0]
    keys = torch.empty(len(ids) * tokens, dtype=dtype, device=ids[0].device)
    if keys.numel():
        packed = tuple(n.contiguous() for n in ids)
        *bases, rows = accumulate(sizes, initial=0)
        tables = {"SIZES": tuple(sizes), "BASES": tuple(bases), "ROWS": rows, "BLOCK": _KEY_BLOCK}
        inputs = (keys, packed, tokens, cdiv(tokens, parts))
        launch(_keys_kernel, cdiv(tokens, _KEY_BLOCK), inputs, tables)
    return keys


@triton.jit(do_not_specialize=["tokens", "part"])
def _keys_kernel(
    keys_ptr, ids, tokens, part, SIZES: tl.constexpr, BASES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    before = (token // part).to(tl.int64) * ROWS
    for feature in tl.static_range(len(ids)):
        number = tl.load(ids[feature] + token, mask=inside, other=-1)
        exists = (number >= 0) & (number < SIZES[feature])
        key = tl.where(exists, before + number.to(tl.int64) + BASES[feature], -1)
        place = token.to(tl.int64) + tokens.to(tl.int64) * feature
        tl.store(keys_ptr + place, key.to(keys_ptr.dtype.element_ty), mask=inside)


def launch_sum_sorted_rows(
    rows: Tensor, order: Tensor, keys: Tensor, size: int, dtype: torch.dtype
) -> Tensor:
    """What `row_sums.sum_sorted_rows` says."""
    sums = rows.new_zeros((size, rows.shape[1]), dtype=dtype)
    count, width = keys.shape[0], rows.shape[1]
    if rows.numel() == 0 or size == 0 or count == 0:
        return sums
    source = as_rows(rows)
    columns = block_size(width, _MAX_COLUMNS)
    config = (SUM_CONFIGS if columns <= 64 else WIDE_SUM_CONFIGS)[rows.element_size()]
    tiles = cdiv(count, config.block)
    blocks = cdiv(width, columns)
    partials = None
    if tiles > 1:
        # Of what a tile goes on with, and of what it begins.
        partials = torch.empty((2 * tiles, width), dtype=torch.float32, device=rows.device)
    shape = {"TILE": config.block, "WIDTH": width, "COLUMNS": columns}
    launch(
        _sum_tiles_kernel, (tiles, blocks),
        (sums, source, order, keys, partials, count, rows.shape[0], size),
        {"STRIDE": source.stride(0), **shape, "KEYS": KEYS, "FEW": FEW_KEYS[rows.element_size()]},
        **config.options(),
    )  # fmt: skip
    if partials is not None:
        launch(
            _merge_tiles_kernel, (tiles - 1, blocks), (sums, partials, keys, tiles, size),
            {**shape, "FEW": MERGE_FEW, "ROWS": MERGE_ROWS}, num_warps=4,
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["count", "tokens", "size"])
def _sum_tiles_kernel(
    sums_ptr, rows_ptr, order_ptr, keys_ptr, partials_ptr, count, tokens, size,
    STRIDE: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    KEYS: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    start = tile * TILE
    end = tl.minimum(start + TILE, count)
    at = start + tl.arange(0, TILE)
    inside = at < count
    row = tl.load(order_ptr + at, mask=inside, other=0).to(tl.int32) % tokens
    key = tl.load(keys_ptr + at, mask=inside, other=-1)
    address, column = row_addresses(row, STRIDE, WIDTH, COLUMNS)
    rows = tl.load(rows_ptr + address, mask=inside[:, None] & column, other=0.0)
    later = inside & (at > start)
    changes = later & (key != tl.load(keys_ptr + at - 1, mask=later, other=-1))
    goes_on = tl.load(keys_ptr + start - 1, mask=start > 0, other=-1) == tl.load(keys_ptr + start)
    stays = tl.load(keys_ptr + end, mask=end < count, other=-1) == tl.load(keys_ptr + end - 1)
    if key.dtype == tl.int16:
        key = key.to(tl.int32)
    # Numbers of the distinct keys; what lies behind the last row is zeros of the last.
    rank = tl.cumsum(changes.to(tl.int32), 0)
    distinct = tl.max(rank, 0) + 1
    if distinct <= FEW:
        for one in range(0, distinct):
            share = tl.where((rank == one)[:, None], rows, 0.0).to(tl.float32)
            found = tl.max(tl.where(rank == one, key, -1), 0) + tl.zeros([1], key.dtype)
            _store_sums(
                sums_ptr, partials_ptr, tl.sum(share, 0)[None, :], found, one + tl.arange(0, 1),
                distinct, goes_on, stays, tile, size, WIDTH, COLUMNS,
            )  # fmt: skip
    else:
        for first in range(0, distinct, KEYS):
            number = first + tl.arange(0, KEYS)
            same = number[:, None] == rank[None, :]
            # -1 where there is no such key, or none that is asked for.
            found = tl.max(tl.where(same, key[None, :], -1), 1)
            sums = _sum_shares(same, rows)
            # 0 times NaN reaches the rows of all keys.
            if tl.sum(tl.sum(sums * 0.0, 1), 0) != 0.0:
                sums = tl.zeros([KEYS, COLUMNS], tl.float32)
                columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
                for place in range(start, end):
                    token = tl.load(order_ptr + place).to(tl.int32) % tokens
                    one = rows_ptr + token.to(tl.int64) * STRIDE + columns
                    one = tl.load(one, mask=columns < WIDTH, other=0.0).to(tl.float32)
                    shares = (found == tl.load(keys_ptr + place))[:, None]
                    sums += tl.where(shares, one[None, :], 0.0)
            _store_sums(
                sums_ptr, partials_ptr, sums, found, number, distinct, goes_on, stays, tile, size,
                WIDTH, COLUMNS,
            )  # fmt: skip


@triton.jit
def _store_sums(
    sums_ptr, partials_ptr, sums, key, number, distinct, goes_on, stays, tile, size,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of the keys that are the tile's distinct ones of these numbers: in place those that are
    finished, and as a tile's partial sum the first that goes on and the last that stays."""
    exists = (key >= 0) & (key < size)
    head = (number == 0) & goes_on
    tail = (number == distinct - 1) & stays
    _store_rows(sums_ptr, sums, key, exists & (head == 0) & (tail == 0), WIDTH, COLUMNS)
    if partials_ptr is not None:
        slot = 2 * tile + (tail & (head == 0)).to(tl.int64)
        _store_rows(partials_ptr, sums, slot, exists & (head | tail), WIDTH, COLUMNS)


@triton.jit
def _sum_shares(same, rows):
    """[KEYS, COLUMNS]: sums of the rows [TILE, COLUMNS] that each key has in same [KEYS, TILE]."""
    if rows.dtype == tl.float32:
        # Three parts of 11 bits or fewer, which TF32 holds: its products with ones are exact.
        ones = same.to(tl.float32)
        high = _leading_bits(rows)
        rest = rows - high
        middle = _leading_bits(rest)
        sums = tl.dot(ones, rest - middle, input_precision="tf32")
        sums = tl.dot(ones, middle, sums, input_precision="tf32")
        sums = tl.dot(ones, high, sums, input_precision="tf32")
    else:
        sums = tl.dot(same.to(rows.dtype), rows)
    return sums


@triton.jit
def _leading_bits(x):
    """float32 without the bits that TF32 has not."""
    return (x.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tiles", "size"])
def _merge_tiles_kernel(
    sums_ptr, partials_ptr, keys_ptr, tiles, size,
    TILE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, FEW: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Adds up the key that begins in a tile and goes on behind it."""
    tile = tl.program_id(0).to(tl.int64)
    start = tile * TILE
    key = tl.load(keys_ptr + start + TILE - 1)
    goes_on = tl.load(keys_ptr + start + TILE) == key
    is_later = tl.load(keys_ptr + start) != key
    begins = is_later | (tl.load(keys_ptr + start - 1, mask=start > 0, other=-1) != key)
    if (goes_on & begins & (key >= 0) & (key < size)) == 0:
        return
    address, column = row_addresses(2 * tile + 1 + tl.arange(0, 1), WIDTH, WIDTH, COLUMNS)
    total = tl.sum(tl.load(partials_ptr + address, mask=column, other=0.0), 0)
    part, more = _add_parts(partials_ptr, keys_ptr, key, tile + 1, tiles, TILE, WIDTH, COLUMNS, FEW)
    total += part
    next_tile = tile + 1 + FEW
    while more:
        part, more = _add_parts(
            partials_ptr, keys_ptr, key, next_tile, tiles, TILE, WIDTH, COLUMNS, ROWS
        )
        total += part
        next_tile += ROWS
    address, column = row_addresses(key + tl.zeros([1], tl.int64), WIDTH, WIDTH, COLUMNS)
    tl.store(sums_ptr + address, total[None, :].to(sums_ptr.dtype.element_ty), mask=column)


@triton.jit
def _add_parts(
    partials_ptr, keys_ptr, key, first, tiles,
    TILE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(sum [COLUMNS] over those of ROWS tiles that go on with `key`, do all of them)"""
    tile = first + tl.arange(0, ROWS)
    same = (tl.load(keys_ptr + tile * TILE, mask=tile < tiles, other=-1) == key) & (tile < tiles)
    address, column = row_addresses(2 * tile, WIDTH, WIDTH, COLUMNS)
    part = tl.load(partials_ptr + address, mask=same[:, None] & column, other=0.0)
    return tl.sum(part, 0), tl.min(same.to(tl.int32), 0) > 0


@triton.jit
def _store_rows(ptr, sums, row, which, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    address, column = row_addresses(row, WIDTH, WIDTH, COLUMNS)
    tl.store(ptr + address, sums.to(ptr.dtype.element_ty), mask=which[:, None] & column)
