"""The specification of `choose_blocks`, and its path on a CPU: scores of key blocks by products of
means, of blocks that hold one of a tile's categories where these are given, and the best of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jagged_kernels.attention.retrieval.asked import Asked
from jagged_kernels.ops.ids.top_k import jagged_top_k
from jagged_kernels.schedule.keys.blocks import first_tiles
from jagged_kernels.schedule.keys.pairs import Batch
from jagged_kernels.schedule.keys.transpose import rows_of_pairs
from jagged_kernels.tensors.jagged import JaggedTensor

# Pairs of a query's and a key's category that are compared at a time.
_MOST_PAIRS = 1 << 24


def native_choice(
    queries: Tensor, keys: Tensor, key_offsets: Tensor | None, batch: Batch, asked: Asked,
    categories: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What `choice.choose_blocks` returns."""
    entry, user, seen = _seen_blocks(batch, causal=asked.causal)
    newest = seen[:, None] - 1 - torch.arange(asked.newest, device=seen.device)
    chosen = newest
    if asked.best:
        older = (seen - asked.newest).clamp(min=0, max=asked.most)
        if key_offsets is not None:
            older = torch.minimum(older, key_offsets.diff()[user])
        begin = torch.nn.functional.pad(older.cumsum(0), (1, 0))
        scores = _scores(queries, keys, key_offsets, begin, batch, categories)
        values, best = jagged_top_k(
            JaggedTensor._trusted(scores, begin), asked.best, backend="native"
        )
        if categories is not None:
            best = torch.where(values == -math.inf, -1, best)
        chosen = torch.cat([best, newest], 1)
    entry = entry.repeat_interleave(chosen.shape[1])
    chosen = chosen.flatten()
    return rows_of_pairs(entry, chosen, chosen >= 0, batch, asked.window)


def _seen_blocks(batch: Batch, *, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Of each entry (itself, its user, how many of its user's first key blocks it sees), int64."""
    device, block = batch.k_offsets.device, batch.block
    entry = torch.arange(batch.entries()[0], device=device)
    number = entry // batch.groups
    first = first_tiles(batch.q_offsets, block)
    user = torch.searchsorted(first, number, right=True) - 1
    queries, keys = (x.diff().long()[user] for x in (batch.q_offsets, batch.k_offsets))
    begin = (number - first[user]) * block
    end = keys
    if causal:
        end = torch.minimum(begin + block, queries) + keys - queries
    seen = (end.clamp(min=0) + (block - 1)) // block
    return entry, user, torch.where(begin < queries, seen, 0)


def _scores(
    queries: Tensor, keys: Tensor, key_offsets: Tensor | None, score_offsets: Tensor, batch: Batch,
    categories: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """[score_offsets[-1]] float32: score_offsets[x * G + g] + c holds that of tile x and its user's
    key block c in group g; -inf for one that holds no category of the tile's queries."""
    groups, block, heads = batch.groups, batch.block, queries.shape[1]
    keys = keys.repeat_interleave(heads // keys.shape[1], dim=1)
    queries, keys = (x.reshape(x.shape[0], groups, -1) for x in (queries, keys))
    entry = torch.arange(score_offsets.shape[0] - 1, device=queries.device)
    entry = entry.repeat_interleave(score_offsets.diff())
    place = torch.arange(entry.shape[0], device=queries.device) - score_offsets[entry]
    tile, group = entry // groups, entry % groups
    user = torch.searchsorted(first_tiles(batch.q_offsets, block), tile, right=True) - 1
    first = first_tiles(batch.k_offsets, block)
    row = (first if key_offsets is None else key_offsets[:-1])[user] + place
    compute = torch.promote_types(queries.dtype, torch.float32)
    products = queries[tile, group].to(compute) * keys[row, group].to(compute)
    scores = products.sum(-1).float()
    if categories is not None and len(scores):
        of_queries, of_keys = categories
        tiles, blocks = (x // groups for x in batch.entries())
        of_tiles = _by_block(of_queries, batch.q_offsets, block, tiles)
        of_blocks = _by_block(of_keys, batch.k_offsets, block, blocks)
        pairs = (tile, first[user] + place)
        parts = (x.split(max(1, _MOST_PAIRS // block**2)) for x in pairs)
        shared = [_share(of_tiles, t, of_blocks, k) for t, k in zip(*parts, strict=True)]
        scores.masked_fill_(~torch.cat(shared), -math.inf)
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
