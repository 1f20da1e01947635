"""The second launch: partial results of rows that were cut, put together in their order.

One program takes a few queries of one row and one group of heads, and reads many pieces at a
time: a long history alone in its batch is shared by dozens of programs. Spans that begin no cut
row have nothing to do.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.blocks import finite, lse2_of, weighted_mean
from jagged_kernels.attention.split.blocks import slot_of
from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import padded_dim
from jagged_kernels.schedule.row_access import load_row
from jagged_kernels.schedule.span_layout import SPAN_WIDTH
from jagged_kernels.schedule.spans import Partition, pack_size

_SPAN_WIDTH = tl.constexpr(SPAN_WIDTH)
# Programs for the queries of one row, and the numbers that one of them reads at a time.
_PARTS = 16
_NUMBERS = 4096


def merge_states(
    states: Tensor, o: Tensor, lse2: Tensor | None, rows: Tensor, partition: Partition,
    *, members: int, tile: int, scale_log2: float,
) -> None:  # fmt: skip
    """o and lse2 of the rows that were cut, from the pieces' online softmax states.

    Args:
        states: [P, 2, G, PACK * (Dv + 2)] float32: in each slot o [PACK, Dv], not divided by
            the totals, then the largest scores [PACK], then the totals [PACK] of exponentials.
        o, lse2: [Tq, H, Dv] and [Tq, H] or None; written where a row was cut.
    """
    heads, dim = o.shape[1:]
    shape, of_span = _merge_shape(heads, dim, members, tile)
    arguments = (states, o, lse2, rows, partition.spans, scale_log2)
    programs = (partition.programs - 1) * of_span
    launch(_merge_states_kernel, programs, arguments, shape, num_warps=4)


def merge_sums(
    partials: Tensor, out: Tensor, rows: Tensor, partition: Partition,
    *, members: int, tile: int, scale: float,
) -> None:  # fmt: skip
    """out [Tq, H, D] = scale * the sum of a row's partials [P, 2, G, PACK, D], where it was cut."""
    heads, dim = out.shape[1:]
    shape, of_span = _merge_shape(heads, dim, members, tile)
    arguments = (partials, out, rows, partition.spans, scale)
    # The last span begins no row that another one ends.
    programs = (partition.programs - 1) * of_span
    launch(_merge_sums_kernel, programs, arguments, shape, num_warps=4)


