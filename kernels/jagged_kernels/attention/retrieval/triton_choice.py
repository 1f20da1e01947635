"""The best key blocks in three launches and a sum: scores, the score from which on a block is
chosen, and the lists.

A score is an int32 that orders as it does, so that the bound between what is chosen and what is not
is found by halving: for any number of blocks, without sorting, and lists ascend as they are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.retrieval.asked import Asked
from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import block_size, cdiv
from jagged_kernels.device.arithmetic import ordered
from jagged_kernels.device.search import search_steps, user_of_tile
from jagged_kernels.schedule.keys.pairs import Batch

# Key blocks that a program scores, and numbers of a mean that it takes at a time: few, for a tile
# meets all blocks of its user, and there may be few tiles.
_KEYS, _NUMBERS = 16, 256
# Scores that a program looks at, and newest blocks that it writes, at a time.
_CHUNK = 512
_WIDTH = tl.constexpr(32)
# The rank of a block that cannot be chosen.
_NONE = tl.constexpr(-(2**31))
_SIZES = ["users", "steps", "newest", "most"]


def launch_choice(
    queries: Tensor, keys: Tensor, key_offsets: Tensor | None, batch: Batch, asked: Asked,
    categories: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `choice.choose_blocks` returns; for a batch of at least one user."""
    device, users, groups = queries.device, batch.q_offsets.shape[0] - 1, batch.groups
    entries = batch.entries()[0]
    most = asked.most if asked.best else 0
    ranks = torch.empty(entries * most, dtype=torch.int32, device=device)
    counts = torch.empty(entries + 1, dtype=torch.int32, device=device)
    bounds = torch.empty((entries, 3), dtype=torch.int32, device=device)
    col = torch.empty(entries * asked.width, dtype=torch.int32, device=device)
    offsets = (batch.q_offsets.contiguous(), batch.k_offsets.contiguous())
    sizes = (users, search_steps(users), asked.newest, most)
    constants = {"BLOCK": batch.block, "GROUPS": groups, "CAUSAL": asked.causal}
    if most:
        (tiles, heads, dim), chunks = queries.shape, cdiv(most, _KEYS)
        given = (key_offsets, *(categories or (None, None)))
        launch(
            _score_kernel, (tiles * chunks, groups),
            (
                queries.contiguous(), keys.contiguous(), *offsets,
                *(None if x is None else x.contiguous() for x in given),
                ranks, *sizes, chunks,
            ),
            {
                **constants, "HEADS": heads, "KV_HEADS": keys.shape[1], "DIM": dim, "KEYS": _KEYS,
                "NUMBERS": block_size(heads // groups * dim, _NUMBERS),
            },
            num_warps=4,
        )  # fmt: skip
    launch(
        _bound_kernel, entries, (ranks, *offsets, counts, bounds, *sizes, asked.best),
        {**constants, "CHUNK": _CHUNK}, num_warps=1,
    )  # fmt: skip
    row_ptr = counts.cumsum(0, dtype=torch.int32)
    launch(
        _fill_kernel, entries,
        (ranks, *offsets, row_ptr, bounds, col, *sizes, entries, asked.width),
        {**constants, "CHUNK": _CHUNK}, num_warps=1,
    )  # fmt: skip
    return row_ptr, col


@triton.jit
def _find_tile(
    q_offsets_ptr, k_offsets_ptr, tile, users, steps, BLOCK: tl.constexpr, CAUSAL: tl.constexpr
):
    """(user, its keys, where the tile's first query stands among them, key blocks that the tile
    sees: 0 for a number of no tile)"""
    user = user_of_tile(q_offsets_ptr, users, steps, tile, BLOCK)
    first = tl.load(q_offsets_ptr + user)
    queries = (tl.load(q_offsets_ptr + user + 1) - first).to(tl.int32)
    keys = (tl.load(k_offsets_ptr + user + 1) - tl.load(k_offsets_ptr + user)).to(tl.int32)
    begin = (tile - (first // BLOCK).to(tl.int32) - user) * BLOCK
    end = keys
    if CAUSAL:
        end = tl.minimum(begin + BLOCK, queries) + keys - queries
    seen = tl.where(begin < queries, tl.cdiv(tl.maximum(end, 0), BLOCK), 0)
    return user, keys, begin + keys - queries, seen


@triton.jit(do_not_specialize=[*_SIZES, "chunks"])
def _score_kernel(
    queries_ptr, keys_ptr, q_offsets_ptr, k_offsets_ptr, key_offsets_ptr, q_categories_ptr,
    k_categories_ptr, ranks_ptr, users, steps, newest, most, chunks,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, CAUSAL: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(0) // chunks, tl.program_id(1)
    user, _, _, seen = _find_tile(
        q_offsets_ptr, k_offsets_ptr, tile, users, steps, BLOCK, CAUSAL
    )  # fmt: skip
    place = tl.program_id(0) % chunks * KEYS + tl.arange(0, KEYS)
    older = tl.minimum(seen - newest, most)
    if tl.program_id(0) % chunks * KEYS >= older:
        return
    k_begin = tl.load(k_offsets_ptr + user).to(tl.int64)
    row = k_begin // BLOCK + user + place
    exists = place < older
    if key_offsets_ptr is not None:
        row = tl.load(key_offsets_ptr + user).to(tl.int64) + place
        exists = exists & (row < tl.load(key_offsets_ptr + user + 1))
    SIZE: tl.constexpr = HEADS // GROUPS * DIM
    queries_ptr += (tile.to(tl.int64) * GROUPS + group) * SIZE
    score = tl.zeros([KEYS], tl.float32)
    for start in range(0, SIZE, NUMBERS):
        number = start + tl.arange(0, NUMBERS)
        inside = number < SIZE
        query = tl.load(queries_ptr + number, mask=inside, other=0.0).to(tl.float32)
        number += group * SIZE
        if KV_HEADS != HEADS:
            number = number // DIM // (HEADS // KV_HEADS) * DIM + number % DIM
        address = keys_ptr + row[:, None] * (KV_HEADS * DIM) + number[None, :]
        mean = tl.load(address, mask=exists[:, None] & inside[None, :], other=0.0)
        score += tl.sum(mean.to(tl.float32) * query[None, :], 1)
    rank = tl.where(exists, ordered(score), _NONE)
    if q_categories_ptr is not None:
        of_tile = _categories_of_tile(q_categories_ptr, q_offsets_ptr, user, tile, BLOCK)
        k_end = tl.load(k_offsets_ptr + user + 1).to(tl.int64)
        begin = k_begin + place.to(tl.int64) * BLOCK
        shared = _share(of_tile, k_categories_ptr, begin, k_end, exists, KEYS, BLOCK)
        rank = tl.where(shared & (score != float("-inf")), rank, _NONE)
    ranks_ptr += (tile.to(tl.int64) * GROUPS + group) * most
    tl.store(ranks_ptr + place, rank, mask=place < older)


@triton.jit
def _categories_of_tile(categories_ptr, offsets_ptr, user, tile, BLOCK: tl.constexpr):
    """([BLOCK] categories of a tile's queries, is there a query)"""
    begin = tl.load(offsets_ptr + user).to(tl.int64)
    end = tl.load(offsets_ptr + user + 1).to(tl.int64)
    token = begin + (tile - begin // BLOCK - user) * BLOCK + tl.arange(0, BLOCK)
    return tl.load(categories_ptr + token, mask=token < end, other=0), token < end


@triton.jit
def _share(of_tile, categories_ptr, start, end, exists, KEYS: tl.constexpr, BLOCK: tl.constexpr):
    """[KEYS] bool: which of the key blocks from the tokens `start` on hold one of the tile's
    categories."""
    categories, is_query = of_tile
    found = tl.zeros([KEYS], tl.int32)
    for place in range(0, BLOCK):
        token = start + place
        inside = exists & (token < end)
        category = tl.load(categories_ptr + token, mask=inside, other=0)
        same = (category[:, None] == categories[None, :]) & is_query[None, :] & inside[:, None]
        found = tl.maximum(found, tl.max(same.to(tl.int32), 1))
    return found > 0


@triton.jit(do_not_specialize=[*_SIZES, "best"])
def _bound_kernel(
    ranks_ptr, q_offsets_ptr, k_offsets_ptr, counts_ptr, bounds_ptr, users, steps, newest, most,
    best, BLOCK: tl.constexpr, GROUPS: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """How many blocks an entry lists, and which: ranks above `high` are chosen, and of those from
    `low` to `high` the `rest` first."""
    entry = tl.program_id(0)
    _, _, _, seen = _find_tile(
        q_offsets_ptr, k_offsets_ptr, entry // GROUPS, users, steps, BLOCK, CAUSAL
    )  # fmt: skip
    older = tl.minimum(seen - newest, most)
    ranks_ptr += entry.to(tl.int64) * most
    found, lowest, highest = seen * 0, seen * 0 + 0x7FFFFFFF, seen * 0 + _NONE
    for start in range(0, older, CHUNK):
        rank = _load_ranks(ranks_ptr, start, older, CHUNK)
        exists = rank != _NONE
        found += tl.sum(exists.to(tl.int32), 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(exists, rank, 0x7FFFFFFF), 0))
        highest = tl.maximum(highest, tl.max(rank, 0))
    wanted = tl.minimum(best, found)
    # There are `from_low` ranks of `low` or higher, and `above`, too few, of `end` or higher.
    low, end = lowest.to(tl.int64), highest.to(tl.int64) + 1
    from_low, above = found, found * 0
    while (from_low > wanted) & (end - low > 1):
        middle = low + (end - low) // 2
        count = found * 0
        for start in range(0, older, CHUNK):
            rank = _load_ranks(ranks_ptr, start, older, CHUNK)
            count += tl.sum((rank >= middle).to(tl.int32), 0)
        enough = count >= wanted
        low, from_low = tl.where(enough, middle, low), tl.where(enough, count, from_low)
        end, above = tl.where(enough, end, middle), tl.where(enough, above, count)
    bounds_ptr += entry.to(tl.int64) * 3
    tl.store(bounds_ptr, low.to(tl.int32))
    tl.store(bounds_ptr + 1, (end - 1).to(tl.int32))
    tl.store(bounds_ptr + 2, wanted - above)
    # The sum over all before an entry is where it begins: counts stand one behind.
    tl.store(counts_ptr + 1 + entry, wanted + tl.minimum(newest, seen))
    if entry == 0:
        tl.store(counts_ptr, 0)


@triton.jit
def _load_ranks(ranks_ptr, start, older, CHUNK: tl.constexpr):
    place = start + tl.arange(0, CHUNK)
    return tl.load(ranks_ptr + place, mask=place < older, other=_NONE)


@triton.jit(do_not_specialize=[*_SIZES, "entries", "width"])
def _fill_kernel(
    ranks_ptr, q_offsets_ptr, k_offsets_ptr, row_ptr, bounds_ptr, col_ptr, users, steps, newest,
    most, entries, width,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, CAUSAL: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    _, keys, begin, seen = _find_tile(
        q_offsets_ptr, k_offsets_ptr, entry // GROUPS, users, steps, BLOCK, CAUSAL
    )  # fmt: skip
    older = tl.minimum(seen - newest, most)
    ranks_ptr += entry.to(tl.int64) * most
    bounds_ptr += entry.to(tl.int64) * 3
    low, high = tl.load(bounds_ptr), tl.load(bounds_ptr + 1)
    rest, written = tl.load(bounds_ptr + 2), tl.load(row_ptr + entry)
    for start in range(0, older, CHUNK):
        rank = _load_ranks(ranks_ptr, start, older, CHUNK)
        between = (rank >= low) & (rank <= high)
        chosen = (rank > high) | (between & (tl.cumsum(between.to(tl.int32), 0) <= rest))
        rest -= tl.sum(between.to(tl.int32), 0)
        place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
        block = start + tl.arange(0, CHUNK)
        _store_blocks(col_ptr, place, block, chosen, keys, begin, BLOCK, CAUSAL)
        written += tl.sum(chosen.to(tl.int32), 0)
    count = tl.minimum(newest, seen)
    for start in range(0, count, _WIDTH):
        place = start + tl.arange(0, _WIDTH)
        block = seen - count + place
        _store_blocks(col_ptr, written + place, block, place < count, keys, begin, BLOCK, CAUSAL)
    # What no entry lists is 0, so that twice the same is the same throughout.
    end = tl.load(row_ptr + entries)
    for start in range(0, width, _WIDTH):
        place = start + tl.arange(0, _WIDTH)
        address = entry * width + place
        tl.store(col_ptr + address, place * 0, mask=(place < width) & (address >= end))


@triton.jit
def _store_blocks(
    col_ptr, place, block, exists, keys, begin, BLOCK: tl.constexpr, CAUSAL: tl.constexpr
):
    """Key blocks with what is said of them: is there a token that a query does not see?"""
    end = (block + 1) * BLOCK
    partial = end > keys
    if CAUSAL:
        partial = partial | (tl.minimum(end, keys) - 1 > begin)
    tl.store(col_ptr + place, block * 2 + partial.to(tl.int32), mask=exists)
