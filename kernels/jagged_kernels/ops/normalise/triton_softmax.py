"""Softmax over each user's tokens, forward and backward; pieces as in `device.pieces`.

A program that has a user whole keeps its tokens in registers, in the smallest of a few tiles that
has room for them, or reads them twice, the second time from cache. Of a longer user, the first
launch leaves the state of each piece (largest and sum of exponentials; in the backward the sum of
y * dy). In the second the program of a piece merges all states of its user, few beside its tokens,
and writes the piece.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.device.arithmetic import LOG2_E
from jagged_kernels.device.memory import address_of
from jagged_kernels.device.pieces import (
    MERGE_LANES,
    Cut,
    by_lane,
    cut_users,
    load_piece,
    partial_rows,
    tile_addresses,
)
from jagged_kernels.device.squares import fits_best

# Long pieces, since cut users are read from memory twice; many warps, so that few users are on
# their way at once and all of them fit in the cache. With half the columns, a program keeps twice
# as many tokens. By bytes of a number.
SOFTMAX_CUTS = {2: Cut(4, 128, 16, 128, registers=96), 4: Cut(8, 64, 8, 256, 8, columns=32)}
# Of y and of dy each half as much.
BACKWARD_CUT = Cut(8, 32, 16, 256, 8, columns=32)
# Of rows that one thread loads at once. Their users are small: of nearly all, one program keeps all
# tokens. Two warps keep many times what a short user needs, and there is room for many programs.
# Pieces are as many bytes as those of wide rows, and so long that small batches have none.
NARROW_CUT = Cut(2, 64, 64, 2048, 2)
NARROW_BACKWARD_CUT = Cut(2, 32, 128, 2048, 2)
_NARROW_BYTES = 16
# How often a tile is halved for users that need less, at most; not below a token a lane.
_HALVINGS = 3

_LOG2_E = tl.constexpr(LOG2_E)
# Below every score but -inf, so that nothing seen yet minus -inf is not NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)


def launch_softmax(x: Tensor, offsets: Tensor) -> Tensor:
    """[T, C] -> [T, C], the exponentials of each column summing to 1 over each user."""
    return _launch(rows_of_dims(x), None, offsets)


def launch_softmax_backward(d_y: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
    """The gradient of x, for y = softmax(x); all [T, C]."""
    return _launch(rows_of_dims(y), rows_of_dims(d_y), offsets)


def _launch(x: Tensor, d_y: Tensor | None, offsets: Tensor) -> Tensor:
    """`x` is y in the backward."""
    (tokens, columns), users = x.shape, offsets.shape[0] - 1
    out = torch.empty((tokens, columns), dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    cut = SOFTMAX_CUTS[x.element_size()] if d_y is None else BACKWARD_CUT
    if columns * x.element_size() <= _NARROW_BYTES:
        cut = NARROW_CUT if d_y is None else NARROW_BACKWARD_CUT
    pieces = cut_users(x, offsets, cut)
    slots, shape = pieces.slots, pieces.shape
    # Addresses in a tile are of 32 bits.
    if shape.tile * x.stride(0) >= 2**31:
        x = x.contiguous()
    if d_y is not None and shape.tile * d_y.stride(0) >= 2**31:
        d_y = d_y.contiguous()
    # Of a piece the sums, then what is largest.
    states = torch.empty((2 * slots, 2, columns), dtype=torch.float32, device=x.device)
    arguments = (x, d_y, out, offsets, states, *pieces.numbers())
    constants = {
        "BACKWARD": d_y is not None, **pieces.constants(columns), "X_STRIDE": x.stride(0),
        "D_STRIDE": 0 if d_y is None else d_y.stride(0), "TILE": shape.tile, "LANES": shape.lanes,
        "HALVINGS": min((shape.tile // shape.lanes).bit_length() - 1, _HALVINGS),
        "MERGE_LANES": MERGE_LANES,
    }  # fmt: skip
    for merged, programs in ((False, slots + users), (True, 2 * slots)):
        if programs:
            launch(
                _softmax_kernel, programs * pieces.blocks, arguments,
                {"MERGED": merged, **constants}, num_warps=shape.warps, maxnreg=shape.registers,
            )  # fmt: skip
    return out


@triton.jit
def merge_softmax(top, total, AXIS: tl.constexpr):
    """(largest, sum of exponentials) along an axis, which is kept with size 1."""
    largest = tl.max(top, AXIS, keep_dims=True)
    total = tl.sum(total * tl.exp2((top - largest) * _LOG2_E), AXIS, keep_dims=True)
    return largest, total


@triton.jit(do_not_specialize=["users", "slots", "steps"])
def _softmax_kernel(
    x_ptr, d_ptr, out_ptr, offsets_ptr, states_ptr, users, slots, steps,
    MERGED: tl.constexpr, BACKWARD: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, PIECE: tl.constexpr, X_STRIDE: tl.constexpr, D_STRIDE: tl.constexpr,
    TILE: tl.constexpr, LANES: tl.constexpr, HALVINGS: tl.constexpr, MERGE_LANES: tl.constexpr,
):  # fmt: skip
    """Whole users, and the states of pieces of the others; MERGED: those pieces from the states."""
    number = tl.program_id(0) // BLOCKS
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    _, first, length, begin, count, row = load_piece(
        offsets_ptr, number, users, slots, steps, PIECE, MERGED
    )
    if count == 0:
        return
    x_ptr += begin.to(tl.int64) * X_STRIDE
    out_ptr += begin.to(tl.int64) * COLUMNS
    if BACKWARD:
        d_ptr += begin.to(tl.int64) * D_STRIDE
    if not MERGED:
        # Exponentials of tokens that are not there take as long as others.
        for halvings in tl.static_range(HALVINGS + 1):
            if fits_best(length, TILE, halvings, HALVINGS):
                _softmax_of_tile(
                    x_ptr, d_ptr, out_ptr, length, column,
                    BACKWARD, COLUMNS, X_STRIDE, D_STRIDE, TILE >> halvings, BLOCK,
                )  # fmt: skip
        if length <= TILE:
            return

    if MERGED:
        top = tl.full([MERGE_LANES, BLOCK], LOWEST, tl.float32)
        total = tl.zeros([MERGE_LANES, BLOCK], tl.float32)
        for done in range(0, (length - 1) // PIECE + 1, MERGE_LANES):
            state_row, exists = partial_rows(first, length, slots, done, PIECE, MERGE_LANES)
            inside = exists[:, None] & (column < COLUMNS)[None, :]
            state = address_of(states_ptr, state_row, column, 2 * COLUMNS)
            totals = tl.load(state, mask=inside, other=0.0)
            if BACKWARD:
                total += totals
            else:
                tops = tl.load(state + COLUMNS, mask=inside, other=LOWEST)
                larger = tl.maximum(top, tops)
                total = total * tl.exp2((top - larger) * _LOG2_E)
                total += totals * tl.exp2((tops - larger) * _LOG2_E)
                top = larger
    else:
        top = tl.full([LANES, BLOCK], LOWEST, tl.float32)
        total = tl.zeros([LANES, BLOCK], tl.float32)
        x_tile = x_ptr
        d_tile = d_ptr
        for done in range(0, count, TILE):
            left = count - done
            address, inside = tile_addresses(left, column, X_STRIDE, COLUMNS, TILE, BLOCK)
            x = tl.load(x_tile + address, mask=inside, other=0.0 if BACKWARD else float("-inf"))
            x = x.to(tl.float32)
            x_tile += TILE * X_STRIDE
            if BACKWARD:
                address, inside = tile_addresses(left, column, D_STRIDE, COLUMNS, TILE, BLOCK)
                x *= tl.load(d_tile + address, mask=inside, other=0.0).to(tl.float32)
                d_tile += TILE * D_STRIDE
                total += tl.sum(by_lane(x, LANES), 0)
            else:
                x = by_lane(x, LANES)
                larger = tl.maximum(top, tl.max(x, 0))
                total *= tl.exp2((top - larger) * _LOG2_E)
                total += tl.sum(tl.exp2((x - larger[None, :, :]) * _LOG2_E), 0)
                top = larger
    if BACKWARD:
        total = tl.sum(total, 0)
    else:
        top, total = merge_softmax(top, total, 0)
        top, total = tl.max(top, 0), tl.sum(total, 0)

    if (length > PIECE) & (not MERGED):
        state = states_ptr + row.to(tl.int64) * (2 * COLUMNS) + column
        tl.store(state, total, mask=column < COLUMNS)
        if not BACKWARD:
            tl.store(state + COLUMNS, top, mask=column < COLUMNS)
    else:
        _write_softmax(
            x_ptr, d_ptr, out_ptr, top, total, count, column,
            BACKWARD, COLUMNS, X_STRIDE, D_STRIDE, TILE, BLOCK,
        )  # fmt: skip


@triton.jit
def _softmax_of_tile(
    x_ptr, d_ptr, out_ptr, count, column,
    BACKWARD: tl.constexpr, COLUMNS: tl.constexpr, X_STRIDE: tl.constexpr, D_STRIDE: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a user whose tokens fit into registers, and so are read once."""
    address, inside = tile_addresses(count, column, X_STRIDE, COLUMNS, TILE, BLOCK)
    x = tl.load(x_ptr + address, mask=inside, other=0.0 if BACKWARD else float("-inf"))
    x = x.to(tl.float32)
    if BACKWARD:
        address, inside = tile_addresses(count, column, D_STRIDE, COLUMNS, TILE, BLOCK)
        d_y = tl.load(d_ptr + address, mask=inside, other=0.0).to(tl.float32)
        result = x * (d_y - tl.sum(x * d_y, 0)[None, :])
    else:
        top = tl.maximum(tl.max(x, 0), LOWEST)
        weight = tl.exp2((x - top[None, :]) * _LOG2_E)
        result = weight * (1.0 / tl.sum(weight, 0))[None, :]
    address, inside = tile_addresses(count, column, COLUMNS, COLUMNS, TILE, BLOCK)
    tl.store(out_ptr + address, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _write_softmax(
    x_ptr, d_ptr, out_ptr, top, total, count, column,
    BACKWARD: tl.constexpr, COLUMNS: tl.constexpr, X_STRIDE: tl.constexpr, D_STRIDE: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if not BACKWARD:
        total = 1.0 / total
    for done in range(0, count, TILE):
        left = count - done
        address, inside = tile_addresses(left, column, X_STRIDE, COLUMNS, TILE, BLOCK)
        x = tl.load(x_ptr + address, mask=inside, other=0.0).to(tl.float32)
        x_ptr += TILE * X_STRIDE
        if BACKWARD:
            address, inside = tile_addresses(left, column, D_STRIDE, COLUMNS, TILE, BLOCK)
            d_y = tl.load(d_ptr + address, mask=inside, other=0.0).to(tl.float32)
            d_ptr += TILE * D_STRIDE
            result = x * (d_y - total[None, :])
        else:
            result = tl.exp2((x - top[None, :]) * _LOG2_E) * total[None, :]
        address, inside = tile_addresses(left, column, COLUMNS, COLUMNS, TILE, BLOCK)
        tl.store(out_ptr + address, result.to(out_ptr.dtype.element_ty), mask=inside)
        out_ptr += TILE * COLUMNS
