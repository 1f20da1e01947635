"""The forward kernel for Hopper: long histories in half precision, head_dims from 40 to 256.

FlashAttention-3 (arXiv 2407.08608, section 3) over the rows of the schedule, written in Gluon. One
warp brings K and V blocks by TMA into a ring of buffers; each of one or two consumers holds a part
of the tile's queries, and its softmax of one block runs beside its products of the block before.
Programs stay, one or two a multiprocessor, so that the loads of the next tile run beside the end of
this one. They take every n-th (row, head); of a mask that makes tiles unequal, the next that nobody
has.
"""

# Partitions get tuples, and take out of them what they need.
# ruff: noqa: RUF059

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from jagged_kernels.attention.hopper.blocks import (
    counter,
    for_mask,
    mask_scores,
    new_dealing,
    next_slot,
    one_barrier,
    plan,
    programs,
    ring_of_barriers,
    token_blocks,
    whole_blocks,
    zero_tail,
)
from jagged_kernels.attention.hopper.exact import launch_exact
from jagged_kernels.attention.hopper.forward_lists import attend_listed, load_listed
from jagged_kernels.attention.hopper.forward_loads import load_keys
from jagged_kernels.attention.hopper.forward_stores import store_part
from jagged_kernels.attention.hopper.heads import (
    add_product,
    boxes,
    left_factor,
    no_sums,
    pieces,
    product_with_transpose,
    times_by_row,
    tokens_of,
    wait_for,
)
from jagged_kernels.attention.hopper.listed import ring_of_notes
from jagged_kernels.attention.hopper.policies import in_gluon, natural_scores
from jagged_kernels.attention.hopper.softmax import online_softmax
from jagged_kernels.attention.hopper.tiles import attend_tiles
from jagged_kernels.attention.meeting import RANGES, Meeting, MeetShape
from jagged_kernels.attention.plans import PLANS, Call, empty_lse, scale_argument
from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import empty_as
from jagged_kernels.schedule.policy.hopper import HopperConfig, forward_config


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    *,
    left: int,
    right: int,
    scale: float,
    meeting: Meeting = RANGES,
    listed: int = 0,
    with_lse: bool = True,
    config: HopperConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`plain.forward.launch_forward` for what `choice.HOPPER_FORWARD` takes.

    Args:
        rows: tiles of `config.tile_q` queries.
        listed: tokens of a listed block, as many as of a tile; 0 where rows see ranges.
        config: in place of the rule's.
    """
    _, heads, dim = q.shape
    config = config or for_mask(
        forward_config(dim, listed), q, rows, left, right, meeting.constants
    )
    o = empty_as(q) if v.shape[2] == dim else q.new_empty((*q.shape[:2], v.shape[2]))
    lse2 = empty_lse(q) if with_lse else None
    part_q, block = config.part_q, min(config.block, listed or config.block)
    call = Call.of(q, k, v, left=left, right=right, scale=scale)
    scale_log2, constants, options = _plan(call, config, meeting.constants)
    marks = None
    # No score is too large for weights by a policy, and without a mask nothing is hidden.
    if constants["S"].MASKED or meeting.constants.weight is None:
        marks = (rows.shape[0], config.consumers, heads)
        marks = torch.empty(marks, dtype=torch.int8, device=q.device)
    launch(
        _forward_kernel,
        programs(q.device, config, rows.shape[0] * heads),
        (
            o, lse2, marks, counter(config, q.device), rows, rows.shape[0],
            token_blocks(q, part_q), token_blocks(k, block), token_blocks(v, block),
            meeting.arguments, scale_log2, left, right,
        ),
        constants,
        **options,
    )  # fmt: skip
    if marks is not None:
        launch_exact(
            q, k, v, o, lse2, marks, rows,
            shape=constants["S"], part_q=part_q, left=left, right=right,
            scale_log2=scale_log2, negate=constants["NEGATE"], meeting=meeting,
        )  # fmt: skip
    return o, lse2


@lru_cache(PLANS)
def _plan(
    call: Call, config: HopperConfig, meets: MeetShape
) -> tuple[float, dict[str, Any], dict[str, int]]:
    """(scale in base 2, compile-time parameters, launch options)."""
    constants, options = plan(call, config, meets)
    scale_log2, negate = scale_argument(call.scale)
    return scale_log2, {**constants, "NEGATE": negate, "WEIGHT": in_gluon(meets.weight)}, options


@gluon.jit(do_not_specialize=["row_count", "left", "right"])
def _forward_kernel(
    o_ptr, lse2_ptr, marks_ptr, taken_ptr, rows_ptr, row_count, q_blocks, k_blocks, v_blocks, meets,
    scale_log2, left, right,
    S: gl.constexpr, C: gl.constexpr, NEGATE: gl.constexpr, WEIGHT: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_blocks.dtype
    # A part is a whole block but where lists have shorter ones.
    PART: gl.constexpr = tokens_of(k_blocks)
    RING: gl.constexpr = C.stages * (S.BLOCK // PART)
    buffers = (
        boxes(C.consumers, C.part_q, S, dtype),
        boxes(RING, PART, S, dtype),
        boxes(RING, PART, S, dtype),
    )
    if S.GROUPS:
        buffers = buffers + (ring_of_notes(C.stages, S.BLOCK // PART),)  # noqa: RUF005
    barriers = (
        one_barrier(1),  # Q is there
        one_barrier(C.consumers),  # Q may be overwritten
        ring_of_barriers(C.stages, 1),  # K is there
        ring_of_barriers(C.stages, C.consumers),
        ring_of_barriers(C.stages, 1),  # V is there
        ring_of_barriers(C.stages, C.consumers),
        # V's last block holds nothing of the next user; of lists, it is there with rows of his.
        one_barrier(1 if S.GROUPS else C.consumers),
    )
    load = (q_blocks, k_blocks, v_blocks, rows_ptr, row_count, buffers, barriers)
    attend = (
        o_ptr, lse2_ptr, marks_ptr, rows_ptr, row_count, meets,
        scale_log2, left, right, buffers, barriers,
    )  # fmt: skip
    if S.GROUPS:
        load = (load, meets)
    if C.counted:
        dealing = new_dealing(C.consumers)
        load = (load, taken_ptr, dealing)
        attend = (attend, dealing)
    fence_async_shared()
    if C.consumers == 1:
        gl.warp_specialize(
            [
                (attend_listed if S.GROUPS else _attend, (attend, S, C, NEGATE, WEIGHT, 0)),
                (load_listed if S.GROUPS else load_keys, (load, S, C)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (attend_listed if S.GROUPS else _attend, (attend, S, C, NEGATE, WEIGHT, 0)),
                (attend_listed if S.GROUPS else _attend, (attend, S, C, NEGATE, WEIGHT, 1)),
                (load_listed if S.GROUPS else load_keys, (load, S, C)),
            ],
            [C.warps, 1],
            [C.registers, 24],
        )


@gluon.jit
def _attend(
    args, S: gl.constexpr, C: gl.constexpr, NEGATE: gl.constexpr, WEIGHT: gl.constexpr,
    ME: gl.constexpr,
):  # fmt: skip
    """One consumer: part ME of every tile's queries."""
    attend_tiles(args, S, C, NEGATE, WEIGHT, ME, _attend_tile, store_part)


