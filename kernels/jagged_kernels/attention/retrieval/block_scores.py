"""How well each tile of queries and each key block of its user fit: products of their means, of
blocks that hold one of the tile's categories where these are given."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jagged_kernels.core.backends import triton_runs
from jagged_kernels.core.operators import define_op
from jagged_kernels.schedule.keys.blocks import first_tiles

# Pairs of a query's and a key's category that are compared at a time.
_MOST_PAIRS = 1 << 24


def _block_scores(
    queries: Tensor,
    keys: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    score_offsets: Tensor,
    block: int,
    capacity: int,
    q_categories: Tensor | None = None,
    k_categories: Tensor | None = None,
) -> Tensor:
    """[capacity] float32: score_offsets[x * G + g] + c holds that of tile x and its user's key
    block c in group g. What belongs to no tile means nothing.

    Args:
        queries: [Nq, G, E], a mean of each tile's. keys: [Nk, G, E], of each key block's; both
            numbered as in `schedule.keys.blocks`.
        score_offsets: [Nq * G + 1] int64, at most `capacity`: where the scores of an entry begin;
            it has no more of them than its user has blocks.
        q_categories, k_categories: [Tq] and [Tk] integers, or None for both. The score of a block
            that holds no category of the tile's queries is -inf.
    """
    if triton_runs(queries) and queries.dtype != torch.float64:
        from jagged_kernels.attention.retrieval.triton_block_scores import launch_block_scores

        return launch_block_scores(
            queries, keys, q_offsets, k_offsets, score_offsets, block, capacity,
            q_categories, k_categories,
        )  # fmt: skip
    groups = queries.shape[1]
    scores = queries.new_zeros(capacity, dtype=torch.float32)
    count = int(score_offsets[-1])
    if count == 0:
        return scores
    entry = torch.arange(score_offsets.shape[0] - 1, device=queries.device)
    entry = entry.repeat_interleave(score_offsets.diff())
    place = torch.arange(count, device=queries.device) - score_offsets[entry]
    tile, group = entry // groups, entry % groups
    first = first_tiles(q_offsets, block)
    user = torch.searchsorted(first, tile, right=True) - 1
    key = first_tiles(k_offsets, block)[user] + place
    compute = torch.promote_types(queries.dtype, torch.float32)
    products = queries[tile, group].to(compute) * keys[key, group].to(compute)
    scores[:count] = products.sum(-1).float()
    if q_categories is not None and k_categories is not None:
        of_tiles = _by_block(q_categories, q_offsets, block, queries.shape[0])
        of_keys = _by_block(k_categories, k_offsets, block, keys.shape[0])
        parts = (x.split(max(1, _MOST_PAIRS // block**2)) for x in (tile, key))
        shared = [_share(of_tiles, t, of_keys, k) for t, k in zip(*parts, strict=True)]
        scores[:count].masked_fill_(~torch.cat(shared), -math.inf)
    return scores


def _by_block(categories: Tensor, offsets: Tensor, block: int, count: int) -> tuple[Tensor, Tensor]:
    """([N, block] the categories of each block's tokens, [N, block] is there a token)."""
    number = torch.arange(count, device=offsets.device)
    first = first_tiles(offsets, block)
    user = torch.searchsorted(first, number, right=True) - 1
    start, end = offsets[:-1][user, None], offsets[1:][user, None]
    token = start + (number - first[user])[:, None] * block
    token = token + torch.arange(block, device=offsets.device)
    return categories[token.clamp(max=categories.shape[0] - 1)], token < end


def _share(
    of_tiles: tuple[Tensor, Tensor], tile: Tensor, of_keys: tuple[Tensor, Tensor], key: Tensor
) -> Tensor:
    """[P] bool: whether tile p and key block p have a category in common."""
    (q, q_exists), (k, k_exists) = of_tiles, of_keys
    same = q[tile][:, :, None] == k[key][:, None, :]
    same &= q_exists[tile][:, :, None] & k_exists[key][:, None, :]
    return same.flatten(1).any(1)


def _empty_scores(
    queries: Tensor, keys: Tensor, q_offsets: Tensor, k_offsets: Tensor, score_offsets: Tensor,
    block: int, capacity: int, q_categories: Tensor | None = None,
    k_categories: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return queries.new_empty(capacity, dtype=torch.float32)


block_scores = define_op(_block_scores, fake=_empty_scores)
