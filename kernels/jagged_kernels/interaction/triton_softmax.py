"""Softmax over each user's tokens, forward and backward; pieces as in `triton_segments`.

A program that has a user whole reads its tokens twice, the second time from cache. Of a longer
user, a first launch leaves the state of each piece (largest and sum of exponentials; in the
backward the sum of y * dy), a second merges them, and a third, which is the first kernel again,
writes the pieces.
"""

# Triton's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.triton_blocks import LOG2_E, rows_of_dims
from jagged_kernels.interaction.triton_segments import (
    MERGE_LANES,
    address_of,
    load_cut_user,
    load_pieces,
    piece_shape,
    piece_slots,
)
from jagged_kernels.interaction.triton_tiles import search_steps
from jagged_kernels.launch import cdiv, launch

# Four programs a multiprocessor in place of two: what spills, spills outside the loops.
OPTIONS = {"num_warps": 8, "maxnreg": 64}

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
    shape = piece_shape(columns)
    slots = piece_slots(tokens, users, shape)
    cut = tokens > shape.piece
    # Of a piece the sums, then what is largest.
    states = torch.empty((slots if cut else 0, 2, columns), dtype=torch.float32, device=x.device)
    blocks = cdiv(columns, shape.block)
    common = {
        "BACKWARD": d_y is not None, "COLUMNS": columns, "BLOCKS": blocks,
        "BLOCK": shape.block, "PIECE": shape.piece,
    }  # fmt: skip
    shapes = {
        **common, "X_STRIDE": x.stride(0), "D_STRIDE": 0 if d_y is None else d_y.stride(0),
        "LANES": shape.lanes, "PIECES": shape.pieces,
    }  # fmt: skip
    grid = cdiv(slots, shape.pieces) * blocks
    arguments = (x, d_y, out, offsets, states, users, search_steps(users))
    launch(_softmax_kernel, grid, arguments, {"MERGED": False, **shapes}, **OPTIONS)
    if cut:
        merge = {**common, "LANES": MERGE_LANES}
        launch(_merge_kernel, users * blocks, (states, offsets), merge, **OPTIONS)
        launch(_softmax_kernel, grid, arguments, {"MERGED": True, **shapes}, **OPTIONS)
    return out


@triton.jit
def online_softmax(top, total, x):
    """The largest and the sum of exponentials, after one more number in each place."""
    factor = tl.exp2(-tl.abs(x - top) * _LOG2_E)
    total = tl.where(x > top, total * factor + 1.0, total + factor)
    return tl.maximum(top, x), total


@triton.jit
def merge_softmax(top, total, AXIS: tl.constexpr):
    """(largest, sum of exponentials) along an axis, which is kept with size 1."""
    largest = tl.max(top, AXIS, keep_dims=True)
    total = tl.sum(total * tl.exp2((top - largest) * _LOG2_E), AXIS, keep_dims=True)
    return largest, total


