"""The rows of a schedule in three launches: a stable counting sort of the users, then the rows.

1. Chunks of users count how many users and tiles fall in each cost bucket.
2. Each chunk adds up what comes before its users, and writes every user to its place in the order
   with its first row.
3. Each row finds its user by binary search, so that no program waits for a user with many tiles.

Both tables (`side` 0: queries, 1: keys) are made by the same launches. Users in batch order need
the third one only. `rows.build_rows` is the specification, equal to the last bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.schedule.row_layout import (
    COST_BUCKETS,
    COST_UNIT,
    MOST_UNITS,
    ROW_WIDTH,
    SHORT_USER,
    row_counts,
)

_BUCKETS = tl.constexpr(COST_BUCKETS)
_UNIT = tl.constexpr(COST_UNIT)
_MOST_UNITS = tl.constexpr(MOST_UNITS)
_SHORT_USER = tl.constexpr(SHORT_USER)
_ROW_WIDTH = tl.constexpr(ROW_WIDTH)
# At most this many chunks, so that one program reads all their counts at once.
_CHUNKS = tl.constexpr(128)
# Users that a chunk takes at a time, and rows of a program of the third launch.
_USERS = tl.constexpr(64)
_ROWS = tl.constexpr(256)

# Sizes vary from batch to batch and must not compile anything again.
_SIZES = [
    "users", "steps", "chunks", "depth", "q_rows", "k_rows", "tile_q", "tile_k", "left", "right"
]  # fmt: skip


def launch_rows(
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
    """[R + R', 8] int32, as `rows.schedule_rows` describes it."""
    users = q_offsets.shape[0] - 1
    q_rows, k_rows = row_counts(q_tokens, k_tokens, users, tile_q=tile_q, tile_k=tile_k, sort=sort)
    k_rows = k_rows if transpose else 0
    device = q_offsets.device
    rows = torch.empty((q_rows + k_rows, ROW_WIDTH), dtype=torch.int32, device=device)
    if users == 0:
        return rows
    sides = 2 if transpose else 1
    band = (tile_q, tile_k, left, right)
    offsets = (q_offsets.contiguous(), k_offsets.contiguous())
    order = None
    if sort:
        steps = -(-users // (_USERS.value * _CHUNKS.value))
        chunks = -(-users // (_USERS.value * steps))
        counts = torch.empty((sides, chunks, COST_BUCKETS), dtype=torch.int64, device=device)
        order = torch.empty((sides, 2, users), dtype=torch.int32, device=device)
        grid, sizes = (chunks, sides), (users, steps, chunks, *band)
        launch(_count_kernel, grid, (*offsets, counts, *sizes), {}, num_warps=8)
        launch(_place_kernel, grid, (*offsets, counts, order, *sizes), {}, num_warps=8)
    programs = -(-q_rows // _ROWS.value) - (-k_rows // _ROWS.value)
    sizes = (users, users.bit_length(), q_rows, k_rows, *band)
    launch(_fill_kernel, programs, (*offsets, order, rows, *sizes), {"SORT": sort}, num_warps=4)
    return rows


@triton.jit(do_not_specialize=_SIZES)
def _count_kernel(
    q_offsets_ptr, k_offsets_ptr, counts_ptr, users, steps, chunks, tile_q, tile_k, left, right
):  # fmt: skip
    if tl.program_id(1) == 0:
        _count_side(
            q_offsets_ptr, k_offsets_ptr, counts_ptr, users, steps, tile_q, left, right
        )  # fmt: skip
    else:
        _count_side(
            k_offsets_ptr, q_offsets_ptr, counts_ptr + chunks * _BUCKETS, users, steps,
            tile_k, right, left,
        )  # fmt: skip


@triton.jit
def _count_side(own_ptr, other_ptr, counts_ptr, users, steps, tile, left, right):
    chunk = tl.program_id(0)
    counts = tl.zeros([_BUCKETS], tl.int64)
    for step in range(steps):
        user = (chunk * steps + step) * _USERS + tl.arange(0, _USERS)
        counts += tl.sum(_weigh(own_ptr, other_ptr, user, users, tile, left, right), 1)
    tl.store(counts_ptr + chunk * _BUCKETS + tl.arange(0, _BUCKETS), counts)


@triton.jit(do_not_specialize=_SIZES)
def _place_kernel(
    q_offsets_ptr, k_offsets_ptr, counts_ptr, order_ptr, users, steps, chunks,
    tile_q, tile_k, left, right,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _place_side(
            q_offsets_ptr, k_offsets_ptr, counts_ptr, order_ptr, users, steps, chunks,
            tile_q, left, right,
        )  # fmt: skip
    else:
        _place_side(
            k_offsets_ptr, q_offsets_ptr, counts_ptr + chunks * _BUCKETS, order_ptr + 2 * users,
            users, steps, chunks, tile_k, right, left,
        )  # fmt: skip


@triton.jit
def _place_side(
    own_ptr, other_ptr, counts_ptr, order_ptr, users, steps, chunks, tile, left, right
):  # fmt: skip
    """order[0] = the first row of each user in its order, order[1] = that user."""
    chunk = tl.program_id(0)
    bucket, index = tl.arange(0, _BUCKETS)[:, None], tl.arange(0, _CHUNKS)[None, :]
    counts = tl.load(counts_ptr + index * _BUCKETS + bucket, mask=index < chunks, other=0)
    in_bucket = tl.sum(counts, 1)
    in_bucket_before = tl.sum(tl.where(index < chunk, counts, 0), 1)
    before = tl.cumsum(in_bucket, 0) - in_bucket + in_bucket_before
    for step in range(steps):
        user = (chunk * steps + step) * _USERS + tl.arange(0, _USERS)
        weights = _weigh(own_ptr, other_ptr, user, users, tile, left, right)
        up_to = before[:, None] + tl.cumsum(weights, 1)
        # A user has weight in its bucket only.
        at = tl.sum(tl.where(weights > 0, up_to - weights, 0), 0)
        place, first_row = (at >> 32).to(tl.int32), at.to(tl.int32)
        tl.store(order_ptr + place, first_row, mask=user < users)
        tl.store(order_ptr + users + place, user, mask=user < users)
        before += tl.sum(weights, 1)


@triton.jit
def _weigh(own_ptr, other_ptr, user, users, tile, left, right):
    """[BUCKETS, USERS] int64: in a user's bucket (the costliest first) 2^32 + its tiles, else 0.

    Sums count users in the upper half and tiles in the lower one.
    """
    start, end, other_start, other_end = _bounds(own_ptr, other_ptr, user, user < users)
    length, cost = end - start, other_end - other_start
    in_window = tl.minimum(length, tile) + (left + right)
    cost = tl.where((left >= 0) & (right >= 0), tl.minimum(cost, in_window), cost)
    cost = tl.where(left >= 0, tl.minimum(cost, length + left), cost)
    units = tl.minimum(tl.cdiv(tl.maximum(cost, 0), _UNIT), _MOST_UNITS)
    units = tl.where(cost <= _SHORT_USER, 0, units)
    quarters = units.to(tl.float32).to(tl.int32, bitcast=True) >> 21
    bucket = _BUCKETS - 1 - tl.where(units < 4, units, quarters - 512)
    weight = tl.cdiv(length, tile).to(tl.int64) + (1 << 32)
    inside = (bucket[None, :] == tl.arange(0, _BUCKETS)[:, None]) & (user < users)[None, :]
    return tl.where(inside, weight[None, :], 0)


@triton.jit(do_not_specialize=_SIZES)
def _fill_kernel(
    q_offsets_ptr, k_offsets_ptr, order_ptr, rows_ptr, users, depth, q_rows, k_rows,
    tile_q, tile_k, left, right, SORT: tl.constexpr,
):  # fmt: skip
    program, q_programs = tl.program_id(0), tl.cdiv(q_rows, _ROWS)
    if program < q_programs:
        row = program * _ROWS + tl.arange(0, _ROWS)
        there = row < q_rows
        if SORT:
            user, index = _user_in_order(order_ptr, row, users, depth)
        else:
            user, index = row, tl.zeros_like(row)
        _write_rows(
            q_offsets_ptr, k_offsets_ptr, rows_ptr, row, user, index, there, tile_q, left, right
        )
    else:
        row = (program - q_programs) * _ROWS + tl.arange(0, _ROWS)
        there = row < k_rows
        if SORT:
            user, index = _user_in_order(order_ptr + 2 * users, row, users, depth)
        else:
            user, index = _user_in_batch(k_offsets_ptr, row, users, depth, tile_k)
        _write_rows(
            k_offsets_ptr, q_offsets_ptr, rows_ptr + q_rows.to(tl.int64) * _ROW_WIDTH,
            row, user, index, there, tile_k, right, left,
        )  # fmt: skip


@triton.jit
def _user_in_order(order_ptr, row, users, depth):
    """(user, which of its tiles): the last user whose first row is not beyond this row."""
    place = count_up_to(order_ptr, tl.zeros_like(row), tl.zeros_like(row) + users, row, depth) - 1
    return tl.load(order_ptr + users + place), row - tl.load(order_ptr + place)


@triton.jit
def _user_in_batch(offsets_ptr, row, users, depth, tile):
    """`_user_in_order` where user b's first row is offsets[b] // tile + b."""
    low, high = tl.zeros_like(row), tl.zeros_like(row) + users
    for _ in range(depth):
        middle = (low + high) // 2
        first = tl.load(offsets_ptr + middle, mask=low < high, other=0).to(tl.int32) // tile
        below = (low < high) & (first + middle <= row)
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    first = tl.load(offsets_ptr + low - 1).to(tl.int32) // tile + low - 1
    return low - 1, row - first


@triton.jit
def count_up_to(ptr, low, high, value, depth):
    """low + how many of the ascending numbers in [low, high) are at most `value`.

    By binary search; 2^depth must be larger than the range is long.
    """
    for _ in range(depth):
        middle = (low + high) // 2
        below = (low < high) & (tl.load(ptr + middle, mask=low < high, other=0) <= value)
        low = tl.where(below, middle + 1, low)
        high = tl.where(below, high, middle)
    return low


@triton.jit
def _write_rows(own_ptr, other_ptr, rows_ptr, row, user, index, there, tile, left, right):
    start, end, other_start, other_end = _bounds(own_ptr, other_ptr, user, there)
    tiles = tl.cdiv(end - start, tile)
    used = index < tiles
    later_first = (right >= 0) & ((left < 0) | (left > right))
    index = tl.where(later_first, tiles - 1 - index, index)
    tile_start = start + index * tile
    tile_end = tl.minimum(tile_start + tile, end)
    shift = other_end - end
    seen_from = tl.where(left >= 0, tl.maximum(other_start, tile_start + shift - left), other_start)
    seen_to = tl.where(right >= 0, tl.minimum(other_end, tile_end + shift + right), other_end)
    # A first query may see nothing (more queries than keys, aligned to the end): an empty range.
    range_start = tl.maximum(tl.minimum(seen_from, seen_to), other_start)
    range_end = tl.maximum(seen_to, range_start)
    address = rows_ptr + row.to(tl.int64) * _ROW_WIDTH
    tl.store(address, tl.where(used, tile_start, 0), mask=there)
    tl.store(address + 1, tl.where(used, tile_end, 0), mask=there)
    tl.store(address + 2, tl.where(used, range_start, 0), mask=there)
    tl.store(address + 3, tl.where(used, range_end, 0), mask=there)
    tl.store(address + 4, tl.where(used, shift, 0), mask=there)
    tl.store(address + 5, tl.where(used, user, 0), mask=there)
    tl.store(address + 6, tl.where(used, end - start, 0), mask=there)
    tl.store(address + 7, tl.zeros_like(user), mask=there)


@triton.jit
def _bounds(own_ptr, other_ptr, user, there):
    """(start, end, start, end) of users on both sides, int32; 0 where they are not there."""
    return (
        tl.load(own_ptr + user, mask=there, other=0).to(tl.int32),
        tl.load(own_ptr + user + 1, mask=there, other=0).to(tl.int32),
        tl.load(other_ptr + user, mask=there, other=0).to(tl.int32),
        tl.load(other_ptr + user + 1, mask=there, other=0).to(tl.int32),
    )
