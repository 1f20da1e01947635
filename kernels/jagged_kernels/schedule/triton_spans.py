"""The spans of "stream" partitions in two launches: prefix sums of row costs, then the cuts.

1. Chunks of rows write the sums of costs up to each of their rows, and their total.
2. Each span finds the chunk and then the row of its cut and of the next one. How many spans share
   a row follows from its costs alone.

One or two partitions of the same rows (`side`: forward, backward) are made by the same launches.
`spans.reference_stream_spans` is the specification, equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.schedule.row_access import load_row
from jagged_kernels.schedule.span_layout import SPAN_WIDTH
from jagged_kernels.schedule.triton_rows import count_up_to

_SPAN_WIDTH = tl.constexpr(SPAN_WIDTH)
# At most this many chunks, so that one program reads all their totals at once.
_CHUNKS = tl.constexpr(128)
# Rows that a chunk takes at a time, and spans of a program of the second launch.
_ROWS = tl.constexpr(1024)
_SPANS = tl.constexpr(16)

# Sizes vary from batch to batch and must not compile anything again.
_SIZES = [
    "row_count", "steps", "chunks", "depth", "block", "block_t", "programs", "programs_t",
    "row_cost",
]  # fmt: skip


def launch_stream_spans(
    rows: Tensor, blocks: Sequence[int], programs: Sequence[int], row_cost: int
) -> Tensor:
    """[sum of P + 1, 4] int32, as `spans.stream_spans` describes it."""
    row_count, sides = rows.shape[0], len(blocks)
    shape = (sum(programs) + sides, SPAN_WIDTH)
    if row_count == 0:
        return rows.new_zeros(shape)
    spans = torch.empty(shape, dtype=torch.int32, device=rows.device)
    steps = -(-row_count // (_ROWS.value * _CHUNKS.value))
    chunk = _ROWS.value * steps
    chunks = -(-row_count // chunk)
    cost_up_to = torch.empty((sides, row_count), dtype=torch.int64, device=rows.device)
    totals = torch.empty((sides, 2, chunks), dtype=torch.int64, device=rows.device)
    launch(
        _cost_kernel,
        (chunks, sides),
        (rows, cost_up_to, totals, row_count, steps, chunks, blocks[0], blocks[-1], row_cost),
        {},
        num_warps=8,
    )
    sizes = (row_count, steps, chunks, chunk.bit_length(), programs[0], programs[-1], row_cost)
    launch(
        _cut_kernel,
        (max(programs) // _SPANS.value + 1, sides),
        (cost_up_to, totals, spans, *sizes),
        {},
        num_warps=4,
    )
    return spans


@triton.jit(do_not_specialize=_SIZES)
def _cost_kernel(
    rows_ptr, cost_up_to_ptr, totals_ptr, row_count, steps, chunks, block, block_t, row_cost
):  # fmt: skip
    """cost_up_to [sides, R]: inside of its chunk; totals [sides, 2, chunks]: cost, used rows."""
    chunk, side = tl.program_id(0), tl.program_id(1)
    block = tl.where(side == 0, block, block_t)
    cost_up_to_ptr += side.to(tl.int64) * row_count
    total, used_rows = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for step in range(steps):
        row = (chunk * steps + step) * _ROWS + tl.arange(0, _ROWS)
        # Rows beyond the last read the first one.
        there = row < row_count
        start, end, range_start, range_end, _ = load_row(rows_ptr, tl.where(there, row, 0))
        used = there & (start < end)
        cost = tl.where(used, tl.cdiv(range_end - range_start, block) + row_cost, 0).to(tl.int64)
        tl.store(cost_up_to_ptr + row, total + tl.cumsum(cost, 0), mask=there)
        total += tl.sum(cost, 0)
        used_rows += tl.sum(used.to(tl.int64), 0)
    totals_ptr += 2 * side * chunks + chunk
    tl.store(totals_ptr, total)
    tl.store(totals_ptr + chunks, used_rows)


@triton.jit(do_not_specialize=_SIZES)
def _cut_kernel(
    cost_up_to_ptr, totals_ptr, spans_ptr, row_count, steps, chunks, depth, programs, programs_t,
    row_cost,
):  # fmt: skip
    side = tl.program_id(1)
    spans_ptr += side * (programs + 1) * _SPAN_WIDTH
    programs = tl.where(side == 0, programs, programs_t)
    cost_up_to_ptr += side.to(tl.int64) * row_count
    totals_ptr += 2 * side * chunks
    chunk = tl.arange(0, _CHUNKS)
    in_chunk = tl.load(totals_ptr + chunk, mask=chunk < chunks, other=0)
    total = tl.sum(in_chunk, 0)
    used_rows = tl.sum(tl.load(totals_ptr + chunks + chunk, mask=chunk < chunks, other=0), 0)
    working = tl.minimum(tl.maximum(total // (row_cost + 1), 1), programs)

    # The start of each span beside that of the next, found together.
    span = tl.program_id(0) * _SPANS + tl.arange(0, _SPANS)
    place = tl.program_id(0) * _SPANS + tl.arange(0, 2 * _SPANS) // 2 + tl.arange(0, 2 * _SPANS) % 2
    cut = tl.minimum(place.to(tl.int64) * total // working, total)
    # A cut at the end stands at the first unused row; its search, in no chunk, is not used.
    at_end = cut == total
    before = tl.cumsum(in_chunk, 0)[None, :] <= cut[:, None]
    cost_before = tl.sum(tl.where(before, in_chunk[None, :], 0), 1)
    chunk_rows = steps * _ROWS
    low = tl.sum((before & (chunk < chunks)[None, :]).to(tl.int32), 1) * chunk_rows
    low = tl.minimum(low, row_count)
    high = tl.minimum(low + chunk_rows, row_count)
    row = count_up_to(cost_up_to_ptr, low, high, cut - cost_before, depth)
    up_to_row = tl.load(cost_up_to_ptr + row - 1, mask=row > low, other=0)
    with_row = cost_before + tl.load(cost_up_to_ptr + row, mask=row < high, other=0)
    first = tl.maximum(cut - cost_before - up_to_row - row_cost, 0)
    row = tl.where(at_end, used_rows, row)
    first = tl.where(at_end, 0, first)

    row, next_row = tl.split(tl.reshape(row, [_SPANS, 2]))
    first, next_first = tl.split(tl.reshape(first, [_SPANS, 2]))
    _, with_next_row = tl.split(tl.reshape(with_row, [_SPANS, 2]))
    goes_on = (row == next_row) & (first > 0)
    # Spans from the first whose cut is beyond the row do not share it: s * total / working >= cost.
    beyond = (with_next_row * working + total - 1) // tl.maximum(total, 1)
    pieces = tl.where((next_first > 0) & ~goes_on, beyond - span, 0)

    address = spans_ptr + span * _SPAN_WIDTH
    there = span <= programs
    tl.store(address, row.to(tl.int32), mask=there)
    tl.store(address + 1, first.to(tl.int32), mask=there)
    tl.store(address + 2, pieces.to(tl.int32), mask=there)
    tl.store(address + 3, tl.zeros_like(span), mask=there)
