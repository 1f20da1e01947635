"""Bias and dropout inside the attention kernels: what both cost a plain call is nothing.

The kernels take `bias` (`bias_launch.BiasArguments`, or None for plain attention) and `BIAS`
(`bias_launch.BiasShape`, what is known of it at compile time). Every function below works on a
block of scores in either orientation: its tokens come as [A, 1] and [1, B], queries and keys
either way round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged_kernels.attention.scores.bias_launch import POSITION_WINDOW
from jagged_kernels.device.arithmetic import LOG2_E
from jagged_kernels.schedule.row_layout import ROW_FIELDS, ROW_WIDTH

_LOG2_E = tl.constexpr(LOG2_E)
_WINDOW = tl.constexpr(POSITION_WINDOW)
_CLEARED = tl.constexpr(1024)  # numbers at a time
_FEW_TIMES = tl.constexpr(64)  # buckets whose sums of each row fit into registers
_ROW_WIDTH = tl.constexpr(ROW_WIDTH)
_USER = tl.constexpr(ROW_FIELDS.index("user"))


@triton.jit
def bias_place(bias, rows_ptr, row, head, BIAS: tl.constexpr):
    """`place_of_user` of the row's."""
    user = 0
    if bias.q_offsets is not None:
        user = tl.load(rows_ptr + row.to(tl.int64) * _ROW_WIDTH + _USER)
    return place_of_user(bias, user, head, BIAS)


@triton.jit
def place_of_user(bias, user, head, BIAS: tl.constexpr):
    """(first query, first key, keys, first score, hash) of a user; 0 where not needed.

    The hash is dropout's, up to the head.
    """
    q_first, k_first, keys, score_first, state = 0, 0, 0, 0, 0
    if BIAS.ANY and bias.q_offsets is not None:
        q_first = tl.load(bias.q_offsets + user).to(tl.int32)
        k_first = tl.load(bias.k_offsets + user).to(tl.int32)
        keys = tl.load(bias.k_offsets + user + 1).to(tl.int32) - k_first
        if bias.scores is not None:
            score_first = tl.load(bias.scores_before + user)
        if BIAS.DROPS:
            state = _mix(tl.load(bias.seed).to(tl.uint32))
            state = _mix(state ^ user.to(tl.uint32))
            state = _mix(state ^ head.to(tl.uint32))
    return q_first, k_first, keys, score_first, state


