"""`transpose_lists`: from the key blocks that tiles see to the tiles that see key blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.core.contents import readable
from jagged_kernels.schedule.keys.pairs import (
    Batch,
    cut_pairs,
    find_pairs,
    sorted_lists,
    turned_entries,
)

_MOST_ENTRIES = 2**31 - 1
_Tables = tuple[Tensor, Tensor, Tensor, Tensor]


def transpose_lists(
    row_ptr: Tensor, blocks: Tensor, batch: Batch, window: tuple[int, int]
) -> _Tables:
    """(row_ptr, col, row_ptr_t, col_t) of `KeyLists`, from lists of plain key blocks.

    Does not wait for a GPU; by sorting, so that it is the same each time.

    Args:
        row_ptr: [Nq * groups + 1] integers.
        blocks: [C] integers, key blocks of the user in any order; one that is listed twice in an
            entry counts once.
        window: the (left, right) band of the call, which decides what is partial.

    Raises:
        TypeError, ValueError: tables of another dtype, shape or device; and where contents can be
            read (on a CPU, or with JAGGED_CHECK=1) `row_ptr` that decreases or goes beyond
            `blocks`, an entry of no tile, or a block that the user does not have. Elsewhere these
            are left out.
    """
    _check_tables(row_ptr, blocks, batch)
    if batch.entries()[0] == 0 or blocks.shape[0] == 0:
        return tables_of_pairs(blocks, blocks, blocks > 0, batch, window)
    given = find_pairs(row_ptr, blocks, batch)
    if readable(blocks):
        _check_pairs(row_ptr, given.exists, blocks)
    listed = torch.arange(blocks.shape[0], device=blocks.device) < row_ptr[-1]
    return tables_of_pairs(given.entry, given.other, given.exists & listed, batch, window)


def tables_of_pairs(
    entry: Tensor, blocks: Tensor, exists: Tensor, batch: Batch, window: tuple[int, int]
) -> _Tables:
    """`transpose_lists` of pairs [C] in any order: entries and key blocks that its user has, where
    `exists`; what is elsewhere does not matter."""
    entries, entries_t = batch.entries()
    count = entry.shape[0]
    if entries == 0 or count == 0:
        sizes = (entries + 1, count, entries_t + 1, count)
        a, b, c, d = (entry.new_zeros(size, dtype=torch.int32) for size in sizes)
        return a, b, c, d
    row_ptr, blocks = sorted_lists(entry, blocks, exists, batch)
    pairs = find_pairs(row_ptr, blocks, batch)
    partial = cut_pairs(pairs, batch.block, window, transposed=False)
    turned = batch.transposed()
    entry_t = turned_entries(pairs, batch)
    row_ptr_t, tiles = sorted_lists(entry_t, pairs.tile, pairs.exists, turned)
    pairs_t = find_pairs(row_ptr_t, tiles, turned)
    partial_t = cut_pairs(pairs_t, batch.block, window, transposed=True)
    return (
        row_ptr.int(), (2 * blocks + partial).int(), row_ptr_t.int(), (2 * tiles + partial_t).int()
    )  # fmt: skip


def _check_tables(row_ptr: Tensor, blocks: Tensor, batch: Batch) -> None:
    entries = batch.entries()[0]
    for name, table in (("row_ptr", row_ptr), ("col", blocks)):
        if table.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be of int32 or int64, got {table.dtype}")
        if table.dim() != 1:
            raise ValueError(f"{name} must have one dimension, got {tuple(table.shape)}")
        if table.device != batch.k_offsets.device:
            raise ValueError(f"{name} must be on {batch.k_offsets.device}, got {table.device}")
    if row_ptr.shape[0] != entries + 1:
        users = batch.q_offsets.shape[0] - 1
        raise ValueError(
            f"row_ptr must be of {entries} entries and one more ({batch.q_tokens} queries // "
            f"{batch.block} + {users} users tiles of {batch.groups} groups), got "
            f"{row_ptr.shape[0]} numbers"
        )
    if blocks.shape[0] > _MOST_ENTRIES:
        raise ValueError(f"lists hold at most {_MOST_ENTRIES} blocks, got {blocks.shape[0]}")


def _check_pairs(row_ptr: Tensor, exists: Tensor, blocks: Tensor) -> None:
    begin, end = int(row_ptr[0]), int(row_ptr[-1])
    if begin != 0 or end > len(blocks) or bool((row_ptr.diff() < 0).any()):
        raise ValueError(
            f"row_ptr must ascend from 0 to at most {len(blocks)}, got {begin} ... {end}"
        )
    wrong = (~exists[:end]).nonzero()
    if len(wrong):
        place = int(wrong[0])
        raise ValueError(
            f"col[{place}] = {int(blocks[place])} is no key block of the user, or the entry of no "
            "tile"
        )
