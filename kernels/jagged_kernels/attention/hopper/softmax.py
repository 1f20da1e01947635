"""The online softmax of `hopper.forward`: weights of a block of scores, and the mean by them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from jagged_kernels.attention.hopper.heads import store_head, times_by_row


@gluon.jit
def online_softmax(
    scores, top, total, reach, scale_log2, MASKED: gl.constexpr, LIFT: gl.constexpr = 0,
    BY_ROW: gl.constexpr = False,
):  # fmt: skip
    """(weights, correction of what was summed before, top, total, reach); `top` is scaled already,
    and so far below the largest score that its weight is 2 ** LIFT.

    Weights are relative to the rounded top, everywhere the same one, so its rounding cancels; but
    where `reach`, the largest |top| so far, is enormous, it could move them out of range.

    Args:
        scale_log2: one for all scores, or BY_ROW one for each query's.
    """
    new_top = gl.max(scores, 1) * scale_log2
    if LIFT:
        new_top -= LIFT
    new_top = gl.maximum(top, new_top)
    # -inf - -inf is NaN: a query that has seen nothing yet subtracts 0.
    shift = gl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    factor = gl.expand_dims(scale_log2, 1) if BY_ROW else scale_log2
    weights = gl.exp2(scores * factor - gl.expand_dims(shift, 1))
    correction = gl.exp2(top - shift)
    reach = gl.maximum(reach, gl.abs(shift))
    return weights, correction, new_top, total * correction + gl.sum(weights, 1), reach


@gluon.jit
def store_mean(
    acc, total, top, o_ptr, lse2_ptr, q_start, q_end, head, HEADS: gl.constexpr, DV: gl.constexpr
):  # fmt: skip
    """A query that saw nothing has total 0: its output is 0 and its lse -inf."""
    divisor = gl.where(total == 0.0, 1.0, total)
    if lse2_ptr is not None:
        lse2 = gl.where(total == 0.0, float("-inf"), top + gl.log2(divisor))
        token = q_start + gl.arange(0, total.shape[0], lse2.type.layout)
        gl.store(lse2_ptr + token.to(gl.int64) * HEADS + head, lse2, mask=token < q_end)

    store_head(o_ptr, times_by_row(acc, 1.0 / divisor), q_start, q_end, head, HEADS, DV)
