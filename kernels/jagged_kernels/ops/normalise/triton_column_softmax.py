"""Softmax along the columns of each user's square matrix, forward and backward.

A program takes strips of columns, with all of their rows; threads beside each other have columns
beside each other. Up to a number of rows, a strip is read once and kept in registers; up to another
one, it is read twice, the second time from cache. Of longer columns, the first launch leaves the
state of each piece (largest and sum of exponentials; in the backward the sum of y * dy). In the
second the program of a piece merges all states of its columns and writes the piece.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.device.arithmetic import LOG2_E
from jagged_kernels.device.search import (
    first_tile,
    search_steps,
    tile_count,
    user_of_slot,
    user_of_tile,
)
from jagged_kernels.device.squares import fits_best, load_square, size_again
from jagged_kernels.ops.normalise.triton_softmax import LOWEST, merge_softmax


class ColumnConfig(NamedTuple):
    held: int  # rows up to which a strip is kept in registers; a power of two
    elements: int  # of a tile
    num_warps: int
    maxnreg: int


# A row of a strip that is kept has elements / held numbers or more: 32 bytes, a sector, or twice
# that. The backward, which holds y and dy, has more warps for it.
FORWARD_CONFIG = ColumnConfig(512, 16384, 8, 128)
BACKWARD_CONFIG = ColumnConfig(1024, 16384, 16, 128)
MERGED_CONFIG = ColumnConfig(0, 8192, 4, 128)
# Columns of a strip that is not kept, and rows of a piece.
WIDTH, PIECE = 64, 2048
# Of a user's matrix for each program. Longer columns are few: their second launch takes larger
# parts, for most of its programs find none; but not above PIECE ** 2, of which each user has one.
SCORES, MERGED_SCORES = 1 << 15, 1 << 17
# Pieces whose states are merged at once.
_STATES = 16

_LOG2_E = tl.constexpr(LOG2_E)


def launch_column_softmax(
    x: Tensor, d_y: Tensor | None, out: Tensor, offsets: Tensor, matrix_offsets: Tensor
) -> None:
    """All contiguous; x, d_y and out [sum of n ** 2], not empty. With `d_y`, x is y."""
    total, users = out.shape[0], offsets.shape[0] - 1
    config = FORWARD_CONFIG if d_y is None else BACKWARD_CONFIG
    some_cut = total > PIECE**2
    # Of a piece the sums, then what is largest: at most 2 * n ** 2 / PIECE of each for a user.
    states = torch.empty(
        2 * (2 * total // PIECE) if some_cut else 0, dtype=torch.float32, device=x.device
    )
    arguments = (x, d_y, out, offsets, matrix_offsets, states, users, search_steps(users))
    backward = {"BACKWARD": d_y is not None}
    launch(
        _columns_kernel, tile_count(total, users, SCORES), arguments,
        {
            **backward, "HELD": config.held, "ELEMENTS": config.elements, "WIDTH": WIDTH,
            "PIECE": PIECE, "SCORES": SCORES,
        },
        num_warps=config.num_warps, maxnreg=config.maxnreg,
    )  # fmt: skip
    if some_cut:
        launch(
            _merged_kernel, total // MERGED_SCORES, arguments,
            {
                **backward, "ELEMENTS": MERGED_CONFIG.elements, "WIDTH": WIDTH, "PIECE": PIECE,
                "SCORES": MERGED_SCORES, "STATES": _STATES,
            },
            num_warps=MERGED_CONFIG.num_warps, maxnreg=MERGED_CONFIG.maxnreg,
        )  # fmt: skip


@triton.jit(do_not_specialize=["users", "steps"])
def _columns_kernel(
    x_ptr, d_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, states_ptr, users, steps,
    BACKWARD: tl.constexpr, HELD: tl.constexpr, ELEMENTS: tl.constexpr, WIDTH: tl.constexpr,
    PIECE: tl.constexpr, SCORES: tl.constexpr,
):  # fmt: skip
    # Tiles of SCORES, of scores in place of tokens.
    part = tl.program_id(0)
    user = user_of_tile(matrix_offsets_ptr, users, steps, part, SCORES)
    begin = first_tile(matrix_offsets_ptr, user, SCORES)
    parts = first_tile(matrix_offsets_ptr, user + 1, SCORES) - begin
    part -= begin
    _, size, matrix = load_square(offsets_ptr, matrix_offsets_ptr, user)
    x_ptr += matrix
    out_ptr += matrix
    if BACKWARD:
        d_ptr += matrix
    # Programs of a user take neighbouring strips, whose sectors they share, at about one time.
    for halvings in tl.static_range(5):
        if fits_best(size, HELD, halvings, 4):
            _held_strips(
                x_ptr, d_ptr, out_ptr, offsets_ptr + user, part, parts, size,
                BACKWARD, HELD >> halvings, min(ELEMENTS // (HELD >> halvings), HELD >> halvings),
            )  # fmt: skip
    if size > HELD:
        HEIGHT: tl.constexpr = ELEMENTS // WIDTH
        strips = tl.cdiv(size, WIDTH)
        for item in range(part, strips * tl.cdiv(size, PIECE), parts):
            piece = item // strips
            column, count, before = _piece_of_strip(item % strips, piece, size, PIECE, WIDTH)
            d_piece = d_ptr + before if BACKWARD else None
            top, total = _strip_state(
                x_ptr + before, d_piece, offsets_ptr + user, column, count, size,
                BACKWARD, HEIGHT, WIDTH,
            )  # fmt: skip
            if size > PIECE:
                state = states_ptr + _state_places(matrix, piece, size, column, PIECE)
                tl.store(state, total, mask=column[None, :] < size)
                if not BACKWARD:
                    tl.store(state + size, top, mask=column[None, :] < size)
            else:
                _write_strip(
                    x_ptr, d_piece, out_ptr, offsets_ptr + user, top, total, column, count, size,
                    BACKWARD, HEIGHT, WIDTH,
                )  # fmt: skip


@triton.jit(do_not_specialize=["users", "steps"])
def _merged_kernel(
    x_ptr, d_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, states_ptr, users, steps,
    BACKWARD: tl.constexpr, ELEMENTS: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr,
    SCORES: tl.constexpr, STATES: tl.constexpr,
):  # fmt: skip
    """Pieces of columns longer than PIECE, from the states of `_columns_kernel`."""
    part = tl.program_id(0)
    user = user_of_slot(matrix_offsets_ptr, users, steps, part, SCORES)
    _, size, matrix = load_square(offsets_ptr, matrix_offsets_ptr, user)
    if size > PIECE:
        begin = (matrix // SCORES).to(tl.int32)
        parts = (tl.load(matrix_offsets_ptr + user + 1) // SCORES).to(tl.int32) - begin
        strips = tl.cdiv(size, WIDTH)
        pieces = tl.cdiv(size, PIECE)
        for item in range(part - begin, strips * pieces, parts):
            column, count, before = _piece_of_strip(
                item % strips, item // strips, size, PIECE, WIDTH
            )
            top = tl.full([1, WIDTH], LOWEST, tl.float32)
            total = tl.zeros([1, WIDTH], tl.float32)
            for done in range(0, pieces, STATES):
                piece = done + tl.arange(0, STATES)[:, None]
                state = states_ptr + _state_places(matrix, piece, size, column, PIECE)
                inside = (piece < pieces) & (column[None, :] < size)
                totals = tl.load(state, mask=inside, other=0.0)
                if BACKWARD:
                    total += tl.sum(totals, 0, keep_dims=True)
                else:
                    tops = tl.load(state + size, mask=inside, other=LOWEST)
                    tops, totals = merge_softmax(tops, totals, 0)
                    larger = tl.maximum(top, tops)
                    total = total * tl.exp2((top - larger) * _LOG2_E)
                    total += totals * tl.exp2((tops - larger) * _LOG2_E)
                    top = larger
            _write_strip(
                x_ptr + (matrix + before), d_ptr + (matrix + before) if BACKWARD else None,
                out_ptr + (matrix + before), offsets_ptr + user, top, total, column, count, size,
                BACKWARD, ELEMENTS // WIDTH, WIDTH,
            )  # fmt: skip


@triton.jit
def _piece_of_strip(strip, piece, size, PIECE: tl.constexpr, WIDTH: tl.constexpr):
    """(columns [WIDTH], number of rows, numbers of the matrix before its first row)."""
    first = piece * PIECE
    column = strip * WIDTH + tl.arange(0, WIDTH)
    # int64: a large user's n ** 2 passes 2^31.
    return column, tl.minimum(size - first, PIECE), first.to(tl.int64) * size


@triton.jit
def _state_places(matrix, piece, size, column, PIECE: tl.constexpr):
    """Where the sums of a piece, or of pieces [.., 1], and of columns are; what is largest is
    `size` behind. Only of users with more than PIECE tokens: for these, ceil(n / PIECE) * n is at
    most 2 * n ** 2 / PIECE - 1."""
    return 2 * (2 * matrix // PIECE) + piece.to(tl.int64) * (2 * size) + column[None, :]


@triton.jit
def _strip(column, left, size, HEIGHT: tl.constexpr):
    """(offsets [HEIGHT, WIDTH] of the next rows, which of `left` rows and of the columns exist)."""
    row = tl.arange(0, HEIGHT)[:, None]
    return row * size + column[None, :], row < tl.where(column < size, left, 0)[None, :]


@triton.jit
def _held_strips(
    x_ptr, d_ptr, out_ptr, offsets_ptr, part, parts, size,
    BACKWARD: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Every parts-th strip from number `part` on, of a user of at most HEIGHT tokens."""
    for first in range(part * WIDTH, size, parts * WIDTH):
        column = first + tl.arange(0, WIDTH)
        place, inside = _strip(column, size, size, HEIGHT)
        x = tl.load(x_ptr + place, mask=inside, other=0.0 if BACKWARD else float("-inf"))
        x = x.to(tl.float32)
        if BACKWARD:
            d_y = tl.load(d_ptr + place, mask=inside, other=0.0).to(tl.float32)
        size = size_again(offsets_ptr)
        if BACKWARD:
            result = x * (d_y - tl.sum(x * d_y, 0, keep_dims=True))
        else:
            top = tl.maximum(tl.max(x, 0, keep_dims=True), LOWEST)
            weight = tl.exp2((x - top) * _LOG2_E)
            result = weight * (1.0 / tl.sum(weight, 0, keep_dims=True))
        place, inside = _strip(column, size, size, HEIGHT)
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _strip_state(
    x_ptr, d_ptr, offsets_ptr, column, count, size,
    BACKWARD: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """(largest, sum of exponentials), or (nothing, sum of y * dy), [1, WIDTH], of `count` rows."""
    top = tl.full([1, WIDTH], LOWEST, tl.float32)
    total = tl.zeros([1, WIDTH], tl.float32)
    for done in range(0, count, HEIGHT):
        place, inside = _strip(column, count - done, size, HEIGHT)
        x = tl.load(x_ptr + place, mask=inside, other=0.0 if BACKWARD else float("-inf"))
        x = x.to(tl.float32)
        x_ptr += HEIGHT * size
        if BACKWARD:
            d_y = tl.load(d_ptr + place, mask=inside, other=0.0).to(tl.float32)
            d_ptr += HEIGHT * size
            total += tl.sum(x * d_y, 0, keep_dims=True)
        else:
            larger = tl.maximum(top, tl.max(x, 0, keep_dims=True))
            total *= tl.exp2((top - larger) * _LOG2_E)
            total += tl.sum(tl.exp2((x - larger) * _LOG2_E), 0, keep_dims=True)
            top = larger
        size = size_again(offsets_ptr)
    return top, total


@triton.jit
def _write_strip(
    x_ptr, d_ptr, out_ptr, offsets_ptr, top, total, column, count, size,
    BACKWARD: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    if not BACKWARD:
        total = 1.0 / total
    for done in range(0, count, HEIGHT):
        place, inside = _strip(column, count - done, size, HEIGHT)
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x_ptr += HEIGHT * size
        if BACKWARD:
            d_y = tl.load(d_ptr + place, mask=inside, other=0.0).to(tl.float32)
            d_ptr += HEIGHT * size
            result = x * (d_y - total)
        else:
            result = tl.exp2((x - top) * _LOG2_E) * total
        size = size_again(offsets_ptr)
        place, inside = _strip(column, count - done, size, HEIGHT)
        tl.store(out_ptr + place, result.to(out_ptr.dtype.element_ty), mask=inside)
        out_ptr += HEIGHT * size
