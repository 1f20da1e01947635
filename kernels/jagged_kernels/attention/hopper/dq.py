"""dQ for Hopper, and what dK and dV need of each query; see `hopper.backward`."""

# Tuples are taken apart whole, also where a function needs a part.
# ruff: noqa: RUF059

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from jagged_kernels.attention.hopper.blocks import (
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
from jagged_kernels.attention.hopper.dq_blocks import delta_of, end_walk, meet_keys
from jagged_kernels.attention.hopper.dq_loads import load_keys
from jagged_kernels.attention.hopper.heads import boxes, hold, no_sums, store_head, times
from jagged_kernels.attention.hopper.listed import (
    blocks_to_walk,
    read_rule,
    ring_of_notes,
)
from jagged_kernels.attention.hopper.policies import backward_constants
from jagged_kernels.attention.meeting import RANGES, Meeting
from jagged_kernels.attention.plans import Call
from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import empty_as
from jagged_kernels.device.arithmetic import LOG2_E
from jagged_kernels.schedule.policy.hopper import (
    DQ_CONFIG,
    HopperConfig,
)

_LOG2_E = gl.constexpr(LOG2_E)


def launch_dq(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor,
    rows: Tensor,
    call: Call,
    alarm: Tensor | None,
    *,
    left: int,
    right: int,
    meeting: Meeting = RANGES,
    config: HopperConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`plain.dq.launch_dq` for what `choice.HOPPER_DQ` takes.

    Args:
        o, lse2: not read where weights are by a policy; lse2 is a tensor, [0] is enough.
        rows: tiles of `config.tile_q` queries.
        alarm: int32, becomes 1 where a part of dq may have to be computed again
            (`hopper.exact_backward`); None where that cannot be.
        config: in place of the rule's.
    """
    config = config or for_mask(DQ_CONFIG, q, rows, left, right, meeting.constants)
    dq = empty_as(q)
    softmax = meeting.constants.weight is None
    delta = torch.empty_like(lse2) if softmax else None
    part_q, block = config.part_q, config.block
    constants, options = plan(call, config, meeting.constants)
    launch(
        _dq_kernel,
        programs(q.device, config, rows.shape[0] * q.shape[1]),
        (
            lse2, d_lse2, delta, dq, alarm, counter(config, q.device), rows, rows.shape[0],
            token_blocks(q, part_q), token_blocks(d_o, part_q),
            token_blocks(o, part_q) if softmax else None,
            token_blocks(k, block), token_blocks(v, block),
            meeting.arguments, call.scale, call.scale * LOG2_E, left, right,
        ),
        {**constants, **backward_constants(meeting)},
        **options,
    )  # fmt: skip
    return dq, delta


@gluon.jit(do_not_specialize=["row_count", "left", "right"])
def _dq_kernel(
    lse2_ptr, d_lse2_ptr, delta_ptr, dq_ptr, alarm_ptr, taken_ptr, rows_ptr, row_count,
    q_blocks, do_blocks, o_blocks, k_blocks, v_blocks, meets,
    scale, scale_log2, left, right,
    S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr, D_SCORE: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_blocks.dtype
    q_buffer = boxes(C.consumers, C.part_q, S, dtype)
    do_buffer = boxes(C.consumers, C.part_q, S, dtype)
    o_buffer = do_buffer  # a tuple cannot hold None
    if WEIGHT is None:
        o_buffer = boxes(C.consumers, C.part_q, S, dtype)
    buffers = (
        q_buffer,
        do_buffer,
        o_buffer,
        boxes(C.stages, S.BLOCK, S, dtype),
        boxes(C.stages, S.BLOCK, S, dtype),
    )
    barriers = (
        one_barrier(1),  # the tile's Q, dO and O are there
        one_barrier(C.consumers),  # they may be overwritten
        ring_of_barriers(C.stages, 1),  # K is there
        ring_of_barriers(C.stages, C.consumers),
        ring_of_barriers(C.stages, 1),  # V is there
        ring_of_barriers(C.stages, C.consumers),
        one_barrier(1),  # K's last block is there, with rows of the next user
    )
    if S.GROUPS:
        buffers = buffers + (ring_of_notes(C.stages, 1),)  # noqa: RUF005 - Gluon does not unpack
    descriptors = (q_blocks, do_blocks, o_blocks, k_blocks, v_blocks)
    load = (descriptors, rows_ptr, row_count, buffers, barriers)
    if S.GROUPS:
        load = (load, meets)
    differentiate = (
        lse2_ptr, d_lse2_ptr, delta_ptr, dq_ptr, alarm_ptr, rows_ptr, row_count, meets,
        scale, scale_log2, left, right, buffers, barriers,
    )  # fmt: skip
    if C.counted:
        dealing = new_dealing(C.consumers)
        load = (load, taken_ptr, dealing)
        differentiate = (differentiate, dealing)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_differentiate, (differentiate, S, C, WEIGHT, D_SCORE, 0)),
            (_differentiate, (differentiate, S, C, WEIGHT, D_SCORE, 1)),
            (load_keys, (load, S, C, WEIGHT)),
        ],
        [C.warps, 1],
        [C.registers, 24],
    )


@gluon.jit
def _differentiate(
    args, S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr, D_SCORE: gl.constexpr,
    ME: gl.constexpr,
):  # fmt: skip
    """One consumer: the queries from ME * ROWS to (ME + 1) * ROWS of every tile."""
    if C.counted:
        args, dealing = args
    rows_ptr, row_count = args[5:7]
    stage = 0
    phase = 0
    tile_phase = 0
    count = row_count * S.HEADS
    place = place_of(0)
    row = row_fields(rows_ptr, place, count, S.HEADS)
    if C.counted:
        side = 0
        side_phase = 0
        while place < count:
            next_place = handed_out(dealing, side, side_phase, C.warps)
            side, side_phase = next_slot(side, side_phase, 2)
            ahead = row_fields(rows_ptr, next_place, count, S.HEADS)
            state = (stage, phase, tile_phase)
            stage, phase, tile_phase = _differentiate_tile(
                state, row, place, count, args, S, C, WEIGHT, D_SCORE, ME
            )
            place = next_place
            row = ahead
    else:
        for step in range(gl.cdiv(count, gl.num_programs(0))):
            ahead = row_fields(rows_ptr, place_of(step + 1), count, S.HEADS)
            state = (stage, phase, tile_phase)
            stage, phase, tile_phase = _differentiate_tile(
                state, row, place_of(step), count, args, S, C, WEIGHT, D_SCORE, ME
            )
            row = ahead


@gluon.jit
def _differentiate_tile(
    rings, row, place, count, args, S: gl.constexpr, C: gl.constexpr, WEIGHT: gl.constexpr,
    D_SCORE: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    lse2_ptr, d_lse2_ptr, delta_ptr, dq_ptr, alarm_ptr, rows_ptr, row_count, meets = args[:8]
    scale, scale_log2, left, right, buffers, barriers = args[8:]
    q_buffer, do_buffer, o_buffer, k_buffer, v_buffer = buffers[:5]
    tile_full, tile_empty, k_full, k_empty, v_full, v_empty, landed = barriers
    head, q_start, q_end, k_start, k_end, shift = row
    stage, phase, tile_phase = rings
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, S.BLOCK, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    ROWS: gl.constexpr = C.part_q
    BLOCK: gl.constexpr = S.BLOCK
    first_q = q_start + ME * ROWS
    dq = no_sums(ROWS, S.D, S, C)
    if k_start < k_end:
        if WEIGHT is None:
            token = first_q + gl.arange(0, ROWS, ROW)
            own = token < q_end
            number = token.to(gl.int64) * S.HEADS + head
            lse2 = gl.load(lse2_ptr + number, mask=own, other=0.0)
            lse2 = gl.where(lse2 == float("-inf"), 0.0, lse2)
        mbarrier.wait(tile_full, tile_phase)
        tile_phase ^= 1
        if WEIGHT is None:
            delta = delta_of(o_buffer.index(ME), do_buffer.index(ME), ROW)
            if d_lse2_ptr is not None:
                delta -= gl.load(d_lse2_ptr + number, mask=own, other=0.0) * _LOG2_E
            gl.store(delta_ptr + number, delta, mask=own)
            of_query = (lse2, delta)
        else:
            of_query = (factor_of_place(meets, rows_ptr, place, count, S.HEADS), 0.0)
        q = hold(q_buffer.index(ME), S.D, LEFT)
        d_o = hold(do_buffer.index(ME), S.DV, LEFT)

        if S.GROUPS:
            blocks = blocks_to_walk(buffers[-1])
            rule = (0, 0, 0, 0, 0)  # a tuple cannot hold None
            if S.RULED:
                rule = read_rule(buffers[-1])
            band = (first_q, k_end, rule, shift, left, right)
            if blocks > 0:
                mbarrier.wait(k_full.index(stage), phase)
                state = (dq, gl.zeros([ROWS, BLOCK], gl.float32, SCORES), stage, phase)
                state = meet_keys(
                    state, q, d_o, of_query, buffers, barriers, 0, blocks > 1, band, scale_log2,
                    S, C, WEIGHT, D_SCORE, SCORES, True,
                )  # fmt: skip
                mbarrier.arrive(tile_empty)
                for block in range(1, blocks):
                    state = meet_keys(
                        state, q, d_o, of_query, buffers, barriers, 0, block + 1 < blocks, band,
                        scale_log2, S, C, WEIGHT, D_SCORE, SCORES, False,
                    )  # fmt: skip
                dq, stage, phase = end_walk(state, buffers, barriers, S, C)
            else:
                mbarrier.arrive(tile_empty)
        else:
            whole_start, whole_end = whole_blocks(
                q_start, q_end, k_start, k_end, shift, left, right,
                S.HAS_LEFT, S.HAS_RIGHT, S.BLOCK,
            )  # fmt: skip
            band = (first_q, k_end, whole_start, whole_end, shift, left, right)
            mbarrier.wait(k_full.index(stage), phase)
            state = (dq, gl.zeros([ROWS, BLOCK], gl.float32, SCORES), stage, phase)
            state = meet_keys(
                state, q, d_o, of_query, buffers, barriers, k_start, 0, band, scale_log2,
                S, C, WEIGHT, D_SCORE, SCORES, True,
            )  # fmt: skip
            # Q and dO are in registers since before these products, which have ended: now they
            # may be overwritten. Right after their loads is too early: TMA does not wait for
            # loads that are on their way.
            mbarrier.arrive(tile_empty)
            for start in range(k_start + S.BLOCK, k_end, S.BLOCK):
                state = meet_keys(
                    state, q, d_o, of_query, buffers, barriers, start, 0, band, scale_log2,
                    S, C, WEIGHT, D_SCORE, SCORES, False,
                )  # fmt: skip
            dq, stage, phase = end_walk(state, buffers, barriers, S, C)
    if first_q < q_end:
        store_head(dq_ptr, times(dq, scale), first_q, q_end, head, S.HEADS, S.D, alarm_ptr)
    return stage, phase, tile_phase