@triton.jit
def _to_rows(state, PIECES: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """[PIECES, 1, BLOCK] -> [PIECES * LANES, BLOCK]."""
    return tl.reshape(tl.broadcast_to(state, [PIECES, LANES, BLOCK]), [PIECES * LANES, BLOCK])


@triton.jit(do_not_specialize=["users", "steps"])
def _softmax_kernel(
    x_ptr, d_ptr, out_ptr, offsets_ptr, states_ptr, users, steps,
    MERGED: tl.constexpr, BACKWARD: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr, PIECE: tl.constexpr, X_STRIDE: tl.constexpr, D_STRIDE: tl.constexpr,
    LANES: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Whole users, and the states of pieces of the others; MERGED: those pieces from the states."""
    ROWS: tl.constexpr = PIECES * LANES
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    has_column = (column < COLUMNS)[None, :]
    row = tl.arange(0, ROWS)
    first_slot = tl.program_id(0) // BLOCKS * PIECES
    slot, user, first, length, begin, end = load_pieces(
        offsets_ptr, first_slot, row, users, steps, PIECE, LANES, PIECES
    )
    lane = begin + row % LANES
    is_cut = length > PIECE

    if MERGED:
        end = tl.where(is_cut, end, begin)
        inside = (is_cut & (begin < end))[:, None] & has_column
        first_slot = first // PIECE + user
        state = address_of(states_ptr, first_slot, column, 2 * COLUMNS)
        total = tl.load(state, mask=inside, other=1.0)
        top = tl.load(state + COLUMNS, mask=inside, other=0.0)
    else:
        top = tl.full([ROWS, BLOCK], LOWEST, tl.float32)
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for done in range(0, tl.max(end - begin), LANES):
            token = lane + done
            inside = (token < end)[:, None] & has_column
            address = address_of(x_ptr, token, column, X_STRIDE)
            if BACKWARD:
                y = tl.load(address, mask=inside, other=0.0).to(tl.float32)
                address = address_of(d_ptr, token, column, D_STRIDE)
                total += y * tl.load(address, mask=inside, other=0.0).to(tl.float32)
            else:
                x = tl.load(address, mask=inside, other=float("-inf")).to(tl.float32)
                top, total = online_softmax(top, total, x)
        total = tl.reshape(total, [PIECES, LANES, BLOCK])
        if BACKWARD:
            total = tl.sum(total, 1, keep_dims=True)
        else:
            top, total = merge_softmax(tl.reshape(top, [PIECES, LANES, BLOCK]), total, 1)
            top = _to_rows(top, PIECES, LANES, BLOCK)
        total = _to_rows(total, PIECES, LANES, BLOCK)
        one_of_piece = is_cut & (begin < end) & (row % LANES == 0)
        inside = one_of_piece[:, None] & has_column
        state = address_of(states_ptr, slot, column, 2 * COLUMNS)
        tl.store(state, total, mask=inside)
        if not BACKWARD:
            tl.store(state + COLUMNS, top, mask=inside)
        end = tl.where(is_cut, begin, end)

    for done in range(0, tl.max(end - begin), LANES):
        token = lane + done
        inside = (token < end)[:, None] & has_column
        address = address_of(x_ptr, token, column, X_STRIDE)
        x = tl.load(address, mask=inside, other=0.0).to(tl.float32)
        if BACKWARD:
            address = address_of(d_ptr, token, column, D_STRIDE)
            result = x * (tl.load(address, mask=inside, other=0.0).to(tl.float32) - total)
        else:
            result = tl.exp2((x - top) * _LOG2_E) / total
        address = address_of(out_ptr, token, column, COLUMNS)
        tl.store(address, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _merge_kernel(
    states_ptr, offsets_ptr,
    BACKWARD: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    PIECE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The state of a cut user, in place of that of its first piece."""
    user = tl.program_id(0) // BLOCKS
    length, slot, pieces = load_cut_user(offsets_ptr, user, PIECE)
    if length <= PIECE:
        return
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    top = tl.full([LANES, BLOCK], LOWEST, tl.float32)
    total = tl.zeros([LANES, BLOCK], tl.float32)
    for done in range(0, pieces, LANES):
        inside = (lane + done < pieces)[:, None] & (column < COLUMNS)[None, :]
        row = slot + lane + done
        state = address_of(states_ptr, row, column, 2 * COLUMNS)
        totals = tl.load(state, mask=inside, other=0.0)
        if not BACKWARD:
            tops = tl.load(state + COLUMNS, mask=inside, other=LOWEST)
            larger = tl.maximum(top, tops)
            totals *= tl.exp2((tops - larger) * _LOG2_E)
            total *= tl.exp2((top - larger) * _LOG2_E)
            top = larger
        total += totals
    state = states_ptr + slot.to(tl.int64) * (2 * COLUMNS) + column
    if BACKWARD:
        total = tl.sum(total, 0)
    else:
        top, total = merge_softmax(top, total, 0)
        total = tl.sum(total, 0)
        tl.store(state + COLUMNS, tl.max(top, 0), mask=column < COLUMNS)
    tl.store(state, total, mask=column < COLUMNS)
