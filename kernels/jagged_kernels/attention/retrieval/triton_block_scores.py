"""Scores of key blocks by their means: one program a tile of queries and group."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import block_size
from jagged_kernels.device.search import search_steps, user_of_tile

# Key blocks, and numbers of a mean, that a program takes at a time.
_KEYS, _NUMBERS = 64, 64


def launch_block_scores(
    queries: Tensor,
    keys: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    score_offsets: Tensor,
    block: int,
    capacity: int,
    q_categories: Tensor | None,
    k_categories: Tensor | None,
) -> Tensor:
    """What `block_scores.block_scores` returns."""
    scores = torch.empty(capacity, dtype=torch.float32, device=queries.device)
    tiles, groups, size = queries.shape
    users = q_offsets.shape[0] - 1
    if capacity == 0 or tiles == 0 or users == 0:
        return scores.zero_()
    arguments = (
        queries.contiguous(), keys.contiguous(), q_offsets.contiguous(), k_offsets.contiguous(),
        score_offsets.contiguous(), scores,
        *(None if x is None else x.contiguous() for x in (q_categories, k_categories)),
        users, search_steps(users), capacity,
    )  # fmt: skip
    constants = {
        "BLOCK": block, "GROUPS": groups, "SIZE": size, "KEYS": _KEYS,
        "NUMBERS": block_size(size, _NUMBERS),
    }  # fmt: skip
    launch(_block_scores_kernel, (tiles, groups), arguments, constants, num_warps=2)
    return scores


@triton.jit(do_not_specialize=["users", "steps", "capacity"])
def _block_scores_kernel(
    queries_ptr, keys_ptr, q_offsets_ptr, k_offsets_ptr, score_offsets_ptr, scores_ptr,
    q_categories_ptr, k_categories_ptr, users, steps, capacity,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, KEYS: tl.constexpr,
    NUMBERS: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(0), tl.program_id(1)
    user = user_of_tile(q_offsets_ptr, users, steps, tile, BLOCK)
    first = (tl.load(k_offsets_ptr + user) // BLOCK).to(tl.int32) + user
    entry = tile.to(tl.int64) * GROUPS + group
    begin = tl.load(score_offsets_ptr + entry)
    count = (tl.load(score_offsets_ptr + entry + 1) - begin).to(tl.int32)
    of_tile, k_begin, k_end = 0, 0, 0
    if q_categories_ptr is not None:
        of_tile = _categories_of_tile(q_categories_ptr, q_offsets_ptr, user, tile, BLOCK)
        k_begin = tl.load(k_offsets_ptr + user).to(tl.int64)
        k_end = tl.load(k_offsets_ptr + user + 1).to(tl.int64)
    for done in range(0, count, KEYS):
        place = done + tl.arange(0, KEYS)
        exists = place < count
        key = ((first + place).to(tl.int64) * GROUPS + group) * SIZE
        score = tl.zeros([KEYS], tl.float32)
        for start in range(0, SIZE, NUMBERS):
            number = start + tl.arange(0, NUMBERS)
            inside = number < SIZE
            query = tl.load(queries_ptr + entry * SIZE + number, mask=inside, other=0.0)
            address = keys_ptr + key[:, None] + number[None, :]
            mean = tl.load(address, mask=exists[:, None] & inside[None, :], other=0.0)
            score += tl.sum(mean.to(tl.float32) * query.to(tl.float32)[None, :], 1)
        if q_categories_ptr is not None:
            start = k_begin + place.to(tl.int64) * BLOCK
            shared = _share(of_tile, k_categories_ptr, start, k_end, exists, KEYS, BLOCK)
            score = tl.where(shared, score, float("-inf"))
        tl.store(scores_ptr + begin + place, score, mask=exists & (begin + place < capacity))


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