@lru_cache
def _merge_shape(heads: int, dim: int, members: int, tile: int) -> tuple[dict[str, int], int]:
    """Constants of both kernels, and how many programs they have for each span."""
    pack, pad = pack_size(members, tile), padded_dim(dim)
    queries = max(pack // _PARTS, 1)
    shape = {
        "HEADS": heads,
        "MEMBERS": members,
        "D": dim,
        "PAD_D": pad,
        "TILE": tile,
        "PACK": pack,
        "QUERIES": queries,
        "PIECES": max(_NUMBERS // (queries * pad), 2),
    }
    return shape, heads // members * (pack // queries)


@triton.jit
def _merge_states_kernel(
    states_ptr, o_ptr, lse2_ptr, rows_ptr, spans_ptr, scale_log2,
    HEADS: tl.constexpr, MEMBERS: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr,
    TILE: tl.constexpr, PACK: tl.constexpr, QUERIES: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = HEADS // MEMBERS
    PARTS: tl.constexpr = PACK // QUERIES
    STATE: tl.constexpr = PACK * (D + 2)
    span = tl.program_id(0) // (GROUPS * PARTS)
    pieces = tl.load(spans_ptr + span * _SPAN_WIDTH + 2)
    if pieces == 0:
        return
    group = (tl.program_id(0) // PARTS % GROUPS).to(tl.int64)
    index = tl.program_id(0) % PARTS * QUERIES + tl.arange(0, QUERIES)
    token, head, inside = _queries(rows_ptr, spans_ptr, span, group, index, MEMBERS, TILE)

    top = tl.full([QUERIES], float("-inf"), tl.float32)
    for first in range(0, pieces, PIECES):
        slot, there = _slots(span, first, pieces, group, GROUPS, PIECES)
        address = slot[:, None] * STATE + (PACK * D + index)[None, :]
        mask = there[:, None] & inside[None, :]
        tops = tl.load(states_ptr + address, mask=mask, other=float("-inf"))
        top = tl.maximum(top, tl.max(tops, 0))
    finite_top = finite(top)

    dim = tl.arange(0, PAD_D)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, PAD_D], tl.float32)
    for first in range(0, pieces, PIECES):
        slot, there = _slots(span, first, pieces, group, GROUPS, PIECES)
        address = slot[:, None] * STATE + (PACK * D + index)[None, :]
        mask = there[:, None] & inside[None, :]
        tops = tl.load(states_ptr + address, mask=mask, other=float("-inf"))
        totals = tl.load(states_ptr + address + PACK, mask=mask, other=0.0)
        address = (slot[:, None] * STATE + (index * D)[None, :])[:, :, None] + dim[None, None, :]
        partials = tl.load(
            states_ptr + address, mask=mask[:, :, None] & (dim[None, None, :] < D), other=0.0
        )
        weights = tl.exp2((tops - finite_top[None, :]) * scale_log2)
        total += tl.sum(weights * totals, 0)
        acc += tl.sum(weights[:, :, None] * partials, 0)

    if lse2_ptr is not None:
        lse2 = lse2_of(top * scale_log2, total)
        tl.store(lse2_ptr + token * HEADS + head, lse2, mask=inside)
    _store_rows(o_ptr, weighted_mean(acc, total), token, head, inside, HEADS, D, PAD_D)


@triton.jit
def _merge_sums_kernel(
    partial_ptr, out_ptr, rows_ptr, spans_ptr, scale,
    HEADS: tl.constexpr, MEMBERS: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr,
    TILE: tl.constexpr, PACK: tl.constexpr, QUERIES: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = HEADS // MEMBERS
    PARTS: tl.constexpr = PACK // QUERIES
    span = tl.program_id(0) // (GROUPS * PARTS)
    pieces = tl.load(spans_ptr + span * _SPAN_WIDTH + 2)
    if pieces == 0:
        return
    group = (tl.program_id(0) // PARTS % GROUPS).to(tl.int64)
    index = tl.program_id(0) % PARTS * QUERIES + tl.arange(0, QUERIES)
    token, head, inside = _queries(rows_ptr, spans_ptr, span, group, index, MEMBERS, TILE)
    dim = tl.arange(0, PAD_D)
    acc = tl.zeros([QUERIES, PAD_D], tl.float32)
    for first in range(0, pieces, PIECES):
        slot, there = _slots(span, first, pieces, group, GROUPS, PIECES)
        address = slot[:, None] * PACK + index[None, :]
        mask = there[:, None] & inside[None, :]
        partials = tl.load(
            partial_ptr + address[:, :, None] * D + dim[None, None, :],
            mask=mask[:, :, None] & (dim[None, None, :] < D),
            other=0.0,
        )
        acc += tl.sum(partials, 0)
    _store_rows(out_ptr, acc * scale, token, head, inside, HEADS, D, PAD_D)


@triton.jit
def _queries(
    rows_ptr, spans_ptr, span, group, index, MEMBERS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """(token, head, is it one) of some places in the tile of the row that the span begins last."""
    row = tl.load(spans_ptr + (span + 1) * _SPAN_WIDTH)
    q_start, q_end, _, _, _ = load_row(rows_ptr, row)
    token, member = q_start + index % TILE, index // TILE
    inside = (token < q_end) & (member < MEMBERS)
    return token.to(tl.int64), group * MEMBERS + member, inside


@triton.jit
def _slots(span, first, pieces, group, GROUPS: tl.constexpr, PIECES: tl.constexpr):
    """[PIECES] slots of the pieces from `first` on, and whether there is such a piece."""
    piece = first + tl.arange(0, PIECES)
    slot = slot_of(span + piece, (piece == 0).to(tl.int32), group, GROUPS)
    return slot, piece < pieces


@triton.jit
def _store_rows(
    ptr, rows, token, head, inside, HEADS: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr
):  # fmt: skip
    dim = tl.arange(0, PAD_D)[None, :]
    address = (token * HEADS + head)[:, None] * D + dim
    tl.store(ptr + address, rows.to(ptr.dtype.element_ty), mask=inside[:, None] & (dim < D))
