"""A block of keys meets the queries that a consumer of `hopper.dq` holds."""

# Tuples are taken apart whole, also where a function needs a part.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from jagged_kernels.attention.hopper.blocks import next_slot
from jagged_kernels.attention.hopper.heads import (
    add_product,
    left_factor,
    pieces,
    product_of_held,
    wait_for,
)
from jagged_kernels.attention.hopper.listed import hide, noted_block
from jagged_kernels.attention.hopper.policies import natural_scores


@gluon.jit
def end_walk(state, buffers, barriers, S: gl.constexpr, C: gl.constexpr):
    """(dq, stage, phase): what the last block's dS adds to dQ."""
    k_buffer = buffers[3]
    k_empty = barriers[3]
    dq, d_scores, stage, phase = state
    factor = left_factor(d_scores, dq, k_buffer.dtype)
    dq = add_product(factor, k_buffer.index(stage), dq, S.D)
    dq, factor = wait_for(0, dq, (factor,))
    mbarrier.arrive(k_empty.index(stage))
    stage, phase = next_slot(stage, phase, C.stages)
    return dq, stage, phase


@gluon.jit
def delta_of(o, d_o, ROW: gl.constexpr):
    D: gl.constexpr = o.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    delta = gl.sum(o.load(LAYOUT).to(gl.float32) * d_o.load(LAYOUT).to(gl.float32), 1)
    return gl.convert_layout(delta, ROW)


@gluon.jit
def meet_keys(
    state, q, d_o, of_query, buffers, barriers, start, more, band, scale_log2,
    S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr, D_SCORE: gl.constexpr,
    SCORES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """The block of keys from `start`, whose K is there, gives its dS; the one before adds to dQ.

    So two products are in the making while probabilities are, or the slopes of weights by a policy.

    Args:
        q, d_o: as `hold` gives them.
        of_query: (lse2, delta), or (1 / n, 0) of weights by a policy.
        start: of a list's block its note says it.
        more: whether a block follows, of a list's.
        band: as for `hide`.
    """
    k_buffer, v_buffer = buffers[3:5]
    tile_full, tile_empty, k_full, k_empty, v_full, v_empty, landed = barriers
    if not S.GROUPS:
        first_q, k_end, whole_start, whole_end, shift, left, right = band
    dq, d_scores, stage, phase = state
    before = stage
    if not FIRST:
        stage, phase = next_slot(stage, phase, C.stages)
    scores = product_of_held(q, k_buffer.index(stage), S.D, SCORES)
    if not FIRST:
        # Not at the end of the loop: halves carried around it are taken apart and packed again.
        factor = left_factor(d_scores, dq, k_buffer.dtype)
        dq = add_product(factor, k_buffer.index(before), dq, S.D)
    mbarrier.wait(v_full.index(stage), phase)
    d_weights = product_of_held(d_o, v_buffer.index(stage), S.DV, SCORES)
    if S.GROUPS:
        start, cut = noted_block(buffers[-1], stage)
    LATER: gl.constexpr = pieces(S.DV) + (0 if FIRST else pieces(S.D))
    scores = warpgroup_mma_wait(LATER, deps=[scores])
    if WEIGHT is None:
        exponent = scores * scale_log2 - gl.expand_dims(of_query[0], 1)
    else:
        scores = natural_scores(scores, scale_log2)
        slopes = D_SCORE(scores, gl.full_like(scores, of_query[0]))
    if not S.GROUPS:
        cut = (start < whole_start) | (start >= whole_end)
    if WEIGHT is None:
        if cut:
            exponent = hide(exponent, start, band, S, False)
        probabilities = gl.exp2(exponent)
    # The next block's K is waited for here because that wait is a loop: across it the assembler
    # does not move the end of the products up to before the probabilities.
    ahead_stage, ahead_phase = next_slot(stage, phase, C.stages)
    if S.GROUPS:
        mbarrier.wait(k_full.index(ahead_stage), ahead_phase, pred=more)
    else:
        mbarrier.wait(k_full.index(ahead_stage), ahead_phase, pred=start + S.BLOCK < k_end)
    if FIRST:
        d_weights = warpgroup_mma_wait(0, deps=[d_weights])
    else:
        dq, factor, d_weights = wait_for(0, dq, (factor, d_weights))
        mbarrier.arrive(k_empty.index(before))
    mbarrier.arrive(v_empty.index(stage))
    if WEIGHT is None:
        d_scores = probabilities * (d_weights - gl.expand_dims(of_query[1], 1))
    else:
        d_scores = slopes * d_weights
    if cut:
        # What the next user's V made of a weight 0.
        d_scores = hide(d_scores, start, band, S, False, 0.0)
    return dq, d_scores, stage, phase
