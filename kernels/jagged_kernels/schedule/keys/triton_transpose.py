"""The transpose of lists in two launches and a sum, without sorting: how many tiles list each key
block, and which.

A program takes some key blocks of a user and looks for each in the lists of all of the user's tiles
by halving, since lists ascend. Nothing is counted by two programs, so that nothing depends on who
is first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.device.search import search_steps, user_of_tile
from jagged_kernels.schedule.keys.blocks import tile_count
from jagged_kernels.schedule.keys.pairs import Batch

# Key blocks of a program, and tiles that it looks at beside each other.
_KEYS, _TILES = 32, 64


def launch_transpose(
    row_ptr: Tensor, col: Tensor, batch: Batch, window: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """What `transpose.transposed_lists` returns."""
    users, groups, block = batch.q_offsets.shape[0] - 1, batch.groups, batch.block
    counts = torch.zeros(batch.entries()[1] + 1, dtype=torch.int32, device=col.device)
    # What no entry lists is 0: twice the same is the same throughout.
    col_t = torch.zeros_like(col)
    if users == 0 or col.shape[0] == 0:
        return counts, col_t
    grid = (tile_count(batch.k_tokens, users, block * _KEYS), groups)
    given = (row_ptr.contiguous(), col.contiguous())
    offsets = (batch.q_offsets.contiguous(), batch.k_offsets.contiguous())
    sizes = (users, search_steps(users))
    constants = {"BLOCK": block, "GROUPS": groups, "KEYS": _KEYS, "TILES": _TILES}
    launch(_count_listing_kernel, grid, (*given, *offsets, counts, *sizes), constants, num_warps=4)
    row_ptr_t = counts.cumsum(0, dtype=torch.int32)
    launch(
        _fill_transpose_kernel, grid, (*given, *offsets, row_ptr_t, col_t, *sizes, *window),
        {**constants, "LIMITED": window != (-1, -1)}, num_warps=4,
    )  # fmt: skip
    return row_ptr_t, col_t


@triton.jit(do_not_specialize=["users", "steps"])
def _count_listing_kernel(
    row_ptr, col_ptr, q_offsets_ptr, k_offsets_ptr, counts_ptr, users, steps,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    number, block, queries, keys, first = _find_blocks(
        q_offsets_ptr, k_offsets_ptr, users, steps, BLOCK, KEYS
    )
    count = tl.zeros([KEYS], tl.int32)
    for start in range(0, tl.cdiv(queries, BLOCK), TILES):
        tile = start + tl.arange(0, TILES)
        found = _lists(row_ptr, col_ptr, first, tile, queries, group, block, BLOCK, GROUPS)
        count += tl.sum(found.to(tl.int32), 0)
    # The sum over all before an entry is where it begins: counts stand one behind.
    address = counts_ptr + 1 + number.to(tl.int64) * GROUPS + group
    tl.store(address, count, mask=block * BLOCK < keys)


@triton.jit(do_not_specialize=["users", "steps", "left", "right"])
def _fill_transpose_kernel(
    row_ptr, col_ptr, q_offsets_ptr, k_offsets_ptr, row_t_ptr, col_t_ptr, users, steps, left, right,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr,
    LIMITED: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1)
    number, block, queries, keys, first = _find_blocks(
        q_offsets_ptr, k_offsets_ptr, users, steps, BLOCK, KEYS
    )
    exists = block * BLOCK < keys
    entry = number.to(tl.int64) * GROUPS + group
    written = tl.load(row_t_ptr + entry, mask=exists, other=0)
    for start in range(0, tl.cdiv(queries, BLOCK), TILES):
        tile = start + tl.arange(0, TILES)
        found = _lists(row_ptr, col_ptr, first, tile, queries, group, block, BLOCK, GROUPS)
        found = found & exists[None, :]
        place = written[None, :] + tl.cumsum(found.to(tl.int32), 0) - 1
        partial = ((tile + 1) * BLOCK > queries)[:, None] & (block >= 0)[None, :]
        if LIMITED:
            partial = partial | _is_cut(
                tile[:, None], block[None, :], queries, keys, left, right, BLOCK
            )
        column = tile[:, None] * 2 + partial.to(tl.int32)
        tl.store(col_t_ptr + place, column, mask=found)
        written += tl.sum(found.to(tl.int32), 0)


@triton.jit
def _find_blocks(
    q_offsets_ptr, k_offsets_ptr, users, steps, BLOCK: tl.constexpr, KEYS: tl.constexpr
):
    """([KEYS] numbers of a program's key blocks, their places in the user's history, the user's
    queries and keys, the number of its first tile)"""
    user = user_of_tile(k_offsets_ptr, users, steps, tl.program_id(0), BLOCK * KEYS)
    begin = tl.load(k_offsets_ptr + user)
    keys = (tl.load(k_offsets_ptr + user + 1) - begin).to(tl.int32)
    part = tl.program_id(0) - (begin // (BLOCK * KEYS)).to(tl.int32) - user
    block = part * KEYS + tl.arange(0, KEYS)
    q_begin = tl.load(q_offsets_ptr + user)
    queries = (tl.load(q_offsets_ptr + user + 1) - q_begin).to(tl.int32)
    number = (begin // BLOCK).to(tl.int32) + user + block
    return number, block, queries, keys, (q_begin // BLOCK).to(tl.int32) + user


@triton.jit
def _lists(
    row_ptr, col_ptr, first, tile, queries, group, block, BLOCK: tl.constexpr, GROUPS: tl.constexpr
):
    """[TILES, KEYS] bool: whether a tile's list holds a key block."""
    exists = tile * BLOCK < queries
    address = row_ptr + (first + tile).to(tl.int64) * GROUPS + group
    begin = tl.load(address, mask=exists, other=0)
    end = tl.load(address + 1, mask=exists, other=0)
    left = tl.max(end - begin, 0)
    low, high = begin[:, None] + block[None, :] * 0, end[:, None] + block[None, :] * 0
    while left > 0:
        middle = low + (high - low) // 2
        listed = tl.load(col_ptr + middle, mask=low < high, other=0) >> 1
        behind = listed < block[None, :]
        low, high = (
            tl.where((low < high) & behind, middle + 1, low),
            tl.where((low < high) & ~behind, middle, high),
        )
        left = left // 2
    inside = low < end[:, None]
    return inside & ((tl.load(col_ptr + low, mask=inside, other=0) >> 1) == block[None, :])


@triton.jit
def _is_cut(tile, block, queries, keys, left, right, BLOCK: tl.constexpr):
    """Whether a query of a tile does not see a key of a block, by a band (`pairs.cut_pairs`)."""
    begin = tile * BLOCK + keys - queries
    newest = tl.minimum(begin + BLOCK, keys) - 1
    key = block * BLOCK
    last_key = tl.minimum(key + BLOCK, keys) - 1
    return ((left >= 0) & (key < newest - left)) | ((right >= 0) & (last_key > begin + right))
