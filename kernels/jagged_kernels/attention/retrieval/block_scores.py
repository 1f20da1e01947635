"""How well each tile of queries and each key block of its user fit: products of their means."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.core.backends import triton_runs
from jagged_kernels.core.operators import define_op
from jagged_kernels.schedule.keys.blocks import first_tiles


def _block_scores(
    queries: Tensor,
    keys: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    score_offsets: Tensor,
    block: int,
    capacity: int,
) -> Tensor:
    """[capacity] float32: score_offsets[x * G + g] + c holds that of tile x and its user's key
    block c in group g. What belongs to no tile means nothing.

    Args:
        queries: [Nq, G, E], a mean of each tile's. keys: [Nk, G, E], of each key block's; both
            numbered as in `schedule.keys.blocks`.
        score_offsets: [Nq * G + 1] int64, at most `capacity`: where the scores of an entry begin;
            it has no more of them than its user has blocks.
    """
    if triton_runs(queries) and queries.dtype != torch.float64:
        from jagged_kernels.attention.retrieval.triton_block_scores import launch_block_scores

        return launch_block_scores(
            queries, keys, q_offsets, k_offsets, score_offsets, block, capacity
        )
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
    return scores


def _empty_scores(
    queries: Tensor, keys: Tensor, q_offsets: Tensor, k_offsets: Tensor, score_offsets: Tensor,
    block: int, capacity: int,
) -> Tensor:  # fmt: skip
    return queries.new_empty(capacity, dtype=torch.float32)


block_scores = define_op(_block_scores, fake=_empty_scores)
