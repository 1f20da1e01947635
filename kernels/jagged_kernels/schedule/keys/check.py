"""Whether lists are of a batch: for JAGGED_CHECK=1, and lists that others made."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.core.contents import can_be_read
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.pairs import Batch, Pairs, cut_pairs, find_pairs, turned_entries


def check_entries(lists: KeyLists, batch: Batch) -> None:
    """Raises ValueError where lists have not as many entries as a batch."""
    sides = (("row_ptr", lists.row_ptr), ("row_ptr_t", lists.row_ptr_t))
    for (name, row_ptr), entries in zip(sides, batch.entries(), strict=True):
        if row_ptr is not None and row_ptr.shape[0] != entries + 1:
            raise ValueError(
                f"keys are lists of another batch: {name} is of {row_ptr.shape[0] - 1} entries, "
                f"and these offsets have {entries}"
            )


def check_lists(
    lists: KeyLists, q_offsets: Tensor, k_offsets: Tensor, *, q_tokens: int, k_tokens: int
) -> None:
    """Reads lists: do they serve these queries and keys? Waits for a GPU.

    Raises:
        ValueError: tables of another shape; what decreases; a block that its user does not have;
            an entry of no tile; directions that list different blocks; without a rule, a block
            that the band cuts and that is not said to be partial.
    """
    batch = Batch(q_offsets, k_offsets, q_tokens, k_tokens, lists.block, lists.groups)
    check_entries(lists, batch)
    transposed = lists.transposed(q_tokens, k_tokens)
    directions = ((lists.row_ptr, lists.col, ""), (*transposed, "_t"))
    if not can_be_read(lists.col) or min(batch.entries()) == 0:
        return
    users = (batch, batch.transposed())
    pairs, pairs_t = (
        _check_side(row_ptr, col, of, side)
        for (row_ptr, col, side), of in zip(directions, users, strict=True)
    )
    # Those of tiles in the order of key blocks, tiles ascending.
    order = (turned_entries(pairs, batch) * (q_tokens // batch.block + 1) + pairs.tile).argsort()
    seen = torch.stack([pairs.user, pairs.group, pairs.tile, pairs.other])[:, order]
    seen_t = torch.stack([pairs_t.user, pairs_t.group, pairs_t.other, pairs_t.tile])
    if not torch.equal(seen, seen_t):
        raise ValueError("keys: col and col_t do not list the same pairs of blocks")
    if lists.rule is not None:
        return
    for mine, (_, col, side) in zip((pairs, pairs_t), directions, strict=True):
        cut = cut_pairs(mine, batch.block, lists.window, transposed=bool(side))
        missed = (cut & (col[: cut.shape[0]] % 2 == 0)).nonzero()
        if len(missed):
            raise ValueError(f"keys: the block of col{side}[{int(missed[0])}] is cut, not partial")


def _check_side(row_ptr: Tensor, col: Tensor, batch: Batch, side: str) -> Pairs:
    """The pairs of one direction; `side` is what its names end in."""
    begin, end = int(row_ptr[0]), int(row_ptr[-1])
    if begin != 0 or end > col.shape[0] or bool((row_ptr.diff() < 0).any()):
        raise ValueError(f"keys: row_ptr{side} must ascend from 0 to at most {col.shape[0]}")
    pairs = find_pairs(row_ptr, col[:end] // 2, batch)
    wrong = (~pairs.exists).nonzero()
    if len(wrong):
        raise ValueError(
            f"keys: col{side}[{int(wrong[0])}] is no block of the user, or the entry of no tile"
        )
    descends = (pairs.entry.diff() == 0) & (pairs.other.diff() <= 0)
    if bool(descends.any()):
        raise ValueError(f"keys: col{side} must ascend in each entry")
    return pairs