@triton.jit
def add_bias(
    scores, bias, place, q_token, k_token, q_end, k_end, shift, head,
    BIAS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """[A, B] scaled scores (base 2) with the biases, and their time buckets, 0 without.

    Query q_token is aligned with key q_token + shift. Tokens from q_end or k_end on may be
    anything; what is returned for them too.
    """
    bucket = 0
    if BIAS.ADDS:
        distance = k_token - q_token - shift
        added = tl.zeros(distance.shape, tl.float32)
        if bias.by_distance is not None:
            index = _distance_index(distance, BIAS)
            limit: tl.constexpr = BIAS.MAX_DISTANCE
            added += tl.load(bias.by_distance + head * (2 * limit + 1) + index).to(tl.float32)
        if bias.time is not None:
            bucket = time_bucket(bias, q_token, k_token, q_end, k_end, BIAS)
            added += tl.load(bias.time + head + bucket * HEADS).to(tl.float32)
        if bias.slopes is not None:
            added -= tl.load(bias.slopes + head).to(tl.float32) * tl.abs(distance).to(tl.float32)
        if bias.scores is not None:
            index = _score_index(place, q_token, k_token, head, HEADS)
            inside = (q_token < q_end) & (k_token < k_end)
            added += tl.load(bias.scores + index, mask=inside, other=0.0).to(tl.float32)
        scores += added * _LOG2_E
    return scores, bucket


@triton.jit
def keep_block(bias, place, q_token, k_token):
    """[A, B]: 1 / (1 - p) where a probability is kept, 0 where it is dropped (`keep_mask`)."""
    q_first, k_first, _, _, state = place
    state = _mix(state ^ (q_token - q_first).to(tl.uint32))
    state = _mix(state ^ (k_token - k_first).to(tl.uint32))
    return tl.where((state >> 8).to(tl.float32) >= bias.drop_below, bias.keep_scale, 0.0)


@triton.jit
def zero_sums(slots, row, head, BIAS: tl.constexpr, HEADS: tl.constexpr):
    """The gradients' sums of one program: by position bucket, by time bucket, of the slope.

    Those of many position buckets are in the program's slot (see `store_sums`) from the beginning.
    """
    positions: tl.constexpr = BIAS.POSITIONS_PADDED
    times: tl.constexpr = BIAS.TIMES_PADDED
    position = tl.full([], 0.0, tl.float32)
    time = tl.full([], 0.0, tl.float32)
    slope = tl.full([], 0.0, tl.float32)
    if BIAS.ANY:
        if slots.position is not None:
            if BIAS.MANY_POSITIONS:
                _clear_positions(slots, row, head, BIAS, HEADS)
            else:
                position = tl.zeros([positions], tl.float32)
        if slots.time is not None:
            time = tl.zeros([times], tl.float32)
    return position, time, slope


@triton.jit
def add_to_sums(
    position, time, slope, d_scores, slots, row, bias, place, bucket,
    q_start, k_start, q_end, k_end, shift, head,
    BIAS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """The sums with this block's gradients of scores; the flat bias gets its gradient here.

    row: as `zero_sums` had it.
    d_scores: [queries from q_start, keys from k_start], 0 where there is no score.
    """
    rows: tl.constexpr = d_scores.shape[0]
    columns: tl.constexpr = d_scores.shape[1]
    if slots.position is not None:
        # Row i moved by its number, so that diagonals are columns, and are summed as these are.
        DISTANCES: tl.constexpr = 2 * rows if rows > columns else 2 * columns
        moved = tl.arange(0, DISTANCES)[None, :] + tl.arange(0, rows)[:, None] - (rows - 1)
        diagonals = tl.gather(d_scores, moved & (columns - 1), 1)
        there = (moved >= 0) & (moved < columns)
        sums = tl.sum(tl.where(there, diagonals, 0.0), 0)
        first = k_start - q_start - shift - (rows - 1)
        distance = first + tl.arange(0, DISTANCES)
        of_position = tl.load(bias.buckets + _distance_index(distance, BIAS))
        if BIAS.MANY_POSITIONS:
            _add_in_memory(sums, of_position, distance, first, slots, row, bias, head, BIAS, HEADS)
        else:
            here = of_position[:, None] == tl.arange(0, position.shape[0])[None, :]
            position += tl.sum(tl.where(here, sums[:, None], 0.0), 0)
    if slots.time is not None:
        time = _add_by_bucket(time, d_scores, bucket, BIAS)
    q_token = (q_start + tl.arange(0, rows))[:, None]
    k_token = (k_start + tl.arange(0, columns))[None, :]
    if slots.slopes is not None:
        distance = tl.abs(k_token - q_token - shift).to(tl.float32)
        slope -= tl.sum(tl.sum(d_scores * distance, 1), 0)
    if slots.scores is not None:
        index = _score_index(place, q_token, k_token, head, HEADS)
        inside = (q_token < q_end) & (k_token < k_end)
        value = d_scores.to(slots.scores.dtype.element_ty)
        tl.store(slots.scores + index, value, mask=inside)
    return position, time, slope


@triton.jit
def store_sums(position, time, slope, slots, row, head, BIAS: tl.constexpr, HEADS: tl.constexpr):
    """Every (row, head) program fills its own slot, unused rows too: nobody else clears it.

    Users of a few tokens have theirs behind those of the rows: `row` counts on.
    """
    positions: tl.constexpr = BIAS.POSITIONS
    times: tl.constexpr = BIAS.TIMES
    positions_padded: tl.constexpr = BIAS.POSITIONS_PADDED
    times_padded: tl.constexpr = BIAS.TIMES_PADDED
    slot = row.to(tl.int64) * HEADS + head
    if slots.position is not None and not BIAS.MANY_POSITIONS:
        bucket = tl.arange(0, positions_padded)
        tl.store(slots.position + slot * positions + bucket, position, mask=bucket < positions)
    if slots.time is not None:
        bucket = tl.arange(0, times_padded)
        tl.store(slots.time + slot * times + bucket, time, mask=bucket < times)
    if slots.slopes is not None:
        tl.store(slots.slopes + slot, slope)


@triton.jit
def _clear_positions(slots, row, head, BIAS: tl.constexpr, HEADS: tl.constexpr):
    positions: tl.constexpr = BIAS.POSITIONS
    slot = row.to(tl.int64) * HEADS + head
    # What is cleared may have sums already: a program may walk its keys again.
    tl.debug_barrier()
    for first in range(0, positions, _CLEARED):
        bucket = first + tl.arange(0, _CLEARED)
        nothing = tl.zeros([_CLEARED], tl.float32)
        tl.store(slots.position + slot * positions + bucket, nothing, mask=bucket < positions)
    tl.debug_barrier()


@triton.jit
def _add_in_memory(
    sums, of_position, distance, first, slots, row, bias, head,
    BIAS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Adds sums of distances, from `first` on, to those of their buckets in the slot.

    On either side buckets grow with the distance: those of a few distances lie side by side.
    """
    positions: tl.constexpr = BIAS.POSITIONS
    slot = row.to(tl.int64) * HEADS + head
    last = first + sums.shape[0] - 1
    for side in tl.static_range(2):
        nearest, farthest = tl.minimum(last, 0), tl.minimum(first, 0)
        here, some = distance <= 0, first <= 0
        if side == 1:
            nearest, farthest = tl.maximum(first, 1), tl.maximum(last, 1)
            here, some = distance > 0, last > 0
        least = tl.load(bias.buckets + _distance_index(nearest, BIAS)) // _WINDOW
        most = tl.load(bias.buckets + _distance_index(farthest, BIAS)) // _WINDOW
        for window in range(least, tl.where(some, most + 1, least)):
            bucket = window * _WINDOW + tl.arange(0, _WINDOW)
            found = here[:, None] & (of_position[:, None] == bucket[None, :])
            added = tl.sum(tl.where(found, sums[:, None], 0.0), 0)
            at = slots.position + slot * positions + bucket
            inside = bucket < positions
            tl.store(at, tl.load(at, mask=inside, other=0.0) + added, mask=inside)
            # The next window may be this one again, read by other threads.
            tl.debug_barrier()


@triton.jit
def _add_by_bucket(sums, values, bucket, BIAS: tl.constexpr):
    """`sums` plus the sum of the values in each time bucket.

    Only buckets between the least and the largest that has a value: in most blocks a few.
    """
    buckets: tl.constexpr = BIAS.TIMES
    rows: tl.constexpr = values.shape[0]
    index = tl.arange(0, sums.shape[0])
    some = values != 0.0
    first = tl.min(tl.min(tl.where(some, bucket, buckets), 1), 0)
    last = tl.max(tl.max(tl.where(some, bucket, -1), 1), 0)
    if sums.shape[0] <= _FEW_TIMES:
        # Rows apart, so that no bucket waits for all warps.
        of_rows = tl.zeros([rows, sums.shape[0]], tl.float32)
        for one in range(first, last + 1):
            of_row = tl.sum(tl.where(bucket == one, values, 0.0), 1)
            of_rows += tl.where(index[None, :] == one, of_row[:, None], 0.0)
        sums += tl.sum(of_rows, 0)
    else:
        for one in range(first, last + 1):
            total = tl.sum(tl.sum(tl.where(bucket == one, values, 0.0), 1), 0)
            sums += tl.where(index == one, total, 0.0)
    return sums


@triton.jit
def _distance_index(distance, BIAS: tl.constexpr):
    limit: tl.constexpr = BIAS.MAX_DISTANCE
    return tl.minimum(tl.maximum(distance, -limit), limit) + limit


@triton.jit
def time_bucket(bias, q_token, k_token, q_end, k_end, BIAS: tl.constexpr):
    """[A, B] int32, exactly `scores.bias_terms`' buckets.

    An estimate of the logarithm that is off by less than half a bucket gives the nearest start of
    a bucket, and integers decide on which side of it the time is.
    """
    last: tl.constexpr = BIAS.TIMES - 1
    q_time = tl.load(bias.q_times + q_token, mask=q_token < q_end, other=0)
    k_time = tl.load(bias.k_times + k_token, mask=k_token < k_end, other=0)
    elapsed = tl.abs(q_time - k_time)
    # x = 2^e * (1 + m) has the bits (127 + e) * 2^23 + m * 2^23, and log2(1 + m) is m + 0.34 m
    # (1 - m) to within 0.009; a bucket is 0.137 or more (base 1.1). log2 itself would take more
    # time than all the rest of a bias.
    bits = (1.0 + elapsed.to(tl.float32) * bias.time_rate).to(tl.int32, bitcast=True)
    m = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    log2 = bits.to(tl.float32) * (1.0 / (1 << 23)) - 127.0 + 0.34 * m * (1.0 - m)
    steps = log2 * bias.time_steps
    # Bounded while it is a float: there are times longer than int32 has buckets.
    nearest = tl.minimum(steps + 0.5, last * 1.0).to(tl.int32)
    start = tl.load(bias.time_starts + nearest)
    return tl.where(elapsed < start, nearest - 1, nearest)


@triton.jit
def _score_index(place, q_token, k_token, head, HEADS: tl.constexpr):
    q_first, k_first, keys, score_first, _ = place
    row = (q_token - q_first).to(tl.int64) * keys
    return (score_first + row + (k_token - k_first)) * HEADS + head


@triton.jit
def _mix(x):
    """`dropout._mix` on uint32, whose sums and products wrap around."""
    x = x + tl.full([], 0x9E3779B9, tl.uint32)
    x = (x ^ (x >> 16)) * tl.full([], 0x85EBCA6B, tl.uint32)
    x = (x ^ (x >> 13)) * tl.full([], 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)
