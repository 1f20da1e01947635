"""`transposed_lists`: from the key blocks that tiles see to the tiles that see key blocks; and the
former from pairs in any order."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.core.backends import triton_runs
from jagged_kernels.core.contents import readable
from jagged_kernels.core.operators import call, define_op
from jagged_kernels.schedule.keys.pairs import (
    Batch,
    cut_pairs,
    find_pairs,
    sorted_lists,
    turned_entries,
)

_MOST_ENTRIES = 2**31 - 1
_Rows = tuple[Tensor, Tensor]


def sorted_rows(row_ptr: Tensor, blocks: Tensor, batch: Batch, window: tuple[int, int]) -> _Rows:
    """(row_ptr, col) of `KeyLists`, from lists of plain key blocks.

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
        return rows_of_pairs(blocks, blocks, blocks > 0, batch, window)
    given = find_pairs(row_ptr, blocks, batch)
    if readable(blocks):
        _check_pairs(row_ptr, given.exists, blocks)
    listed = torch.arange(blocks.shape[0], device=blocks.device) < row_ptr[-1]
    return rows_of_pairs(given.entry, given.other, given.exists & listed, batch, window)


def rows_of_pairs(
    entry: Tensor, blocks: Tensor, exists: Tensor, batch: Batch, window: tuple[int, int]
) -> _Rows:
    """`sorted_rows` of pairs [C] in any order: entries and key blocks that its user has, where
    `exists`; what is elsewhere does not matter."""
    if batch.entries()[0] == 0 or entry.shape[0] == 0:
        a, b = (_zeros(entry, n) for n in (batch.entries()[0] + 1, entry.shape[0]))
        return a, b
    row_ptr, blocks = sorted_lists(entry, blocks, exists, batch)
    partial = cut_pairs(find_pairs(row_ptr, blocks, batch), batch.block, window, transposed=False)
    return row_ptr.int(), (2 * blocks + partial).int()


def transposed_lists(row_ptr: Tensor, col: Tensor, batch: Batch, window: tuple[int, int]) -> _Rows:
    """(row_ptr_t, col_t) of `KeyLists`, from the other direction. Does not wait for a GPU.

    Args:
        window: the (left, right) band of the call, which decides what is partial.
    """
    return call(
        transpose_lists, row_ptr, col, batch.q_offsets, batch.k_offsets, batch.q_tokens,
        batch.k_tokens, batch.block, batch.groups, *window,
    )  # fmt: skip


def _native_transpose(row_ptr: Tensor, col: Tensor, batch: Batch, window: tuple[int, int]) -> _Rows:
    """By sorting."""
    if min(batch.entries()) == 0 or col.shape[0] == 0:
        return _zeros(col, batch.entries()[1] + 1), torch.zeros_like(col)
    turned = batch.transposed()
    pairs = find_pairs(row_ptr, col // 2, batch)
    row_ptr_t, tiles = sorted_lists(turned_entries(pairs, batch), pairs.tile, pairs.exists, turned)
    pairs_t = find_pairs(row_ptr_t, tiles, turned)
    partial = cut_pairs(pairs_t, batch.block, window, transposed=True)
    return row_ptr_t.int(), (2 * tiles + partial).int()


def _zeros(like: Tensor, count: int) -> Tensor:
    return like.new_zeros(count, dtype=torch.int32)


def _transpose_lists(
    row_ptr: Tensor,
    col: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    q_tokens: int,
    k_tokens: int,
    block: int,
    groups: int,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor]:
    batch = Batch(q_offsets, k_offsets, q_tokens, k_tokens, block, groups)
    if triton_runs(col):
        from jagged_kernels.schedule.keys.triton_transpose import launch_transpose

        return launch_transpose(row_ptr, col, batch, (left, right))
    return _native_transpose(row_ptr, col, batch, (left, right))


def _empty_transpose(
    row_ptr: Tensor, col: Tensor, q_offsets: Tensor, k_offsets: Tensor, q_tokens: int,
    k_tokens: int, block: int, groups: int, left: int, right: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch = Batch(q_offsets, k_offsets, q_tokens, k_tokens, block, groups)
    return row_ptr.new_empty(batch.entries()[1] + 1), torch.empty_like(col)


transpose_lists = define_op(_transpose_lists, fake=_empty_transpose)


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
