"""What the consumers of `hopper.forward` leave of a tile, over ranges and over lists."""

# Tuples are taken apart whole, also where a function needs a part.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jagged_kernels.attention.blocks import FAR
from jagged_kernels.attention.hopper.blocks import factor_of_place
from jagged_kernels.attention.hopper.heads import size_of_head, store_head, times
from jagged_kernels.attention.hopper.softmax import store_mean

_FAR = gl.constexpr(FAR)


@gluon.jit
def store_part(
    sums, row, place, count, args, S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr,
    ME: gl.constexpr,
):  # fmt: skip
    """Stores part ME of a tile, and whether `hopper.exact` is to compute it again.

    Args:
        sums: (acc, total, top, reach) of `online_softmax`.
        args: (o, lse2, marks, rows, their number, meets, ...) of the kernel.
    """
    o_ptr, lse2_ptr, marks_ptr, rows_ptr, row_count, meets = args[:6]
    head, q_start, q_end, k_start, k_end, shift = row
    acc, total, top, reach = sums
    ROWS: gl.constexpr = C.part_q
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, S.BLOCK, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    first_q = q_start + ME * ROWS
    if (marks_ptr is not None) and (place < count):
        # What `hopper.exact` is to compute again: not for the next user's queries.
        own = first_q + gl.arange(0, ROWS, ROW) < q_end
        if S.MASKED:
            sizes = gl.convert_layout(size_of_head(acc), ROW)
            reach = gl.where(sizes < float("inf"), reach, float("inf"))
        far = gl.max(gl.where(own, reach, 0.0), 0) > _FAR
        mark = place // S.HEADS * C.consumers + ME
        gl.store(marks_ptr + mark * S.HEADS + head, far.to(gl.int8))
    if first_q < q_end:
        if WEIGHT is None:
            store_mean(acc, total, top, o_ptr, lse2_ptr, first_q, q_end, head, S.HEADS, S.DV)
        else:
            factor = factor_of_place(meets, rows_ptr, place, count, S.HEADS)
            store_head(o_ptr, times(acc, factor), first_q, q_end, head, S.HEADS, S.DV)
