"""Sums of rows that share a key, however many they are: the gradient of a lookup.

A program takes a tile of sorted rows at once. Where not all of them share a key, which do is a
matrix of ones and zeros, and its product with the rows has each row's sum. What begins and ends
inside a tile is finished; of what goes on, every tile leaves a partial sum, and a second launch
adds those up, for each key where it begins. The order of additions depends on nothing but the keys.
"""

# Triton's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.tiles import LaunchConfig
from jagged_kernels.interaction.triton_linear import block_size, product_precision
from jagged_kernels.interaction.triton_rows import as_rows, row_addresses
from jagged_kernels.launch import cdiv, launch

# By bytes of a number; `block` is the rows of a tile.
SUM_CONFIGS = {2: LaunchConfig(128, 4, 1, 128), 4: LaunchConfig(64, 4, 1, 168)}
# Partial sums that are added at a time.
MERGE_ROWS = 64
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
    config = SUM_CONFIGS[rows.element_size()]
    tiles = cdiv(count, config.block)
    columns = block_size(width, _MAX_COLUMNS)
    blocks = cdiv(width, columns)
    partials = None
    if tiles > 1:
        # Of what a tile goes on with, and of what it begins.
        partials = torch.empty((2 * tiles, width), dtype=torch.float32, device=rows.device)
    shape = {"TILE": config.block, "WIDTH": width, "COLUMNS": columns}
    launch(
        _sum_tiles_kernel, (tiles, blocks),
        (sums, source, order, keys, partials, count, rows.shape[0], size),
        {"STRIDE": source.stride(0), **shape, "PRECISION": product_precision(rows)},
        **config.options(),
    )  # fmt: skip
    if partials is not None:
        launch(
            _merge_tiles_kernel, (tiles - 1, blocks), (sums, partials, keys, tiles, size),
            {**shape, "ROWS": MERGE_ROWS}, num_warps=4,
        )  # fmt: skip
    return sums


@triton.jit(do_not_specialize=["count", "tokens", "size"])
def _sum_tiles_kernel(
    sums_ptr, rows_ptr, order_ptr, keys_ptr, partials_ptr, count, tokens, size,
    STRIDE: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    start = tile * TILE
    end = tl.minimum(start + TILE, count)
    at = start + tl.arange(0, TILE)
    inside = at < count
    key = tl.load(keys_ptr + at, mask=inside, other=-1)
    after = tl.load(keys_ptr + at + 1, mask=at + 1 < end, other=-1)
    row = tl.load(order_ptr + at, mask=inside, other=0).to(tl.int32) % tokens
    address, column = row_addresses(row, STRIDE, WIDTH, COLUMNS)
    rows = tl.load(rows_ptr + address, mask=inside[:, None] & column, other=0.0)
    first, last = tl.load(keys_ptr + start), tl.load(keys_ptr + end - 1)
    goes_on = tl.load(keys_ptr + start - 1, mask=start > 0, other=-1) == first
    stays = tl.load(keys_ptr + end, mask=end < count, other=-1) == last
    if first == last:
        total = tl.sum(rows.to(tl.float32), 0)[None, :]
        zero = tl.zeros([1], tl.int64)
        exists = (zero <= first) & (first < size)
        cut = goes_on | stays
        _store_rows(sums_ptr, total, zero + first, exists & (cut == 0), WIDTH, COLUMNS)
        if partials_ptr is not None:
            begins = (goes_on == 0).to(tl.int64)
            _store_rows(partials_ptr, total, zero + 2 * tile + begins, exists & cut, WIDTH, COLUMNS)
    else:
        others = tl.load(keys_ptr + start + tl.arange(0, TILE), mask=inside, other=-1)
        same = (key[:, None] == others[None, :]).to(rows.dtype)
        sums = tl.dot(same, rows, input_precision=PRECISION)
        # 0 times NaN reaches the rows of all keys.
        if tl.sum(tl.sum(sums * 0.0, 1), 0) != 0.0:
            sums = tl.zeros([TILE, COLUMNS], tl.float32)
            columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
            for place in range(start, end):
                number = tl.load(order_ptr + place).to(tl.int32) % tokens
                one = rows_ptr + number.to(tl.int64) * STRIDE + columns
                one = tl.load(one, mask=columns < WIDTH, other=0.0).to(tl.float32)
                shares = (key == tl.load(keys_ptr + place))[:, None]
                sums += tl.where(shares, one[None, :], 0.0)
        head = (key == first) & goes_on
        tail = (key == last) & stays
        ends = inside & (key >= 0) & (key < size) & ((after != key) | (at == end - 1))
        _store_rows(sums_ptr, sums, key, ends & (head == 0) & (tail == 0), WIDTH, COLUMNS)
        if partials_ptr is not None:
            slots = 2 * tile + tail.to(tl.int64)
            _store_rows(partials_ptr, sums, slots, ends & (head | tail), WIDTH, COLUMNS)


@triton.jit(do_not_specialize=["tiles", "size"])
def _merge_tiles_kernel(
    sums_ptr, partials_ptr, keys_ptr, tiles, size,
    TILE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
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
    next_tile = tile + 1
    more = next_tile < tiles
    while more:
        other = next_tile + tl.arange(0, ROWS)
        exists = other < tiles
        part_address, _ = row_addresses(2 * other, WIDTH, WIDTH, COLUMNS)
        part = tl.load(partials_ptr + part_address, mask=exists[:, None] & column, other=0.0)
        same = exists & (tl.load(keys_ptr + other * TILE, mask=exists, other=-1) == key)
        total += tl.sum(tl.where(same[:, None], part, 0.0), 0)
        next_tile += ROWS
        more = tl.min(same.to(tl.int32), 0) > 0
    address, column = row_addresses(key + tl.zeros([1], tl.int64), WIDTH, WIDTH, COLUMNS)
    tl.store(sums_ptr + address, total[None, :].to(sums_ptr.dtype.element_ty), mask=column)


@triton.jit
def _store_rows(ptr, sums, row, which, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    address, column = row_addresses(row, WIDTH, WIDTH, COLUMNS)
    tl.store(ptr + address, sums.to(ptr.dtype.element_ty), mask=which[:, None] & column)
