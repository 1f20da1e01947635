"""The rows of a schedule: tiles of one side's tokens, and the range of the other side they see.

`build_rows` is the specification in PyTorch, one table at a time; `schedule_rows` is the operator
that makes both tables of a schedule, on CUDA in a few launches (`triton_rows`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.core.backends import triton_runs
from jagged_kernels.core.operators import define_op
from jagged_kernels.schedule.row_layout import (
    COST_UNIT,
    MOST_UNITS,
    NO_LIMIT,
    ROW_FIELDS,
    ROW_WIDTH,
    SHORT_USER,
    row_counts,
)


def rows_to_walk(rows: Tensor, tokens: int, tile: int, *, skips: bool) -> int:
    """How many rows, from the first one on, a kernel must look at: all, or if it skips short users
    a bound of those of the others.

    Rows are sorted; with `skips`, queries and keys are the same tokens, and a tile holds more than
    `SHORT_USER`.
    """
    if not skips:
        return rows.shape[0]
    return min(rows.shape[0], tokens // tile + tokens // (SHORT_USER + 1))


def users_of_rows(rows: Tensor, tokens: int, tile: int) -> int:
    """The users of a table of sorted rows: tiles of `tile` of the `tokens` of one side."""
    return rows.shape[0] - tokens // tile


def _schedule_rows(
    q_offsets: Tensor,
    k_offsets: Tensor,
    q_tokens: int,
    k_tokens: int,
    tile_q: int,
    tile_k: int,
    left: int,
    right: int,
    sort: bool,
    transpose: bool,
) -> Tensor:
    """[R + R', 8] int32: rows, tiles of queries, and below them rows_t, tiles of keys.

    Args:
        q_offsets, k_offsets: [B + 1], int32 or int64.
        left, right: keys visible around the aligned diagonal, -1 for no limit.
        sort: order rows as `build_rows` does. Else users stay in batch order, and no user may
            have more than tile_q queries: row b holds those of user b, and the tiles of user b's
            keys begin at row k_offsets[b] // tile_k + b of rows_t, with unused rows between.
        transpose: make rows_t too; else R' is 0.
    """
    if triton_runs(q_offsets):
        from jagged_kernels.schedule.triton_rows import launch_rows

        make = launch_rows
    else:
        make = reference_rows
    return make(
        q_offsets,
        k_offsets,
        q_tokens=q_tokens,
        k_tokens=k_tokens,
        tile_q=tile_q,
        tile_k=tile_k,
        left=left,
        right=right,
        sort=sort,
        transpose=transpose,
    )


def _empty_rows(
    q_offsets: Tensor, k_offsets: Tensor, q_tokens: int, k_tokens: int, tile_q: int, tile_k: int,
    left: int, right: int, sort: bool, transpose: bool,
) -> Tensor:  # fmt: skip
    users = q_offsets.shape[0] - 1
    rows, rows_t = row_counts(q_tokens, k_tokens, users, tile_q=tile_q, tile_k=tile_k, sort=sort)
    count = rows + rows_t if transpose else rows
    return q_offsets.new_empty((count, ROW_WIDTH), dtype=torch.int32)


schedule_rows = define_op(_schedule_rows, fake=_empty_rows)


def reference_rows(
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    q_tokens: int,
    k_tokens: int,
    tile_q: int,
    tile_k: int,
    left: int,
    right: int,
    sort: bool,
    transpose: bool,
) -> Tensor:
    """What `schedule_rows` returns, in PyTorch."""
    # Seen from the keys the mask is the same band with its sides exchanged.
    sides = [
        (q_offsets, k_offsets, q_tokens, tile_q, left, right),
        (k_offsets, q_offsets, k_tokens, tile_k, right, left),
    ]
    tables: list[Tensor] = []
    for own, other, tokens, tile, before, after in sides if transpose else sides[:1]:
        band = {"tile": tile, "left": before, "right": after}
        if sort:
            tables.append(build_rows(own, other, tokens=tokens, **band))
            continue
        user = torch.arange(own.shape[0] - 1, device=own.device, dtype=torch.int32)
        one_tile = not tables  # those of queries come first
        first = user if one_tile else own[:-1].int() // tile + user
        count = user.shape[0] if one_tile else tokens // tile + user.shape[0]
        tables.append(_fill_rows(own, other, first, user, count, **band))
    return torch.cat(tables)


def build_rows(
    offsets: Tensor, other_offsets: Tensor, *, tokens: int, tile: int, left: int, right: int
) -> Tensor:
    """[R, 8] int32 rows for tiles of `offsets` over ranges of `other_offsets`, long users first.

    R = tokens // tile + users bounds the number of tiles and is known on the host. Unused rows
    come last and have tile_start == tile_end. Token i of a tile sees tokens
    i + shift - left ... i + shift + right of the other side: `shift` aligns the two ends of a
    user, as in flash-attn.

    Users stand in descending order of `cost_bucket`, those of one bucket in batch order; the
    tiles of one user from the end where `later_first` says that later tiles see more.
    """
    users = offsets.shape[0] - 1
    if users == 0:
        return offsets.new_zeros((0, ROW_WIDTH), dtype=torch.int32)
    lengths, other_lengths = offsets.diff().int(), other_offsets.diff().int()
    bucket = cost_bucket(lengths, other_lengths, tile=tile, left=left, right=right)
    order = torch.sort(bucket, descending=True, stable=True).indices.int()
    tiles = ((lengths + (tile - 1)) // tile)[order]
    first = tiles.cumsum(0, dtype=torch.int32) - tiles
    count = tokens // tile + users
    return _fill_rows(
        offsets, other_offsets, first, order, count, tile=tile, left=left, right=right
    )


def cost_bucket(
    lengths: Tensor, other_lengths: Tensor, *, tile: int, left: int, right: int
) -> Tensor:
    """[B] int32 in 0 ... COST_BUCKETS - 1, from how many tokens a tile of the user sees at most."""
    cost = other_lengths
    if left != NO_LIMIT and right != NO_LIMIT:
        cost = torch.minimum(cost, lengths.clamp(max=tile) + (left + right))
    if left != NO_LIMIT:
        cost = torch.minimum(cost, lengths + left)
    units = ((cost + (COST_UNIT - 1)) // COST_UNIT).clamp(0, MOST_UNITS)
    units = torch.where(cost <= SHORT_USER, 0, units)
    # The exponent and the first two bits of the fraction of a float32.
    quarters = units.float().view(torch.int32) >> 21
    return torch.where(units < 4, units, quarters - 512)


def later_first(left: int, right: int) -> bool:
    """Whether tiles near the end of a user see more than those near its start."""
    return right != NO_LIMIT and (left == NO_LIMIT or left > right)


def _fill_rows(
    offsets: Tensor,
    other_offsets: Tensor,
    first: Tensor,
    order: Tensor,
    count: int,
    *,
    tile: int,
    left: int,
    right: int,
) -> Tensor:
    """[count, 8]: the tiles of user order[i] stand from row first[i] on."""
    if count == 0:
        return offsets.new_zeros((0, ROW_WIDTH), dtype=torch.int32)
    row = torch.arange(count, device=offsets.device, dtype=torch.int32)
    place = torch.searchsorted(first, row, right=True) - 1
    user = order[place]
    offsets, other_offsets = offsets.int(), other_offsets.int()
    start, end = offsets[user], offsets[user + 1]
    other_start, other_end = other_offsets[user], other_offsets[user + 1]
    tiles = (end - start + (tile - 1)) // tile
    index = row - first[place]
    used = index < tiles
    if later_first(left, right):
        index = tiles - 1 - index
    tile_start = start + index * tile
    tile_end = torch.minimum(tile_start + tile, end)
    shift = other_end - end
    range_start, range_end = other_start, other_end
    if left != NO_LIMIT:
        range_start = torch.maximum(range_start, tile_start + shift - left)
    if right != NO_LIMIT:
        range_end = torch.minimum(range_end, tile_end + shift + right)
    range_start = torch.minimum(range_start, range_end)
    # A first query may see nothing (more queries than keys, aligned to the end): an empty range.
    range_start = torch.maximum(range_start, other_start)
    range_end = torch.maximum(range_end, range_start)
    fields = [tile_start, tile_end, range_start, range_end, shift, user, end - start]
    fields = torch.stack(fields, dim=1)
    fields = torch.where(used[:, None], fields, 0)
    return torch.nn.functional.pad(fields, (0, ROW_WIDTH - len(ROW_FIELDS)))