@gluon.jit
def _attend_tile(
    rings, row, place, args, S: gl.constexpr, C: gl.constexpr, NEGATE: gl.constexpr,
    WEIGHT: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """(sums, state) of a tile.

    Block j's scores are in the making while block j - 1's softmax goes into its product with V;
    a product with V ends under the next softmax. Weights by a policy have no top, no total and no
    reach, which stay what they are at the start.
    """
    scale_log2, left, right, buffers, barriers = args[6:]
    q_buffer, k_buffer, v_buffer = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleaned = barriers
    head, q_start, q_end, k_start, k_end, shift = row
    stage, phase, q_phase, clean_phase = rings
    ROWS: gl.constexpr = C.part_q
    BLOCK: gl.constexpr = S.BLOCK
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, BLOCK, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    dtype: gl.constexpr = q_buffer.dtype
    q = q_buffer.index(ME)
    first_q = q_start + ME * ROWS
    acc = no_sums(ROWS, S.DV, S, C)
    total = gl.zeros([ROWS], gl.float32, ROW)
    top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
    reach = gl.zeros([ROWS], gl.float32, ROW)
    if k_start < k_end:
        blocks = gl.cdiv(k_end - k_start, BLOCK)
        last_k = k_start + (blocks - 1) * BLOCK
        mbarrier.wait(q_full, q_phase)
        q_phase ^= 1
        # The first part of a tile is never empty.
        if (ME == 0) or (first_q < q_end):
            band = (first_q, last_k, k_end, shift, left, right)
            whole_start, whole_end = whole_blocks(
                q_start, q_end, k_start, k_end, shift, left, right,
                S.HAS_LEFT, S.HAS_RIGHT, BLOCK,
            )  # fmt: skip
            masked_until = gl.maximum(blocks - (whole_end - k_start) // BLOCK, 1)
            whole_until = gl.maximum(blocks - (whole_start - k_start) // BLOCK, masked_until)

            mbarrier.wait(k_full.index(stage), phase)
            weights = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
            if not _first_in_loop(C, WEIGHT):
                scores = product_with_transpose(q, k_buffer.index(stage), S.D, SCORES)
                scores = warpgroup_mma_wait(0, deps=[scores])
                mbarrier.arrive(k_empty.index(stage))
                if NEGATE:
                    scores = -scores
                if WEIGHT is None:
                    scores = mask_scores(scores, band, 0, S.HAS_LEFT, S.HAS_RIGHT)
                    weights, correction, top, total, reach = online_softmax(
                        scores, top, total, reach, scale_log2, True
                    )
                else:
                    weights = WEIGHT(natural_scores(scores, scale_log2))
                    weights = mask_scores(weights, band, 0, S.HAS_LEFT, S.HAS_RIGHT, 0.0)
            if last_k + BLOCK > k_end:
                mbarrier.wait(v_full.index(stage), phase)
                zero_tail(
                    v_buffer.index(stage), k_end - last_k, cleaned, clean_phase, C.consumers, ME
                )
                clean_phase ^= 1
            if not _first_in_loop(C, WEIGHT):
                ahead_stage, ahead_phase = next_slot(stage, phase, C.stages)
                mbarrier.wait(k_full.index(ahead_stage), ahead_phase, pred=blocks > 1)

            state = (acc, total, top, reach, weights, stage, phase)
            uncut = (masked_until, whole_until)
            if _first_in_loop(C, WEIGHT):
                state = _walk(
                    state, q, buffers, barriers, 0, blocks, blocks, uncut, band, scale_log2,
                    S, C, NEGATE, WEIGHT, SCORES, "some", True,
                )  # fmt: skip
            elif _in_one_loop(S, WEIGHT):
                state = _walk(
                    state, q, buffers, barriers, 1, blocks, blocks, uncut, band, scale_log2,
                    S, C, NEGATE, WEIGHT, SCORES, "some", False,
                )  # fmt: skip
            else:
                if S.HAS_RIGHT:
                    state = _walk(
                        state, q, buffers, barriers, 1, masked_until, blocks, uncut, band,
                        scale_log2, S, C, NEGATE, WEIGHT, SCORES, "all", False,
                    )  # fmt: skip
                state = _walk(
                    state, q, buffers, barriers, masked_until, whole_until, blocks, uncut, band,
                    scale_log2, S, C, NEGATE, WEIGHT, SCORES, "none", False,
                )  # fmt: skip
                if S.HAS_LEFT:
                    state = _walk(
                        state, q, buffers, barriers, whole_until, blocks, blocks, uncut, band,
                        scale_log2, S, C, NEGATE, WEIGHT, SCORES, "all", False,
                    )  # fmt: skip
            acc, total, top, reach, weights, stage, phase = state

            mbarrier.arrive(q_empty)
            p = left_factor(weights, acc, dtype)
            mbarrier.wait(v_full.index(stage), phase)
            acc = add_product(p, v_buffer.index(stage), acc, S.DV)
            acc, p = wait_for(0, acc, (p,))
            mbarrier.arrive(v_empty.index(stage))
            stage, phase = next_slot(stage, phase, C.stages)
        else:
            # The tile ends before this part: only the other consumer's waits are served.
            mbarrier.arrive(q_empty)
            if last_k + BLOCK > k_end:
                mbarrier.wait(v_full.index(stage), phase)
                zero_tail(
                    v_buffer.index(stage), k_end - last_k, cleaned, clean_phase, C.consumers, ME
                )
                clean_phase ^= 1
            for _ in range(blocks):
                # In step with the loads, because an arrival too early would count for the
                # block that is there now.
                mbarrier.wait(k_full.index(stage), phase)
                mbarrier.arrive(k_empty.index(stage))
                mbarrier.wait(v_full.index(stage), phase)
                mbarrier.arrive(v_empty.index(stage))
                stage, phase = next_slot(stage, phase, C.stages)
    return (acc, total, top, reach), (stage, phase, q_phase, clean_phase)


# The code of two consumers has to fit the instruction cache, 128 KiB.


@gluon.constexpr_function
def _first_in_loop(C, WEIGHT):
    """Whether a tile's first block is met in the loop over the others."""
    return WEIGHT is not None and C.consumers == 2


@gluon.constexpr_function
def _in_one_loop(S, WEIGHT):
    """Whether the blocks that the mask cuts and those that it does not have one loop: three loops
    would not fit, nor would two of weights by a policy."""
    return (S.HAS_LEFT or S.HAS_RIGHT) and (WEIGHT is not None or (S.HAS_LEFT and S.HAS_RIGHT))


@gluon.jit
def _walk(
    state, q, buffers, barriers, first, last, blocks, uncut, band, scale_log2,
    S: gl.constexpr, C: gl.constexpr, NEGATE: gl.constexpr, WEIGHT: gl.constexpr,
    SCORES: gl.constexpr, CUT: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """The blocks number [first, last), counted from the end of the keys; the first's K is there.

    Args:
        uncut: (from which block, to which) the mask cuts none.
        CUT: whether the mask cuts "all" of the blocks, "none", or "some", by `uncut`.
        FIRST: whether `first` is 0: its weights' product with V is then one of zeros before.
    """
    q_buffer, k_buffer, v_buffer = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, cleaned = barriers
    acc, total, top, reach, weights, stage, phase = state
    for block in range(first, last):
        v_stage = stage
        v_phase = phase
        later = block > 0 if FIRST else True
        ahead_stage, ahead_phase = next_slot(stage, phase, C.stages)
        stage = gl.where(later, ahead_stage, stage)
        phase = gl.where(later, ahead_phase, phase)
        # Not at the end of the loop: halves carried around it are taken apart and packed again.
        p = left_factor(weights, acc, q.dtype)
        if S.PAD_D == 128 and pieces(S.D) == 1:
            scores = product_with_transpose(q, k_buffer.index(stage), S.D, SCORES, weights)
        else:  # at 64, and as two products, the other takes more moves: 2% to 5% longer
            scores = product_with_transpose(q, k_buffer.index(stage), S.D, SCORES)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        running = add_product(p, v_buffer.index(v_stage), acc, S.DV)
        scores = warpgroup_mma_wait(pieces(S.DV), deps=[scores])
        mbarrier.arrive(k_empty.index(stage))
        if NEGATE:
            scores = -scores
        cut = CUT == "all"
        if CUT == "some":
            cut = (block < uncut[0]) | (block >= uncut[1])
        before = block * S.BLOCK
        if WEIGHT is None:
            if cut:
                scores = mask_scores(scores, band, before, S.HAS_LEFT, S.HAS_RIGHT)
            weights, correction, top, total, reach = online_softmax(
                scores, top, total, reach, scale_log2, CUT != "none"
            )
        else:
            weights = WEIGHT(natural_scores(scores, scale_log2))
            if cut:
                weights = mask_scores(weights, band, before, S.HAS_LEFT, S.HAS_RIGHT, 0.0)
        # The next block's K is waited for here because that wait is a loop: across it the assembler
        # does not move the end of the product with V up to before the softmax.
        ahead_stage, ahead_phase = next_slot(stage, phase, C.stages)
        mbarrier.wait(k_full.index(ahead_stage), ahead_phase, pred=block < blocks - 1)
        acc, p = wait_for(0, running, (p,))
        mbarrier.arrive(v_empty.index(v_stage), pred=later)
        if WEIGHT is None:
            acc = times_by_row(acc, correction)
    return acc, total, top, reach, weights, stage, phase
