"""The specification of lists: from the dense mask of each user, pair by pair."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from jagged_kernels.schedule.keys.blocks import tile_count
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.rules import KeyRule, StridedKeys

# (tiles of queries, groups, key blocks) of one user: listed, and partial in each direction.
_Blocks = tuple[Tensor, Tensor, Tensor]


def reference_lists(
    rule: KeyRule,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    heads: int,
    longest: int | None = None,
) -> KeyLists:
    """What `build_lists` makes, one user after another, with no room left behind the last entry.

    Args:
        longest: of a user with more tokens only the blocks that hold the first so many are listed.
    """
    groups = heads if isinstance(rule, StridedKeys) else 1
    q_bounds, k_bounds = (list(pairwise(x.tolist())) for x in (q_offsets, k_offsets))
    users = len(q_bounds)
    blocks: list[_Blocks] = []
    for user, (queries, keys) in enumerate(zip(q_bounds, k_bounds, strict=True)):
        n, m = queries[1] - queries[0], keys[1] - keys[0]
        visible = rule.visible(n, heads, user=user, keys=m).expand(groups, n, m)
        blocks.append(_of_mask(visible, rule.block, longest))
    row_ptr, col = _lay_out(blocks, q_bounds, rule.block, transpose=False)
    row_ptr_t, col_t = _lay_out(blocks, k_bounds, rule.block, transpose=True)
    device = q_offsets.device
    row_ptr, col, row_ptr_t, col_t = (x.to(device) for x in (row_ptr, col, row_ptr_t, col_t))
    token_rule, window = None, (-1, 0)
    if not isinstance(rule, StridedKeys):
        token_rule, window = rule.token_rule(users, device), (-1, -1)
    return KeyLists(row_ptr, col, row_ptr_t, col_t, rule.block, groups, token_rule, window)


def _of_mask(visible: Tensor, block: int, longest: int | None) -> _Blocks:
    """Of a user's mask [groups, n, m]."""
    groups, n, m = visible.shape
    tiles, blocks = -(-n // block), -(-m // block)
    pairs = visible.new_zeros((groups, tiles * block, blocks * block))
    pairs[:, :n, :m] = visible
    exists = torch.zeros_like(pairs)
    exists[:, :n, :m] = True

    def in_blocks(x: Tensor) -> Tensor:
        return x.view(groups, tiles, block, blocks, block).movedim(3, 2).flatten(3).movedim(0, 1)

    listed = in_blocks(pairs).any(3)
    hidden = in_blocks(exists & ~pairs).any(3)
    most = max(tiles, blocks) if longest is None else -(-longest // block)
    inside = torch.arange(tiles)[:, None, None] < most
    listed &= inside & (torch.arange(blocks) < most)
    short_key_block = torch.arange(blocks) * block + block > m
    short_tile = (torch.arange(tiles) * block + block > n)[:, None, None]
    return listed, hidden | short_key_block, hidden | short_tile


def _lay_out(
    users: list[_Blocks], bounds: list[tuple[int, int]], block: int, *, transpose: bool
) -> tuple[Tensor, Tensor]:
    """(row_ptr, col) of one direction."""
    tokens = bounds[-1][1] if bounds else 0
    groups = users[0][0].shape[1] if users else 1
    entries: list[list[int]] = [[] for _ in range(tile_count(tokens, len(users), block) * groups)]
    for user, (listed, partial, partial_t) in enumerate(users):
        first = bounds[user][0] // block + user
        if transpose:
            listed, partial = (x.transpose(0, 2) for x in (listed, partial_t))
        for tile, group, other in listed.nonzero().tolist():
            column = 2 * other + int(partial[tile, group, other])
            entries[(first + tile) * groups + group].append(column)
    counts = torch.tensor([0] + [len(entry) for entry in entries])
    col = torch.tensor([column for entry in entries for column in entry], dtype=torch.int32)
    return counts.cumsum(0, dtype=torch.int32), col
