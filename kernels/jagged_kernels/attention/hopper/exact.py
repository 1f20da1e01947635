"""Queries with enormous scores, or touched by what the mask hides, a second time.

A warp-specialised forward cannot go back: its loads are in the next tile already. It marks the
parts of tiles that `plain.forward` would walk again, and one small launch looks for marks. The
result is that of `plain.forward`'s own exact walk.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.meeting import RANGES, Meeting
from jagged_kernels.attention.plain.forward import store_tile, walk
from jagged_kernels.attention.plans import AttentionShape
from jagged_kernels.attention.scores.bias_launch import NO_BIAS
from jagged_kernels.attention.triton_meeting import factor_of_user, list_ends, rule_of_row
from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import LaunchConfig, cdiv
from jagged_kernels.device.columns import load_columns
from jagged_kernels.device.memory import store_block
from jagged_kernels.schedule.policy.plain import forward_config
from jagged_kernels.schedule.row_access import load_row

# Parts of tiles that a program looks at: enough for a short launch, few enough to share the work.
_PLACES = tl.constexpr(64)


def launch_exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor | None,
    marks: Tensor,
    rows: Tensor,
    *,
    shape: AttentionShape,
    part_q: int,
    left: int,
    right: int,
    scale_log2: float,
    negate: bool,
    meeting: Meeting = RANGES,
) -> None:
    """Overwrites o and lse2 of `part_q` queries of a row's tile where they are marked.

    Args:
        marks: [rows, parts of a tile, H] int8, 1 or 0.
        q, k, v: `rows_of_dims`.
        shape: of the forward before; its TILE holds one or more parts.
        meeting: whose lists are of blocks as large as that tile.
        scale_log2, negate: `scale_argument`.
    """
    shape, config, parts = _layout(shape, part_q, q.element_size())
    launch(
        _exact_kernel,
        cdiv(marks.numel(), _PLACES.value),
        (q, k, v, o, lse2, marks, rows, marks.numel(), meeting.arguments, scale_log2, left, right),
        {
            "S": shape,
            "NEGATE": negate,
            "BIAS": NO_BIAS["BIAS"],
            "WEIGHT": meeting.constants.weight,
            "PARTS": parts,
        },
        **config.options(),
    )


@lru_cache
def _layout(
    shape: AttentionShape, part_q: int, element_size: int
) -> tuple[AttentionShape, LaunchConfig, int]:
    """(shape of one part, launch options, parts of a tile)."""
    config = forward_config(max(shape.PAD_D, shape.PAD_DV), element_size)
    parts = shape.TILE // part_q
    return shape._replace(TILE=part_q, PARTS=parts, BLOCK=config.block), config, parts


@triton.jit(do_not_specialize=["places", "left", "right"])
def _exact_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse2_ptr, marks_ptr, rows_ptr, places, meets,
    scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * _PLACES
    place = first + tl.arange(0, _PLACES)
    marked = tl.load(marks_ptr + place, mask=place < places, other=0).to(tl.int32)
    if tl.sum(marked, 0) > 0:
        for index in range(0, _PLACES):
            if tl.sum(tl.where(tl.arange(0, _PLACES) == index, marked, 0), 0) > 0:
                _attend_exactly(
                    q_ptr, k_ptr, v_ptr, o_ptr, lse2_ptr, rows_ptr, first + index, meets,
                    scale_log2, left, right, S, NEGATE, BIAS, WEIGHT, PARTS,
                )  # fmt: skip


@triton.jit
def part_of_place(
    rows_ptr, place, HEADS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """(start, end) of TILE tokens, then as `load_row`, then the head: of number `place` among
    (row, part of its tile, head)."""
    head = (place % HEADS).to(tl.int64)
    start, end, range_start, range_end, shift = load_row(rows_ptr, place // (PARTS * HEADS))
    start += place // HEADS % PARTS * TILE
    end = tl.minimum(end, start + TILE)
    return start, end, range_start, range_end, shift, head


@triton.jit
def _attend_exactly(
    q_ptr, k_ptr, v_ptr, o_ptr, lse2_ptr, rows_ptr, place, meets, scale_log2, left, right,
    S: tl.constexpr, NEGATE: tl.constexpr, BIAS: tl.constexpr, WEIGHT: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    TILE: tl.constexpr = S.TILE
    row = part_of_place(rows_ptr, place, S.HEADS, TILE, PARTS)
    q_start, q_end, k_start, k_end, shift, head = row
    number = place // (PARTS * S.HEADS)
    ends = (k_start, k_end)
    if S.GROUPS:
        ends = list_ends(meets, rows_ptr, number, q_start, k_end, shift, head, S)
    rule = 0
    if S.RULED:
        rule = rule_of_row(meets, rows_ptr, number, k_start, k_end, shift, False)
    q_ptr += head * S.Q_STRIDE_H
    k_ptr += (head // S.GROUP) * S.K_STRIDE_H
    v_ptr += (head // S.GROUP) * S.V_STRIDE_H
    PRECISION: tl.constexpr = S.PRECISION
    q = load_columns(q_ptr, q_start, q_end, S.Q_STRIDE_T, TILE, S.D, S.PAD_D, PRECISION, NEGATE)
    acc, top, total, _ = walk(
        q, k_ptr, v_ptr, row, ends, scale_log2, left, right, (0, 0, meets, rule),
        S, BIAS, WEIGHT, True,
    )  # fmt: skip
    if WEIGHT is None:
        store_tile(acc, top, total, o_ptr, lse2_ptr, row, S)
    else:
        acc *= factor_of_user(meets, rows_ptr, number)
        o_ptr += head * S.DV
        store_block(o_ptr, acc, q_start, q_end, S.HEADS * S.DV, TILE, S.DV, S.PAD_DV)
