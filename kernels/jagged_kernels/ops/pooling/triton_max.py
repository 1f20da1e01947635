"""The largest of each user's tokens, its place and its gradient; pieces as in `device.pieces`."""

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

MAX_CUT = Cut(2, 128, 8, 128)
# It writes only, and waits for no token.
BACKWARD_CUT = Cut(4, 64, 16, 128)
# The place of a token that is not there: behind all others.
_NOWHERE = tl.constexpr(2**31 - 1)


def launch_max(x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(largest [B, C] in the dtype of x, its place among the user's tokens [B, C] int64).

    x is [T, C]. The first of equals; NaN is larger than all; a user without tokens has 0 at -1.
    """
    x, columns, users = rows_of_dims(x), x.shape[1], offsets.shape[0] - 1
    top = torch.empty((users, columns), dtype=x.dtype, device=x.device)
    place = torch.empty((users, columns), dtype=torch.int64, device=x.device)
    if top.numel() == 0:
        return top, place
    pieces = cut_users(x, offsets, MAX_CUT)
    slots, shape = pieces.slots, pieces.shape
    tops = torch.empty((2 * slots, columns), dtype=torch.float32, device=x.device)
    places = torch.empty((2 * slots, columns), dtype=torch.int32, device=x.device)
    common = pieces.constants(columns)
    launch(
        _max_pieces_kernel, (slots + users) * pieces.blocks,
        (x, offsets, top, place, tops, places, *pieces.numbers()),
        {**common, "X_STRIDE": x.stride(0), "TILE": shape.tile, "LANES": shape.lanes},
        num_warps=shape.warps, maxnreg=shape.registers,
    )  # fmt: skip
    if slots:
        launch(
            _merge_max_kernel, slots * pieces.blocks,
            (tops, places, offsets, top, place, *pieces.numbers()),
            {**common, "LANES": MERGE_LANES}, num_warps=MERGE_WARPS,
        )  # fmt: skip
    return top, place


@triton.jit
def _larger(top, place, value, new_place):
    """(top, place) after a later token `value` at `new_place`. -inf, which stands for a token that
    is not there too, changes nothing."""
    # Neither smaller nor equal: larger, or the first NaN.
    later = ((value <= top) == 0) & (top == top)
    return tl.where(later, value, top), tl.where(later, new_place, place)


@triton.jit
def _largest(top, place, AXIS: tl.constexpr):
    """The largest along an axis, and the first place that has it."""
    is_nan = top != top
    some_nan = tl.max(is_nan.to(tl.int32), AXIS, keep_dims=True) > 0
    largest = tl.max(tl.where(is_nan, float("-inf"), top), AXIS, keep_dims=True)
    has_it = tl.where(some_nan, is_nan, top == largest)
    first = tl.min(tl.where(has_it, place, _NOWHERE), AXIS)
    # The sum of NaN and others is NaN; without any, this adds 0.
    nan = tl.sum(tl.where(is_nan, top, 0.0), AXIS)
    return tl.max(largest, AXIS) + nan, first


@triton.jit
def _store_max(
    top_ptr, place_ptr, top, place, user, length, column, COLUMNS: tl.constexpr
):  # fmt: skip
    # Where nothing is above -inf, the first token is the first of equals.
    place = tl.where(place == _NOWHERE, tl.where(length > 0, 0, -1), place)
    address = user.to(tl.int64) * COLUMNS + column
    top = tl.where(length > 0, top, 0.0).to(top_ptr.dtype.element_ty)
    tl.store(top_ptr + address, top, mask=column < COLUMNS)
    tl.store(place_ptr + address, place.to(tl.int64), mask=column < COLUMNS)


@triton.jit(do_not_specialize=["users", "slots", "steps"])
def _max_pieces_kernel(
    x_ptr, offsets_ptr, top_ptr, place_ptr, tops_ptr, places_ptr, users, slots, steps,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
    X_STRIDE: tl.constexpr, TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) // BLOCKS
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    user, first, length, begin, count, row = load_piece(
        offsets_ptr, number, users, slots, steps, PIECE, False
    )
    if (number < slots) & (count == 0):
        return
    x_ptr += begin.to(tl.int64) * X_STRIDE
    top = tl.full([LANES, BLOCK], float("-inf"), tl.float32)
    place = tl.full([LANES, BLOCK], _NOWHERE, tl.int32)
    new_place = (begin - first + tl.arange(0, LANES))[:, None]
    left = count
    for _done in range(0, count, TILE):
        # One after the other in registers, all on their way at once.
        for _step in tl.static_range(TILE // LANES):
            address, inside = tile_addresses(left, column, X_STRIDE, COLUMNS, LANES, BLOCK)
            x = tl.load(x_ptr + address, mask=inside, other=float("-inf")).to(tl.float32)
            top, place = _larger(top, place, x, new_place)
            x_ptr += LANES * X_STRIDE
            new_place += LANES
            left -= LANES
    top, place = _largest(top, place, 0)
    if length > PIECE:
        address = row.to(tl.int64) * COLUMNS + column
        tl.store(tops_ptr + address, top, mask=column < COLUMNS)
        tl.store(places_ptr + address, place, mask=column < COLUMNS)
    else:
        _store_max(top_ptr, place_ptr, top, place, user, length, column, COLUMNS)


@triton.jit(do_not_specialize=["users", "slots", "steps"])
def _merge_max_kernel(
    tops_ptr, places_ptr, offsets_ptr, top_ptr, place_ptr, users, slots, steps,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    number = slots + tl.program_id(0) // BLOCKS
    user, first, length, _, count, _ = load_piece(
        offsets_ptr, number, users, slots, steps, PIECE, True
    )
    if count == 0:
        return
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    top = tl.full([LANES, BLOCK], float("-inf"), tl.float32)
    place = tl.full([LANES, BLOCK], _NOWHERE, tl.int32)
    for done in range(0, (length - 1) // PIECE + 1, LANES):
        row, exists = partial_rows(first, length, slots, done, PIECE, LANES)
        inside = exists[:, None] & (column < COLUMNS)[None, :]
        tops = tl.load(address_of(tops_ptr, row, column, COLUMNS), mask=inside, other=float("-inf"))
        places = tl.load(address_of(places_ptr, row, column, COLUMNS), mask=inside, other=0)
        top, place = _larger(top, place, tops, places)
    top, place = _largest(top, place, 0)
    _store_max(top_ptr, place_ptr, top, place, user, length, column, COLUMNS)


def launch_max_backward(d_out: Tensor, place: Tensor, offsets: Tensor, tokens: int) -> Tensor:
    """[tokens, C] in the dtype of d_out: d_out [B, C] at each user's `place` [B, C], else 0."""
    d_out, place, columns = d_out.contiguous(), place.contiguous(), d_out.shape[1]
    d_x = torch.empty((tokens, columns), dtype=d_out.dtype, device=d_out.device)
    if d_x.numel() == 0:
        return d_x
    pieces = cut_users(d_x, offsets, BACKWARD_CUT)
    shape = pieces.shape
    launch(
        _max_backward_kernel, (pieces.slots + pieces.users) * pieces.blocks,
        (d_out, place, offsets, d_x, *pieces.numbers()),
        {**pieces.constants(columns), "TILE": shape.tile, "LANES": shape.lanes},
        num_warps=shape.warps,
    )  # fmt: skip
    return d_x


@triton.jit(do_not_specialize=["users", "slots", "steps"])
def _max_backward_kernel(
    d_out_ptr, place_ptr, offsets_ptr, d_x_ptr, users, slots, steps,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
    TILE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """By pieces, so that a program looks up its user's places and gradients once."""
    number = tl.program_id(0) // BLOCKS
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    user, first, _, begin, count, _ = load_piece(
        offsets_ptr, number, users, slots, steps, PIECE, False
    )
    if count == 0:
        return
    # Each lane looks up what it writes in every step: nothing moves between threads.
    row = tl.zeros([LANES], tl.int64) + user
    exists = (column < COLUMNS)[None, :]
    place = tl.load(address_of(place_ptr, row, column, COLUMNS), mask=exists, other=-1)
    d_out = tl.load(address_of(d_out_ptr, row, column, COLUMNS), mask=exists, other=0.0)
    behind = place.to(tl.int32) - (begin - first) - tl.arange(0, LANES)[:, None]
    d_x_ptr += begin.to(tl.int64) * COLUMNS
    left = count
    for _done in range(0, count, TILE):
        for _step in tl.static_range(TILE // LANES):
            address, inside = tile_addresses(left, column, COLUMNS, COLUMNS, LANES, BLOCK)
            tl.store(d_x_ptr + address, tl.where(behind == 0, d_out, 0.0), mask=inside)
            d_x_ptr += LANES * COLUMNS
            behind -= LANES
            left -= LANES
