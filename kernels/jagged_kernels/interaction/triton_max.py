"""The largest of each user's tokens and where it lies; pieces as in `triton_segments`."""

# Triton's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.triton_blocks import rows_of_dims
from jagged_kernels.interaction.triton_segments import (
    MERGE_LANES,
    address_of,
    load_cut_user,
    load_pieces,
    of_pieces,
    piece_shape,
    piece_slots,
)
from jagged_kernels.interaction.triton_tiles import search_steps
from jagged_kernels.launch import cdiv, launch

# Values and places take many registers: what spills, spills outside the loop.
OPTIONS = {"num_warps": 8, "maxnreg": 64}
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
    shape = piece_shape(columns)
    slots = piece_slots(x.shape[0], users, shape)
    cut = x.shape[0] > shape.piece
    partials = (slots if cut else 0, columns)
    tops = torch.empty(partials, dtype=torch.float32, device=x.device)
    places = torch.empty(partials, dtype=torch.int32, device=x.device)
    blocks = cdiv(columns, shape.block)
    common = {
        "COLUMNS": columns, "BLOCKS": blocks, "BLOCK": shape.block, "PIECE": shape.piece
    }  # fmt: skip
    launch(
        _max_pieces_kernel, cdiv(slots, shape.pieces) * blocks,
        (x, offsets, top, place, tops, places, users, search_steps(users)),
        {"X_STRIDE": x.stride(0), **common, "LANES": shape.lanes, "PIECES": shape.pieces},
        **OPTIONS,
    )  # fmt: skip
    if cut:
        launch(
            _merge_max_kernel, users * blocks, (tops, places, offsets, top, place),
            {**common, "LANES": MERGE_LANES}, **OPTIONS,
        )  # fmt: skip
    return top, place


@triton.jit
def _larger(top, place, value, new_place, there):
    """(top, place) after a later token `value` at `new_place`; one that is not there changes
    nothing."""
    is_nan = (value != value) & (top == top)
    # The first token counts even if it is -inf.
    later = there & ((value > top) | is_nan | (place == _NOWHERE))
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
def _store_max(top_ptr, place_ptr, top, place, row, column, mask, COLUMNS: tl.constexpr):
    empty = place == _NOWHERE
    top = tl.where(empty, 0.0, top)
    place = tl.where(empty, -1, place)
    tl.store(address_of(top_ptr, row, column, COLUMNS), top.to(top_ptr.dtype.element_ty), mask=mask)
    tl.store(address_of(place_ptr, row, column, COLUMNS), place.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["users", "steps"])
def _max_pieces_kernel(
    x_ptr, offsets_ptr, top_ptr, place_ptr, tops_ptr, places_ptr, users, steps,
    X_STRIDE: tl.constexpr, COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    PIECE: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, PIECES * LANES)
    first_slot = tl.program_id(0) // BLOCKS * PIECES
    slot, user, first, length, begin, end = load_pieces(
        offsets_ptr, first_slot, row, users, steps, PIECE, LANES, PIECES
    )
    lane = begin + row % LANES
    top = tl.full([PIECES * LANES, BLOCK], float("-inf"), tl.float32)
    place = tl.full([PIECES * LANES, BLOCK], _NOWHERE, tl.int32)
    for done in range(0, tl.max(end - begin), LANES):
        token = lane + done
        inside = (token < end)[:, None] & (column < COLUMNS)[None, :]
        x = tl.load(address_of(x_ptr, token, column, X_STRIDE), mask=inside, other=0.0)
        top, place = _larger(top, place, x.to(tl.float32), (token - first)[:, None], inside)
    top = tl.reshape(top, [PIECES, LANES, BLOCK])
    top, place = _largest(top, tl.reshape(place, [PIECES, LANES, BLOCK]), 1)

    slot = of_pieces(slot, PIECES, LANES)
    user = of_pieces(user, PIECES, LANES)
    length = of_pieces(length, PIECES, LANES)
    begins = of_pieces((begin == first).to(tl.int32), PIECES, LANES) > 0
    there = of_pieces(end - begin, PIECES, LANES) > 0
    has_column = (column < COLUMNS)[None, :]
    cut = (there & (length > PIECE))[:, None] & has_column
    tl.store(address_of(tops_ptr, slot, column, COLUMNS), top, mask=cut)
    tl.store(address_of(places_ptr, slot, column, COLUMNS), place, mask=cut)
    whole = (begins & (length <= PIECE))[:, None] & has_column
    _store_max(top_ptr, place_ptr, top, place, user, column, whole, COLUMNS)


@triton.jit
def _merge_max_kernel(
    tops_ptr, places_ptr, offsets_ptr, top_ptr, place_ptr,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    PIECE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(0) // BLOCKS
    length, slot, pieces = load_cut_user(offsets_ptr, user, PIECE)
    if length <= PIECE:
        return
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    top = tl.full([LANES, BLOCK], float("-inf"), tl.float32)
    place = tl.full([LANES, BLOCK], _NOWHERE, tl.int32)
    for done in range(0, pieces, LANES):
        inside = (lane + done < pieces)[:, None] & (column < COLUMNS)[None, :]
        row = slot + lane + done
        tops = tl.load(address_of(tops_ptr, row, column, COLUMNS), mask=inside, other=0.0)
        places = tl.load(address_of(places_ptr, row, column, COLUMNS), mask=inside, other=0)
        top, place = _larger(top, place, tops, places, inside)
    top, place = _largest(top, place, 0)
    row = user + tl.zeros([1], tl.int32)
    has_column = (column < COLUMNS)[None, :]
    _store_max(
        top_ptr, place_ptr, top[None, :], place[None, :], row, column, has_column, COLUMNS
    )  # fmt: skip
