"""Sums of rows that share a key, however many they are: equal shares, and then their ends.

Sorted rows are cut into spans of equal length. A lane of a program walks a span: what begins and
ends inside it is a finished sum, the first and the last are partial. The partial ones are again
sorted rows, fewer by the length of half a span, and go the same way until one span is left. The
order of additions depends on nothing but the keys.
"""

# Triton's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.interaction.triton_rows import as_rows, row_addresses

_SPAN = 32
# Elements of a step of a program: four steps are in flight at once.
_STEP_ELEMENTS = 2048
_MAX_COLUMNS = 256


def launch_sum_sorted_rows(rows: Tensor, order: Tensor, keys: Tensor, size: int) -> Tensor:
    """What `row_sums.sum_sorted_rows` says."""
    sums = rows.new_zeros((size, rows.shape[1]))
    if rows.numel() == 0 or size == 0:
        return sums
    source, count, width = as_rows(rows), keys.shape[0], rows.shape[1]
    columns = min(triton.next_power_of_2(width), _MAX_COLUMNS)
    lanes = min(max(_STEP_ELEMENTS // columns, 4), 128)
    with torch.cuda.device_of(rows):
        places: Tensor | None = order
        while count:
            spans = triton.cdiv(count, _SPAN)
            last = spans == 1
            partials = None if last else rows.new_empty((2 * spans, width), dtype=torch.float32)
            partial_keys = None if last else keys.new_empty(2 * spans, dtype=torch.int64)
            _sum_spans_kernel[(triton.cdiv(spans, lanes), triton.cdiv(width, columns))](
                source, places, keys, sums, partials, partial_keys,
                count, spans, size,
                STRIDE=source.stride(0), SPAN=_SPAN, LANES=lanes, WIDTH=width, COLUMNS=columns,
            )  # fmt: skip
            if partials is None or partial_keys is None:
                break
            source, places, keys, count = partials, None, partial_keys, 2 * spans
    return sums


@triton.jit(do_not_specialize=["count", "spans", "size"])
def _sum_spans_kernel(
    rows_ptr, order_ptr, keys_ptr, sums_ptr, partials_ptr, partial_keys_ptr,
    count, spans, size,
    STRIDE: tl.constexpr, SPAN: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0) * LANES + tl.arange(0, LANES)
    start = span * SPAN
    # Rows behind the last have a key that is left out.
    first_key = tl.load(keys_ptr + start, mask=start < count, other=-1).to(tl.int64)
    key, later = first_key, span < 0
    acc = tl.zeros([LANES, COLUMNS], tl.float32)
    for step in range(0, SPAN, 4):
        # All loads before the first store: a lane's time is that of its loads.
        at = start + step
        key0, row0 = _load_row(rows_ptr, order_ptr, keys_ptr, at, count, STRIDE, WIDTH, COLUMNS)
        key1, row1 = _load_row(rows_ptr, order_ptr, keys_ptr, at + 1, count, STRIDE, WIDTH, COLUMNS)
        key2, row2 = _load_row(rows_ptr, order_ptr, keys_ptr, at + 2, count, STRIDE, WIDTH, COLUMNS)
        key3, row3 = _load_row(rows_ptr, order_ptr, keys_ptr, at + 3, count, STRIDE, WIDTH, COLUMNS)
        acc, later = _add_row(
            acc, later, key, key0, row0, sums_ptr, partials_ptr, span, spans, size, WIDTH, COLUMNS
        )
        acc, later = _add_row(
            acc, later, key0, key1, row1, sums_ptr, partials_ptr, span, spans, size, WIDTH, COLUMNS
        )
        acc, later = _add_row(
            acc, later, key1, key2, row2, sums_ptr, partials_ptr, span, spans, size, WIDTH, COLUMNS
        )
        acc, later = _add_row(
            acc, later, key2, key3, row3, sums_ptr, partials_ptr, span, spans, size, WIDTH, COLUMNS
        )
        key = key3
    if partials_ptr is None:
        _store_rows(sums_ptr, acc, key, (span < spans) & (key >= 0) & (key < size), WIDTH, COLUMNS)
    else:
        # A span of one key has all of it in its first place and 0 in its last.
        inside = span < spans
        _store_rows(partials_ptr, acc, 2 * span, inside & (later == 0), WIDTH, COLUMNS)
        acc = tl.where(later[:, None], acc, 0.0)
        _store_rows(partials_ptr, acc, 2 * span + 1, inside, WIDTH, COLUMNS)
        tl.store(partial_keys_ptr + 2 * span, first_key, mask=inside)
        tl.store(partial_keys_ptr + 2 * span + 1, key, mask=inside)


@triton.jit
def _load_row(
    rows_ptr, order_ptr, keys_ptr, at, count,
    STRIDE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    exists = at < count
    key = tl.load(keys_ptr + at, mask=exists, other=-1).to(tl.int64)
    row = at
    if order_ptr is not None:
        row = tl.load(order_ptr + at, mask=exists, other=0)
    address, column = row_addresses(row, STRIDE, WIDTH, COLUMNS)
    return key, tl.load(rows_ptr + address, mask=exists[:, None] & column, other=0.0)


@triton.jit
def _add_row(
    acc, later, key, new_key, row, sums_ptr, partials_ptr, span, spans, size,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The sum and whether it is a later one than the first of the span, after one more row."""
    ends = new_key != key
    finished = ends & (key >= 0) & (key < size)
    if partials_ptr is not None:
        _store_rows(partials_ptr, acc, 2 * span, ends & (later == 0), WIDTH, COLUMNS)
        finished = finished & later
    _store_rows(sums_ptr, acc, key, finished, WIDTH, COLUMNS)
    return tl.where(ends[:, None], 0.0, acc) + row.to(tl.float32), later | ends


@triton.jit
def _store_rows(ptr, acc, row, which, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    address, column = row_addresses(row, WIDTH, WIDTH, COLUMNS)
    tl.store(ptr + address, acc.to(ptr.dtype.element_ty), mask=which[:, None] & column)
