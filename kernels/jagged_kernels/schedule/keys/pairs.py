"""Lists as pairs of a tile and a block: to sort them, turn them round and look at them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jagged_kernels.schedule.keys.blocks import first_tiles, tile_count
from jagged_kernels.schedule.row_layout import NO_LIMIT


@dataclass
class Batch:
    """What lists are of.

    Attributes:
        q_offsets, k_offsets: [B + 1].
        q_tokens, k_tokens: what they end at.
    """

    q_offsets: Tensor
    k_offsets: Tensor
    q_tokens: int
    k_tokens: int
    block: int
    groups: int

    def entries(self) -> tuple[int, int]:
        """How many there are of tiles of queries, and of key blocks."""
        users = self.q_offsets.shape[0] - 1
        q, k = (tile_count(x, users, self.block) for x in (self.q_tokens, self.k_tokens))
        return q * self.groups, k * self.groups

    def transposed(self) -> Batch:
        return Batch(
            self.k_offsets, self.q_offsets, self.k_tokens, self.q_tokens, self.block, self.groups
        )


@dataclass
class Pairs:
    """[P] int64 each, of listed blocks; those that are none (`exists` is False) may hold anything.

    Attributes:
        entry: of a tile and a group.
        user, tile, group: whose it is; the user is a number that there is, exists or not.
        other: the block of the other side that it lists.
        own_tokens, other_tokens: of the user.
        exists: the entry is one of a tile, and the user has the other block.
    """

    entry: Tensor
    user: Tensor
    tile: Tensor
    group: Tensor
    other: Tensor
    own_tokens: Tensor
    other_tokens: Tensor
    exists: Tensor


def find_pairs(row_ptr: Tensor, other: Tensor, batch: Batch) -> Pairs:
    """Of lists whose columns `other` [C] are blocks, for a batch of at least one user."""
    place = torch.arange(other.shape[0], device=other.device)
    entry = torch.searchsorted(row_ptr.long(), place, right=True) - 1
    entries = batch.entries()[0]
    exists = (entry >= 0) & (entry < entries)
    number = entry.clamp(0, entries - 1) // batch.groups
    first = first_tiles(batch.q_offsets, batch.block)
    user = (torch.searchsorted(first, number, right=True) - 1).clamp(min=0)
    tile, other = number - first[user], other.long()
    own_tokens, other_tokens = (x.diff().long()[user] for x in (batch.q_offsets, batch.k_offsets))
    exists &= (tile * batch.block < own_tokens) & (other >= 0)
    exists &= other * batch.block < other_tokens
    return Pairs(entry, user, tile, entry % batch.groups, other, own_tokens, other_tokens, exists)


def sorted_lists(entry: Tensor, other: Tensor, exists: Tensor, batch: Batch) -> tuple[Tensor, ...]:
    """(row_ptr, blocks [C]) of pairs in any order, each once, ascending; int64. What is behind
    row_ptr[-1] are zeros."""
    entries, most = batch.entries()[0], batch.k_tokens // batch.block + 1
    # One number says which pair it is, so that equal ones are the same and no sort need be stable.
    last = entries * most
    pair = torch.where(exists, entry * most + other, last).sort().values
    again = torch.nn.functional.pad(pair[1:] == pair[:-1], (1, 0))
    pair = torch.where(again, last, pair).sort().values
    start = torch.arange(entries + 1, device=pair.device) * most
    return torch.searchsorted(pair, start), torch.where(pair < last, pair % most, 0)


def turned_entries(pairs: Pairs, batch: Batch) -> Tensor:
    """[P] int64: the entries that the pairs of one direction have in the other."""
    first = batch.k_offsets[:-1].long() // batch.block
    return (first[pairs.user] + pairs.user + pairs.other) * batch.groups + pairs.group


def cut_pairs(pairs: Pairs, block: int, window: tuple[int, int], *, transposed: bool) -> Tensor:
    """[P] bool, which blocks are partial for a band: the other side has not `block` tokens there,
    or a query does not see a key.

    Args:
        transposed: the pairs are of key blocks, and list tiles of queries.
    """
    queries, keys, tile, key_block = pairs.own_tokens, pairs.other_tokens, pairs.tile, pairs.other
    if transposed:
        queries, keys, tile, key_block = keys, queries, key_block, tile
    left, right = window
    begin = tile * block + keys - queries
    newest = torch.minimum(begin + block, keys) - 1
    key = key_block * block
    last_key = torch.minimum(key + block, keys) - 1
    partial = (pairs.other + 1) * block > pairs.other_tokens
    if left != NO_LIMIT:
        partial |= key < newest - left
    if right != NO_LIMIT:
        partial |= last_key > begin + right
    return partial
