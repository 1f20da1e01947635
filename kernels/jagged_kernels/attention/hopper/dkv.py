"""dK and dV for Hopper, keys standing in the rows; see `hopper.backward`. What keys do with a block
of queries is in `dkv_blocks`."""

# Tuples are taken apart whole, also where a function needs a part.
# ruff: noqa: RUF059

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from jagged_kernels.attention.hopper.blocks import (
    LANES,
    counter,
    factor_of_place,
    for_mask,
    handed_out,
    new_dealing,
    next_slot,
    one_barrier,
    place_of,
    plan,
    programs,
    ring_of_barriers,
    row_fields,
    token_blocks,
    whole_blocks,
)
from jagged_kernels.attention.hopper.dkv_blocks import meet_pointwise, meet_softmax
from jagged_kernels.attention.hopper.dkv_loads import load_queries
from jagged_kernels.attention.hopper.heads import (
    add_product,
    boxes,
    left_factor,
    no_sums,
    store_head,
    times,
    wait_for,
)
from jagged_kernels.attention.hopper.listed import blocks_to_walk, read_rule, ring_of_notes
from jagged_kernels.attention.hopper.policies import backward_constants
from jagged_kernels.attention.meeting import RANGES, Meeting
from jagged_kernels.attention.plans import Call
from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import empty_as
from jagged_kernels.device.arithmetic import LOG2_E
from jagged_kernels.schedule.policy.hopper import (
    HopperConfig,
    dkv_config,
)


