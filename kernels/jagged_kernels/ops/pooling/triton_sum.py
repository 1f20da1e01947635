"""Sums over each user's tokens, plain, weighted or of products; pieces as in `device.pieces`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.device.memory import address_of
from jagged_kernels.device.pieces import (
    MERGE_LANES,
    MERGE_WARPS,
    Cut,
    cut_users,
    load_piece,
    partial_rows,
    tile_addresses,
)

# At most four warps, and so many programs: most of what a program of a short user does is waiting.
# Many users have fewer than 128 tokens.
SUM_CUT = Cut(4, 128, 4, 128)


def launch_sum(
    x: Tensor,
    offsets: Tensor,
    *,
    weights: Tensor | None = None,
    times: Tensor | None = None,
    mean: bool = False,
) -> Tensor:
    """Sums over each user's tokens in x's dtype: [B, C], with weights [B, H, C].

    Args:
        x: [T, C].
        weights: [T, H]; sum of weights[t, h] * x[t], for each h.
        times: [T, C]; sum of times[t] * x[t].
        mean: divide by the number of tokens; 0 for a user without any.

    At most one of `weights` and `times`.
    """
    x, columns, users = rows_of_dims(x), x.shape[1], offsets.shape[0] - 1
    other = weights if times is None else times
    other = None if other is None else rows_of_dims(other)
    heads = 1 if weights is None else weights.shape[1]
    sums = (users, columns) if weights is None else (users, heads, columns)
    out = torch.empty(sums, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    pieces = cut_users(x, offsets, SUM_CUT)
    slots, shape = pieces.slots, pieces.shape
    partials = torch.empty((2 * slots, heads, columns), dtype=torch.float32, device=x.device)
    common = {"MEAN": mean, "HEADS": heads, **pieces.constants(columns)}
    launch(
        _sum_pieces_kernel, (slots + users) * heads * pieces.blocks,
        (x, other, offsets, out, partials, *pieces.numbers()),
        {
            **common, "WEIGHTS": weights is not None, "TIMES": times is not None,
            "X_STRIDE": x.stride(0), "OTHER_STRIDE": 0 if other is None else other.stride(0),
            "TILE": shape.tile, "LANES": shape.lanes,
        },
        num_warps=shape.warps, maxnreg=shape.registers,
    )  # fmt: skip
    if slots:
        launch(
            _merge_sums_kernel, slots * heads * pieces.blocks,
            (partials, offsets, out, *pieces.numbers()),
            {**common, "LANES": MERGE_LANES}, num_warps=MERGE_WARPS,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["users", "slots", "steps"])
def _sum_pieces_kernel(
    x_ptr, other_ptr, offsets_ptr, out_ptr, partial_ptr, users, slots, steps,
    MEAN: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
    WEIGHTS: tl.constexpr, TIMES: tl.constexpr, X_STRIDE: tl.constexpr,
    OTHER_STRIDE: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) // (BLOCKS * HEADS)
    head = tl.program_id(0) // BLOCKS % HEADS
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    user, _, length, begin, count, row = load_piece(
        offsets_ptr, number, users, slots, steps, PIECE, False
    )
    if (number < slots) & (count == 0):
        return
    x_ptr += begin.to(tl.int64) * X_STRIDE
    if WEIGHTS or TIMES:
        other_ptr += begin.to(tl.int64) * OTHER_STRIDE
    acc = tl.zeros([LANES, BLOCK], tl.float32)
    left = count
    for _tile in range(0, count, TILE):
        for _row in tl.static_range(TILE // LANES):
            address, inside = tile_addresses(left, column, X_STRIDE, COLUMNS, LANES, BLOCK)
            x = tl.load(x_ptr + address, mask=inside, other=0.0).to(tl.float32)
            x_ptr += LANES * X_STRIDE
            if WEIGHTS:
                lane = tl.arange(0, LANES)
                address = other_ptr + head + lane * OTHER_STRIDE
                weight = tl.load(address, mask=lane < left, other=0.0)
                x *= weight.to(tl.float32)[:, None]
            if TIMES:
                address, inside = tile_addresses(left, column, OTHER_STRIDE, COLUMNS, LANES, BLOCK)
                x *= tl.load(other_ptr + address, mask=inside, other=0.0).to(tl.float32)
            if WEIGHTS or TIMES:
                other_ptr += LANES * OTHER_STRIDE
            acc += x
            left -= LANES
    total = tl.sum(acc, 0)
    if length > PIECE:
        address = partial_ptr + (row.to(tl.int64) * HEADS + head) * COLUMNS + column
        tl.store(address, total, mask=column < COLUMNS)
    else:
        _store_sum(out_ptr, total, user, length, head, column, MEAN, HEADS, COLUMNS)


@triton.jit(do_not_specialize=["users", "slots", "steps"])
def _merge_sums_kernel(
    partial_ptr, offsets_ptr, out_ptr, users, slots, steps,
    MEAN: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    number = slots + tl.program_id(0) // (BLOCKS * HEADS)
    user, first, length, _, count, _ = load_piece(
        offsets_ptr, number, users, slots, steps, PIECE, True
    )
    if count == 0:
        return
    head = tl.program_id(0) // BLOCKS % HEADS
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([LANES, BLOCK], tl.float32)
    for done in range(0, (length - 1) // PIECE + 1, LANES):
        row, exists = partial_rows(first, length, slots, done, PIECE, LANES)
        inside = exists[:, None] & (column < COLUMNS)[None, :]
        address = address_of(partial_ptr, row * HEADS + head, column, COLUMNS)
        acc += tl.load(address, mask=inside, other=0.0)
    _store_sum(out_ptr, tl.sum(acc, 0), user, length, head, column, MEAN, HEADS, COLUMNS)


@triton.jit
def _store_sum(
    out_ptr, total, user, length, head, column,
    MEAN: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    if MEAN:
        total /= tl.maximum(length, 1).to(tl.float32)
    address = out_ptr + (user.to(tl.int64) * HEADS + head) * COLUMNS + column
    tl.store(address, total.to(out_ptr.dtype.element_ty), mask=column < COLUMNS)
