"""Reductions over each user's tokens: the pieces that programs take, and sums over them.

A user's tokens are cut into pieces of a fixed number, counted from the user's first token. A
program takes a few pieces, of short users or of long ones alike, and finds them by a binary search
in the offsets: no schedule. A user of one piece is finished at once; of a longer one each piece
leaves a partial result, and a second launch merges them in order. Pieces begin where the user
does: a result does not depend, to the bit, on where in a batch its user lies.
"""

# Triton's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.triton_blocks import rows_of_dims
from jagged_kernels.interaction.triton_tiles import first_tile, search_steps, user_of_tile
from jagged_kernels.launch import cdiv, launch

# Partial results of one user that the merge reads at a time.
MERGE_LANES = 64
# Of a piece, elements side by side and how often at most; pieces a program, at least.
ELEMENTS, STEPS, PIECES = 1024, 16, 2


class PieceShape(NamedTuple):
    """How a reduction of [T, C] is cut."""

    block: int  # columns a program
    lanes: int  # tokens of a piece that are added side by side
    pieces: int  # pieces a program
    piece: int  # tokens a piece


def power_of_two(size: int) -> int:
    """The least one that is not below `size`."""
    return 1 << (size - 1).bit_length()


def piece_shape(columns: int) -> PieceShape:
    """Depends on the width alone: the order of a user's sum must not change with the batch."""
    block = min(power_of_two(columns), 64)
    lanes = min(ELEMENTS // block, 64)
    pieces = max(ELEMENTS // (lanes * block), PIECES)
    return PieceShape(block, lanes, pieces, STEPS * lanes)


def piece_slots(tokens: int, users: int, shape: PieceShape) -> int:
    """Slots for pieces: user b has those from offsets[b] // piece + b on."""
    return tokens // shape.piece + users


@triton.jit
def load_pieces(
    offsets_ptr, first_slot, row, users, steps,
    PIECE: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """(slot, user, first token of the user, number of them, begin and end of the piece) of each
    row; LANES rows have a slot, the first `first_slot`. `steps` from `search_steps`.

    A slot without a piece has begin >= end; an empty user has one such slot.
    """
    slot = first_slot + row // LANES
    # Every user has a slot at least: a few more than the first one's can follow.
    base = user_of_tile(offsets_ptr, users, steps, first_slot, PIECE)
    user = row * 0 + base
    for step in tl.static_range(1, PIECES):
        later = tl.minimum(base + step, users - 1)
        starts = first_tile(offsets_ptr, later, PIECE) <= slot
        user += (starts & (base + step < users)).to(tl.int32)
    first = tl.load(offsets_ptr + user).to(tl.int32)
    end = tl.load(offsets_ptr + user + 1).to(tl.int32)
    begin = first + (slot - first // PIECE - user) * PIECE
    return slot, user, first, end - first, begin, tl.minimum(end, begin + PIECE)


@triton.jit
def load_cut_user(offsets_ptr, user, PIECE: tl.constexpr):
    """(number of tokens, first slot, number of pieces) of a user."""
    first = tl.load(offsets_ptr + user).to(tl.int32)
    length = tl.load(offsets_ptr + user + 1).to(tl.int32) - first
    return length, first // PIECE + user, (length + PIECE - 1) // PIECE


@triton.jit
def of_pieces(rows, PIECES: tl.constexpr, LANES: tl.constexpr):
    """[PIECES * LANES] that agree inside a piece -> [PIECES]."""
    return tl.max(tl.reshape(rows, [PIECES, LANES]), 1)


@triton.jit
def address_of(ptr, row, column, STRIDE: tl.constexpr):
    """[rows, columns] addresses; int64, for tokens x columns passes 2^31 in large batches."""
    return ptr + row.to(tl.int64)[:, None] * STRIDE + column[None, :]


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
    shape = piece_shape(columns)
    slots = piece_slots(x.shape[0], users, shape)
    # A user can be longer than a piece only if all users together are.
    cut = x.shape[0] > shape.piece
    partials = torch.empty(
        (slots if cut else 0, heads, columns), dtype=torch.float32, device=x.device
    )
    column_blocks = cdiv(columns, shape.block)
    common = {
        "MEAN": mean, "COLUMNS": columns, "HEADS": heads,
        "BLOCKS": column_blocks, "BLOCK": shape.block, "PIECE": shape.piece,
    }  # fmt: skip
    launch(
        _sum_pieces_kernel, cdiv(slots, shape.pieces) * heads * column_blocks,
        (x, other, offsets, out, partials, users, search_steps(users)),
        {
            **common, "WEIGHTS": weights is not None, "TIMES": times is not None,
            "X_STRIDE": x.stride(0), "OTHER_STRIDE": 0 if other is None else other.stride(0),
            "LANES": shape.lanes, "PIECES": shape.pieces,
        },
        num_warps=4,
    )  # fmt: skip
    if cut:
        launch(
            _merge_sums_kernel, users * heads * column_blocks, (partials, offsets, out),
            {**common, "LANES": MERGE_LANES}, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["users", "steps"])
def _sum_pieces_kernel(
    x_ptr, other_ptr, offsets_ptr, out_ptr, partial_ptr, users, steps,
    MEAN: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
    WEIGHTS: tl.constexpr, TIMES: tl.constexpr, X_STRIDE: tl.constexpr,
    OTHER_STRIDE: tl.constexpr, LANES: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0) // BLOCKS % HEADS
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    row = tl.arange(0, PIECES * LANES)
    first_slot = tl.program_id(0) // (BLOCKS * HEADS) * PIECES
    slot, user, first, length, begin, end = load_pieces(
        offsets_ptr, first_slot, row, users, steps, PIECE, LANES, PIECES
    )
    lane = begin + row % LANES
    acc = tl.zeros([PIECES * LANES, BLOCK], tl.float32)
    for done in range(0, tl.max(end - begin), LANES):
        token = lane + done
        inside = (token < end)[:, None] & (column < COLUMNS)[None, :]
        x = tl.load(address_of(x_ptr, token, column, X_STRIDE), mask=inside, other=0.0)
        x = x.to(tl.float32)
        if WEIGHTS:
            address = other_ptr + token.to(tl.int64) * OTHER_STRIDE + head
            x *= tl.load(address, mask=token < end, other=0.0).to(tl.float32)[:, None]
        if TIMES:
            address = address_of(other_ptr, token, column, OTHER_STRIDE)
            x *= tl.load(address, mask=inside, other=0.0).to(tl.float32)
        acc += x
    acc = tl.sum(tl.reshape(acc, [PIECES, LANES, BLOCK]), 1)

    slot = of_pieces(slot, PIECES, LANES)
    user = of_pieces(user, PIECES, LANES)
    length = of_pieces(length, PIECES, LANES)
    begins = of_pieces((begin == first).to(tl.int32), PIECES, LANES) > 0
    there = of_pieces(end - begin, PIECES, LANES) > 0
    whole = begins & (length <= PIECE)
    address = address_of(partial_ptr, slot * HEADS + head, column, COLUMNS)
    cut = there & (length > PIECE)
    tl.store(address, acc, mask=cut[:, None] & (column < COLUMNS)[None, :])
    if MEAN:
        acc /= tl.maximum(length, 1).to(tl.float32)[:, None]
    address = address_of(out_ptr, user * HEADS + head, column, COLUMNS)
    inside = whole[:, None] & (column < COLUMNS)[None, :]
    tl.store(address, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _merge_sums_kernel(
    partial_ptr, offsets_ptr, out_ptr,
    MEAN: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    user = tl.program_id(0) // (BLOCKS * HEADS)
    length, slot, pieces = load_cut_user(offsets_ptr, user, PIECE)
    if length <= PIECE:
        return
    head = tl.program_id(0) // BLOCKS % HEADS
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    lane = tl.arange(0, LANES)
    acc = tl.zeros([LANES, BLOCK], tl.float32)
    for done in range(0, pieces, LANES):
        inside = (lane + done < pieces)[:, None] & (column < COLUMNS)[None, :]
        row = (slot + lane + done) * HEADS + head
        acc += tl.load(address_of(partial_ptr, row, column, COLUMNS), mask=inside, other=0.0)
    total = tl.sum(acc, 0)
    if MEAN:
        total /= length.to(tl.float32)
    address = out_ptr + (user.to(tl.int64) * HEADS + head) * COLUMNS + column
    tl.store(address, total.to(out_ptr.dtype.element_ty), mask=column < COLUMNS)