def launch_dkv(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse2: Tensor,
    delta: Tensor | None,
    rows_t: Tensor,
    call: Call,
    alarm: Tensor | None,
    *,
    left: int,
    right: int,
    meeting: Meeting = RANGES,
    listed: int = 0,
    config: HopperConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """`plain.dkv.launch_dkv` for what `choice.HOPPER_DKV` takes.

    Args:
        lse2, delta: [Tq, H] float32, contiguous; of weights by a policy [0] and None.
        rows_t: tiles of `config.tile_q` keys.
        alarm: as for `launch_dq`, of dk and dv.
        listed: tokens of a listed block, as many as of a tile; 0 where rows see ranges.
        config: in place of the rule's.
    """
    kv_heads, dim = k.shape[1:]
    config = config or for_mask(dkv_config(dim, listed), k, rows_t, left, right, meeting.constants)
    dk, dv = empty_as(k), empty_as(v)
    part_k, block = config.part_q, config.block
    constants, options = plan(call.mirrored, config, meeting.constants)
    launch(
        _dkv_kernel,
        programs(k.device, config, rows_t.shape[0] * kv_heads),
        (
            lse2, delta, dk, dv, alarm, counter(config, k.device), rows_t, rows_t.shape[0],
            token_blocks(k, part_k), token_blocks(v, part_k),
            token_blocks(q, block), token_blocks(d_o, block),
            meeting.arguments_t, call.scale, call.scale * LOG2_E, right, left,
        ),
        {**constants, **backward_constants(meeting)},
        **options,
    )  # fmt: skip
    return dk, dv


@gluon.jit(do_not_specialize=["row_count", "left", "right"])
def _dkv_kernel(
    lse2_ptr, delta_ptr, dk_ptr, dv_ptr, alarm_ptr, taken_ptr, rows_ptr, row_count,
    k_blocks, v_blocks, q_blocks, do_blocks, meets,
    scale, scale_log2, left, right,
    S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr, D_SCORE: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_blocks.dtype
    NUMBERS: gl.constexpr = [C.stages, S.BLOCK]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    buffers = (
        boxes(C.consumers, C.part_q, S, dtype),
        boxes(C.consumers, C.part_q, S, dtype),
        boxes(C.stages, S.BLOCK, S, dtype),
        boxes(C.stages, S.BLOCK, S, dtype),
    )
    if WEIGHT is None:
        buffers = buffers + (  # noqa: RUF005 - Gluon does not unpack
            gl.allocate_shared_memory(gl.float32, NUMBERS, PLAIN),
            gl.allocate_shared_memory(gl.float32, NUMBERS, PLAIN),
        )
    if S.GROUPS:
        buffers = buffers + (ring_of_notes(C.stages, 1),)  # noqa: RUF005
    barriers = (
        one_barrier(1),  # the tile's K and V are there
        one_barrier(C.consumers),  # they may be overwritten
        # Q is there, and lane by lane lse2 and delta, if there are any
        ring_of_barriers(C.stages, 1 + (LANES if WEIGHT is None else 0)),
        ring_of_barriers(C.stages, C.consumers),
        ring_of_barriers(C.stages, 1),  # dO is there
        ring_of_barriers(C.stages, C.consumers),
        one_barrier(1),  # the last block is there, with rows of the next user
    )
    descriptors = (k_blocks, v_blocks, q_blocks, do_blocks)
    load = (descriptors, lse2_ptr, delta_ptr, rows_ptr, row_count, buffers, barriers)
    if S.GROUPS:
        load = (load, meets)
    differentiate = (
        dk_ptr, dv_ptr, alarm_ptr, rows_ptr, row_count, meets,
        scale, scale_log2, left, right, buffers, barriers,
    )  # fmt: skip
    if C.counted:
        dealing = new_dealing(C.consumers)
        load = (load, taken_ptr, dealing)
        differentiate = (differentiate, dealing)
    fence_async_shared()
    if C.consumers == 1:
        gl.warp_specialize(
            [
                (_differentiate, (differentiate, S, C, WEIGHT, D_SCORE, 0)),
                (load_queries, (load, S, C, WEIGHT)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_differentiate, (differentiate, S, C, WEIGHT, D_SCORE, 0)),
                (_differentiate, (differentiate, S, C, WEIGHT, D_SCORE, 1)),
                (load_queries, (load, S, C, WEIGHT)),
            ],
            [C.warps, 1],
            [C.registers, 24],
        )


@gluon.jit
def _differentiate(
    args, S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr, D_SCORE: gl.constexpr,
    ME: gl.constexpr,
):  # fmt: skip
    """One consumer: the keys from ME * ROWS to (ME + 1) * ROWS of every tile."""
    if C.counted:
        args, dealing = args
    rows_ptr, row_count = args[3:5]
    KV_HEADS: gl.constexpr = S.HEADS // S.GROUP
    stage = 0
    phase = 0
    tile_phase = 0
    count = row_count * KV_HEADS
    place = place_of(0)
    row = row_fields(rows_ptr, place, count, KV_HEADS)
    if C.counted:
        side = 0
        side_phase = 0
        while place < count:
            state = (stage, phase, tile_phase)
            sums, state = _differentiate_tile(
                state, row, place, count, args, S, C, WEIGHT, D_SCORE, ME
            )
            stage, phase, tile_phase = state
            # Not at the top as in `load_queries`: registers are scarce in between.
            next_place = handed_out(dealing, side, side_phase, C.warps)
            side, side_phase = next_slot(side, side_phase, 2)
            ahead = row_fields(rows_ptr, next_place, count, KV_HEADS)
            _store_tile(sums, row, args, S, C, WEIGHT, ME)
            place = next_place
            row = ahead
    else:
        for step in range(gl.cdiv(count, gl.num_programs(0))):
            ahead = row_fields(rows_ptr, place_of(step + 1), count, KV_HEADS)
            state = (stage, phase, tile_phase)
            sums, state = _differentiate_tile(
                state, row, place_of(step), count, args, S, C, WEIGHT, D_SCORE, ME
            )
            stage, phase, tile_phase = state
            _store_tile(sums, row, args, S, C, WEIGHT, ME)
            row = ahead


@gluon.jit
def _differentiate_tile(
    rings, row, place, count, args, S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr,
    D_SCORE: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """(sums, state) of a tile.

    The queries of the heads of a group follow each other as one long row of blocks.
    """
    rows_ptr, row_count, meets = args[3:6]
    scale, scale_log2, left, right, buffers, barriers = args[6:]
    k_buffer, v_buffer, q_buffer, do_buffer = buffers[:4]
    tile_full, tile_empty, q_full, q_empty, do_full, do_empty, landed = barriers
    head, k_start, k_end, q_start, q_end, shift = row
    stage, phase, tile_phase = rings
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, S.BLOCK, 16])
    ROWS: gl.constexpr = C.part_q
    KV_HEADS: gl.constexpr = S.HEADS // S.GROUP
    # Registers for K and V, which shared memory then need not bring for every block.
    HELD: gl.constexpr = S.PAD_D == 64
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    first_k = k_start + ME * ROWS
    dk = no_sums(ROWS, S.D, S, C)
    dv = no_sums(ROWS, S.DV, S, C)
    factor_n = 1.0
    if WEIGHT is not None:
        factor_n = factor_of_place(meets, rows_ptr, place, count, KV_HEADS)
    if q_start < q_end:
        mbarrier.wait(tile_full, tile_phase)
        tile_phase ^= 1
        k = k_buffer.index(ME)
        v = v_buffer.index(ME)
        if HELD:
            k = k.load(LEFT)
            v = v.load(LEFT)

        if S.GROUPS:
            blocks = blocks_to_walk(buffers[-1])
            rule = (0, 0, 0, 0, 0)  # a tuple cannot hold None
            if S.RULED:
                rule = read_rule(buffers[-1])
            band = (first_k, q_end, rule, shift, left, right)
            state = (dk, dv, stage, phase)
            if blocks > 0:
                mbarrier.wait(q_full.index(stage), phase)
                state = _walk(
                    state, k, v, buffers, barriers, q_start, q_end, band, blocks - 1,
                    scale_log2, factor_n, S, C, WEIGHT, D_SCORE, SCORES, HELD,
                )  # fmt: skip
            else:
                mbarrier.arrive(tile_empty)
        else:
            whole_start, whole_end = whole_blocks(
                k_start, k_end, q_start, q_end, shift, left, right,
                S.HAS_LEFT, S.HAS_RIGHT, S.BLOCK,
            )  # fmt: skip
            band = (first_k, q_end, whole_start, whole_end, shift, left, right)
            mbarrier.wait(q_full.index(stage), phase)
            left_over = S.GROUP * gl.cdiv(q_end - q_start, S.BLOCK) - 1
            state = _walk(
                (dk, dv, stage, phase), k, v, buffers, barriers, q_start, q_end, band,
                left_over, scale_log2, factor_n, S, C, WEIGHT, D_SCORE, SCORES, HELD,
            )  # fmt: skip
        dk, dv, stage, phase = state
    return (dk, dv, factor_n), (stage, phase, tile_phase)


@gluon.jit
def _store_tile(
    sums, row, args, S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr,
    ME: gl.constexpr,
):  # fmt: skip
    dk_ptr, dv_ptr, alarm_ptr = args[:3]
    scale = args[6]
    head, k_start, k_end, q_start, q_end, shift = row
    dk, dv, factor_n = sums
    KV_HEADS: gl.constexpr = S.HEADS // S.GROUP
    first_k = k_start + ME * C.part_q
    if first_k < k_end:
        store_head(dk_ptr, times(dk, scale), first_k, k_end, head, KV_HEADS, S.D, alarm_ptr)
        if WEIGHT is not None:
            dv = times(dv, factor_n)
        store_head(dv_ptr, dv, first_k, k_end, head, KV_HEADS, S.DV, alarm_ptr)


@gluon.jit
def _walk(
    state, k, v, buffers, barriers, q_start, q_end, band, left_over, scale_log2, factor_n,
    S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr, D_SCORE: gl.constexpr,
    SCORES: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """dK and dV of a tile whose K and V are there, and the first block's Q; `left_over`: blocks
    after that."""
    q_buffer = buffers[2]
    tile_full, tile_empty, q_full, q_empty, do_full, do_empty, landed = barriers
    ROWS: gl.constexpr = C.part_q
    BLOCK: gl.constexpr = S.BLOCK
    dk, dv, stage, phase = state
    d_scores = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
    state = (dk, dv, d_scores, stage, phase)
    IN_LOOP: gl.constexpr = _first_in_loop(S, WEIGHT)
    if not IN_LOOP:
        state = _meet(
            state, k, v, buffers, barriers, q_start, band, True, left_over > 0, scale_log2,
            factor_n, S, C, WEIGHT, D_SCORE, SCORES, True,
        )  # fmt: skip
        if HELD:
            # As in `hopper.dq`: not before products have read the registers.
            mbarrier.arrive(tile_empty)
    start = q_start - S.BLOCK if IN_LOOP else q_start
    for block in range(0 if IN_LOOP else 1, left_over + 1):
        first = block == 0 if IN_LOOP else False
        start += S.BLOCK
        start = gl.where(start < q_end, start, q_start)
        state = _meet(
            state, k, v, buffers, barriers, start, band, first, block < left_over, scale_log2,
            factor_n, S, C, WEIGHT, D_SCORE, SCORES, False,
        )  # fmt: skip
        if IN_LOOP and HELD:
            mbarrier.arrive(tile_empty, pred=first)
    dk, dv, d_scores, stage, phase = state
    if not HELD:
        mbarrier.arrive(tile_empty)
    factor = left_factor(d_scores, dk, q_buffer.dtype)
    dk = add_product(factor, q_buffer.index(stage), dk, S.D)
    dk, factor = wait_for(0, dk, (factor,))
    mbarrier.arrive(q_empty.index(stage))
    stage, phase = next_slot(stage, phase, C.stages)
    return dk, dv, stage, phase


@gluon.constexpr_function
def _first_in_loop(S, WEIGHT):
    """Whether a tile's first block is met in the loop over the others, by one product with zeros
    more: where code for it alone would not fit the instruction cache beside the loop's.

    Softmax over lists at head_dim 64 would fit either way, and has to: in one loop ptxas 12.8 gives
    the weights of a block the registers of V, which the next block's products still read."""
    return WEIGHT is not None or (S.GROUPS and S.PAD_D > 64)


@gluon.jit
def _meet(
    state, k, v, buffers, barriers, start, band, first, more, scale_log2, factor_n,
    S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr, D_SCORE: gl.constexpr,
    SCORES: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    if WEIGHT is None:
        state = meet_softmax(
            state, k, v, buffers, barriers, start, band, first, more, scale_log2,
            S, C, SCORES, FIRST,
        )  # fmt: skip
    else:
        state = meet_pointwise(
            state, k, v, buffers, barriers, start, band, first, more, scale_log2, factor_n,
            S, C, WEIGHT, D_SCORE, SCORES, FIRST,
        )  # fmt: skip
    return state
