"""The third launch of a backward with biases: gradients of scores become those of what is learned.

The heads that share keys stand in one tile of the backward, and each has sums of its own: in place
of buckets for all of them beside dQ, dK and dV in registers, it leaves the gradients of the scores
in memory, and here one program for each span and head walks them as the plain kernels do. They are
few a key: where a key head has no more queries than numbers, no more than dK and dV take.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.meeting import Meeting
from jagged_kernels.attention.plans import AttentionShape
from jagged_kernels.attention.scores.bias_launch import BiasSlots
from jagged_kernels.attention.scores.triton_bias import (
    add_to_sums,
    bias_place,
    store_sums,
    time_bucket,
    zero_sums,
)
from jagged_kernels.attention.split.blocks import ends_of_walk, load_span, start_of_block
from jagged_kernels.core.launch import launch
from jagged_kernels.schedule.row_access import load_row
from jagged_kernels.schedule.spans import Partition


def sum_by_bias(
    d_scores: Tensor,
    rows: Tensor,
    partition: Partition,
    bias: dict[str, Any],
    slots: BiasSlots,
    meeting: Meeting,
    shape: AttentionShape,
) -> None:
    """Fills `slots`, whose rows are the spans of the partition.

    Args:
        d_scores: [H, N, Tk] float32, of a user's queries in their order; only places of visible
            ranges, or of listed blocks, are read.
        rows: no user has more than one.
        bias: from `bias_launch.bias_arguments`.
        meeting, shape: of the backward.
    """
    heads, queries, k_tokens = d_scores.shape
    launch(
        _bias_sums_kernel,
        partition.programs * heads,
        (
            d_scores,
            rows,
            partition.spans,
            bias["bias"],
            slots,
            meeting.arguments,
            queries,
            k_tokens,
        ),
        {"BIAS": bias["BIAS"], "S": shape},
        num_warps=4,
    )


@triton.jit(do_not_specialize=["queries", "k_tokens"])
def _bias_sums_kernel(
    d_scores_ptr, rows_ptr, spans_ptr, bias, slots, meets, queries, k_tokens,
    BIAS: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    HEADS: tl.constexpr = S.HEADS
    BLOCK: tl.constexpr = S.BLOCK
    STEP: tl.constexpr = 1 if S.GROUPS else BLOCK
    span, head = tl.program_id(0) // HEADS, (tl.program_id(0) % HEADS).to(tl.int64)
    first_row, first_block, last_row, last_block = load_span(spans_ptr, span)
    row_count = last_row + (last_block > 0).to(tl.int32) - first_row
    d_position, d_time, d_slope = zero_sums(slots, span, head, BIAS, HEADS)
    for index in tl.range(0, row_count, num_stages=1):
        row = first_row + index
        q_start, q_end, k_start, k_end, shift = load_row(rows_ptr, row)
        place = bias_place(bias, rows_ptr, row, head, BIAS)
        start, end, begin = ends_of_walk(
            meets, rows_ptr, row, q_start, k_start, k_end, shift, head,
            tl.where(index == 0, first_block, 0), last_block, row == last_row, S,
        )  # fmt: skip
        q_token = (q_start + tl.arange(0, S.TILE))[:, None]
        line = head * queries + (q_token - q_start)
        for at in tl.range(start, end, STEP, num_stages=1):
            block_start = start_of_block(at, meets, begin, k_start, k_end, S, BLOCK)
            k_token = (block_start + tl.arange(0, BLOCK))[None, :]
            d_scores = tl.load(
                d_scores_ptr + line * k_tokens + k_token,
                mask=(q_token < q_end) & (k_token < k_end),
                other=0.0,
            )
            bucket = 0
            if slots.time is not None:
                bucket = time_bucket(bias, q_token, k_token, q_end, k_end, BIAS)
            d_position, d_time, d_slope = add_to_sums(
                d_position, d_time, d_slope, d_scores, slots, span, bias, place, bucket,
                q_start, block_start, q_end, k_end, shift, head, BIAS, HEADS,
            )  # fmt: skip
    store_sums(d_position, d_time, d_slope, slots, span, head, BIAS, HEADS)
