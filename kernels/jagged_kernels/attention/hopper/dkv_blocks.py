"""A block of queries meets the keys that a consumer of `hopper.dkv` holds, by softmax or a policy.

Either adds to dV, gives the block's dS, and adds the dS of the block before to dK.
"""

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
    product_with_transpose,
    wait_for,
)
from jagged_kernels.attention.hopper.listed import hide, noted_block
from jagged_kernels.attention.hopper.policies import natural_scores


@gluon.jit
def meet_softmax(
    state, k, v, buffers, barriers, start, band, first, more, scale_log2,
    S: gl.constexpr, C: gl.constexpr, SCORES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """The block of queries from `start`, whose Q is there, adds to dV and gives its dS; the one
    before adds to dK.

    So two products are in the making while probabilities are, and one while dS is.

    Args:
        start: of a list's block its note says it.
        band: as for `hide`.
        first: whether no block was before, where that is known only when it runs: zeros of dS then
            add to dK. With an inf or a NaN of Q they make NaN, as the block's own dS does.
        FIRST: whether that is known when it is compiled.
    """
    q_buffer, do_buffer, lse2_buffer, delta_buffer = buffers[2:6]
    tile_full, tile_empty, q_full, q_empty, do_full, do_empty, landed = barriers
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    dk, dv, d_scores, stage, phase = state
    before = stage
    if not FIRST:
        ahead_stage, ahead_phase = next_slot(stage, phase, C.stages)
        stage = gl.where(first, stage, ahead_stage)
        phase = gl.where(first, phase, ahead_phase)
    scores = product_with_transpose(k, q_buffer.index(stage), S.D, SCORES)
    if not FIRST:
        # Not at the end of the loop: halves carried around it are taken apart and packed again.
        factor = left_factor(d_scores, dk, q_buffer.dtype)
        dk = add_product(factor, q_buffer.index(before), dk, S.D)
    mbarrier.wait(do_full.index(stage), phase)
    d_o = do_buffer.index(stage)
    d_probabilities = product_with_transpose(v, d_o, S.DV, SCORES)
    if S.GROUPS:
        start, cut = noted_block(buffers[-1], stage)
    LATER: gl.constexpr = pieces(S.DV) + (0 if FIRST else pieces(S.D))
    scores = warpgroup_mma_wait(LATER, deps=[scores])
    lse2 = gl.expand_dims(lse2_buffer.index(stage).load(COLUMN), 0)
    exponent = scores * scale_log2 - lse2
    if not S.GROUPS:
        cut = (start < band[2]) | (start >= band[3])
    if cut:
        exponent = hide(exponent, start, band, S, True)
    probabilities = gl.exp2(exponent)
    if FIRST:
        d_probabilities = warpgroup_mma_wait(0, deps=[d_probabilities])
    else:
        dk, factor, d_probabilities = wait_for(0, dk, (factor, d_probabilities))
        mbarrier.arrive(q_empty.index(before), pred=first == 0)
    weights = left_factor(probabilities, dv, q_buffer.dtype)
    dv = add_product(weights, d_o, dv, S.DV)
    delta = gl.expand_dims(delta_buffer.index(stage).load(COLUMN), 0)
    # What inf or NaN of a hidden query makes of a probability 0 raises the alarm, as it does in dV;
    # and queries behind the user's end are zeros.
    d_scores = probabilities * (d_probabilities - delta)
    # The next block's Q is waited for here because that wait is a loop: across it the assembler
    # does not move the end of the products up to before dS.
    ahead_stage, ahead_phase = next_slot(stage, phase, C.stages)
    mbarrier.wait(q_full.index(ahead_stage), ahead_phase, pred=more)
    dv, weights = wait_for(0, dv, (weights,))
    mbarrier.arrive(do_empty.index(stage))
    return dk, dv, d_scores, stage, phase


@gluon.jit
def meet_pointwise(
    state, k, v, buffers, barriers, start, band, first, more, scale_log2, factor_n,
    S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr, D_SCORE: gl.constexpr,
    SCORES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """`meet_softmax` of weights by a policy.

    Weights come with their slopes, which at head_dim 128 leave no registers for a product with V
    meanwhile: that begins when weights have become halves, beside the one that adds to dV.
    """
    q_buffer, do_buffer = buffers[2:4]
    tile_full, tile_empty, q_full, q_empty, do_full, do_empty, landed = barriers
    dk, dv, d_scores, stage, phase = state
    before = stage
    if not FIRST:
        ahead_stage, ahead_phase = next_slot(stage, phase, C.stages)
        stage = gl.where(first, stage, ahead_stage)
        phase = gl.where(first, phase, ahead_phase)
    scores = product_with_transpose(k, q_buffer.index(stage), S.D, SCORES)
    if not FIRST:
        factor = left_factor(d_scores, dk, q_buffer.dtype)
        dk = add_product(factor, q_buffer.index(before), dk, S.D)
    if S.GROUPS:
        start, cut = noted_block(buffers[-1], stage)
    scores = warpgroup_mma_wait(0 if FIRST else pieces(S.D), deps=[scores])
    scores = natural_scores(scores, scale_log2)
    weights = WEIGHT(scores)
    slopes = D_SCORE(scores, gl.full_like(scores, factor_n))
    if not S.GROUPS:
        cut = (start < band[2]) | (start >= band[3])
    if cut:
        weights = hide(weights, start, band, S, True, 0.0)
        slopes = hide(slopes, start, band, S, True, 0.0)
    weights = left_factor(weights, dv, q_buffer.dtype)
    mbarrier.wait(do_full.index(stage), phase)
    d_o = do_buffer.index(stage)
    d_weights = product_with_transpose(v, d_o, S.DV, SCORES)
    dv = add_product(weights, d_o, dv, S.DV)
    if FIRST:
        d_weights = warpgroup_mma_wait(pieces(S.DV), deps=[d_weights])
    else:
        dk, factor, d_weights = wait_for(pieces(S.DV), dk, (factor, d_weights))
        mbarrier.arrive(q_empty.index(before), pred=first == 0)
    d_scores = slopes * d_weights
    # Here because that wait is a loop; see `meet_softmax`.
    ahead_stage, ahead_phase = next_slot(stage, phase, C.stages)
    mbarrier.wait(q_full.index(ahead_stage), ahead_phase, pred=more)
    dv, weights = wait_for(0, dv, (weights,))
    mbarrier.arrive(do_empty.index(stage))
    return dk, dv, d_scores, stage, phase
