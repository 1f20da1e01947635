"""dQ, dK and dV in one pass for Hopper, five products a block of scores.

A program holds a tile of one user's keys for one head, as in `hopper.dkv`. Both consumers put their
dS into shared memory, and each makes half of the columns of what the whole tile adds to a block of
dQ. Blocks of dQ are added up in float32, in a ring of blocks that one (user, head) pair uses after
another: who has the first turn at a block stores, others add, the last writes dQ
(`one_pass_order`). Where a user has one tile, it is first and last, and dQ leaves the registers.

Other warps wait for turns and work out where things are: consumers have no registers for that.
Their loop, per block of queries: S; then dQ and dK of the block before, under which probabilities
are made and dQ is added; then dP and dV, under which dS is.
"""

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
    warpgroup_mma_wait,
)

from jagged_kernels.attention.hopper.blocks import (
    LANES,
    new_dealing,
    next_slot,
    one_barrier,
    plan,
    programs,
    ring_of_barriers,
    token_blocks,
    told,
    visible_band,
)
from jagged_kernels.attention.hopper.heads import (
    add_product,
    boxes,
    left_factor,
    no_sums,
    pieces,
    product_with_transpose,
    store_head,
    times,
    wait_for,
)
from jagged_kernels.attention.hopper.one_pass_sums import (
    add,
    all_keys,
    holds,
    product_of_dq,
)
from jagged_kernels.attention.hopper.one_pass_warps import load, take_turns
from jagged_kernels.attention.meeting import RANGES
from jagged_kernels.attention.plans import Call
from jagged_kernels.core.launch import launch
from jagged_kernels.device.arithmetic import LOG2_E
from jagged_kernels.schedule.policy.hopper import HopperConfig, one_pass_config, ring_blocks


def launch_one_pass(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse2: Tensor,
    delta: Tensor,
    rows_t: Tensor,
    offsets: Tensor,
    call: Call,
    alarm: Tensor | None,
    *,
    left: int,
    right: int,
    config: HopperConfig | None = None,
    ring: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) for what `choice.HOPPER_ONE_PASS` takes.

    Args:
        lse2, delta: [T, H] float32, contiguous.
        rows_t: tiles of `config.tile_q` keys.
        offsets: [B + 1] of queries and keys alike.
        alarm: as for `launch_dq`, of all three.
        config, ring: in place of the rules'.
    """
    heads, dim = q.shape[1:]
    config = config or one_pass_config(dim)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    part_k, block = config.part_q, config.block
    constants, options = plan(call.mirrored, config, RANGES.constants)
    kv_heads = k.shape[1]
    blocks = rows_t.shape[0] * heads * (config.tile_q // block)
    ring = ring or ring_blocks(blocks, k.shape[0], heads // kv_heads, dim, config)
    sums = torch.empty((ring, block * constants["S"].PAD_D), dtype=torch.float32, device=q.device)
    counts = torch.zeros(1 + blocks, dtype=torch.int32, device=q.device)
    launch(
        _one_pass_kernel,
        programs(k.device, config, rows_t.shape[0] * kv_heads),
        (
            lse2, delta, dq, dk, dv, alarm, sums, counts, rows_t, offsets,
            rows_t.shape[0], ring, token_blocks(k, part_k), token_blocks(v, part_k),
            token_blocks(q, block), token_blocks(d_o, block),
            call.scale, call.scale * LOG2_E, right, left,
        ),
        constants,
        # Who waits for a turn waits for other programs.
        **options, launch_cooperative_grid=True,
    )  # fmt: skip
    return dq, dk, dv


@gluon.jit(do_not_specialize=["row_count", "ring", "left", "right"])
def _one_pass_kernel(
    lse2_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, alarm_ptr, sums_ptr, counts_ptr, rows_ptr,
    offsets_ptr, row_count, ring, k_blocks, v_blocks, q_blocks, do_blocks,
    scale, scale_log2, left, right,
    S: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """
    Args:
        sums_ptr: [ring, BLOCK * PAD_D] float32, blocks of dQ in the making.
        counts_ptr: int32, zeros: how many tiles programs have taken, after one each; then, for each
            block of all pairs, how many tiles have added.
        ring: blocks in `sums_ptr`.
    """
    dtype: gl.constexpr = q_blocks.dtype
    NUMBERS: gl.constexpr = [C.stages, S.BLOCK]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.part_q, S.BLOCK], dtype)
    buffers = (
        boxes(C.consumers, C.part_q, S, dtype),
        boxes(C.consumers, C.part_q, S, dtype),
        boxes(C.stages, S.BLOCK, S, dtype),
        boxes(C.stages, S.BLOCK, S, dtype),
        gl.allocate_shared_memory(gl.float32, NUMBERS, PLAIN),
        gl.allocate_shared_memory(gl.float32, NUMBERS, PLAIN),
        gl.allocate_shared_memory(dtype, [2 * C.consumers, C.part_q, S.BLOCK], WEIGHTS),
    )
    # What other warps tell the consumers, who have no registers to find it out themselves.
    notes = (
        gl.allocate_shared_memory(gl.int32, [4, 1], PLAIN),  # of a tile
        gl.allocate_shared_memory(gl.int32, [C.stages, 1], PLAIN),  # of a block
        gl.allocate_shared_memory(gl.int32, [4, 1], PLAIN),  # of a turn
    )
    barriers = (
        one_barrier(1),  # the tile's K, V and note are there
        one_barrier(C.consumers),  # they may be overwritten
        # Q and its note are there, and lane by lane lse2 and delta
        ring_of_barriers(C.stages, 1 + LANES),
        ring_of_barriers(C.stages, C.consumers),
        ring_of_barriers(C.stages, 1),  # dO is there
        ring_of_barriers(C.stages, C.consumers),
        ring_of_barriers(2, C.consumers),  # dS of all keys of the tile is there
        one_barrier(1),  # it is the tile's turn, says a note
        one_barrier(C.consumers),  # it has added
        one_barrier(1),  # what ends at a user's end is there, with rows of the next one
    )
    dealing = new_dealing(1)
    fence_async_shared()
    descriptors = (k_blocks, v_blocks, q_blocks, do_blocks)
    tables = (rows_ptr, offsets_ptr, row_count, ring, left, right)
    to_load = (
        descriptors, lse2_ptr, delta_ptr, counts_ptr, tables, buffers, notes, barriers, dealing,
    )  # fmt: skip
    to_take = (counts_ptr + 1, tables, notes, barriers, dealing)
    to_differentiate = (
        dq_ptr, dk_ptr, dv_ptr, alarm_ptr, sums_ptr, left, right, scale, scale_log2,
        buffers, notes, barriers,
    )  # fmt: skip
    if C.consumers == 1:
        gl.warp_specialize(
            [
                (_differentiate, (to_differentiate, S, C, 0)),
                (load, (to_load, S, C)),
                (take_turns, (to_take, S, C)),
            ],
            [1, 1],
            [24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_differentiate, (to_differentiate, S, C, 0)),
                (_differentiate, (to_differentiate, S, C, 1)),
                (load, (to_load, S, C)),
                (take_turns, (to_take, S, C)),
            ],
            [C.warps, 1, 1],
            [C.registers, 24, 24],
        )


@gluon.jit
def _differentiate(args, S: gl.constexpr, C: gl.constexpr, ME: gl.constexpr):
    """One consumer: the keys from ME * ROWS to (ME + 1) * ROWS of every tile, and of what all keys
    of a tile add to dQ the same part of the columns.

    The queries of the heads of a group follow each other as one long row of blocks.
    """
    dq_ptr, dk_ptr, dv_ptr, alarm_ptr, sums_ptr, left, right = args[:7]
    scale, scale_log2, buffers, notes, barriers = args[7:]
    k_buffer, v_buffer, q_buffer, do_buffer, lse2_buffer, delta_buffer, ds_buffer = buffers
    of_tile, of_block, of_turn = notes
    tile_full, tile_empty, q_full, q_empty, do_full, do_empty, ds_full = barriers[:7]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, S.BLOCK, 16])
    ROWS: gl.constexpr = C.part_q
    BLOCK: gl.constexpr = S.BLOCK
    KV_HEADS: gl.constexpr = S.HEADS // S.GROUP
    HELD: gl.constexpr = holds(S)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    out = (dq_ptr, alarm_ptr, sums_ptr, scale)
    stage = 0
    phase = 0
    side = 0
    side_phase = 0
    turn_phase = 0
    mbarrier.wait(tile_full, 0)
    tile_phase = 1
    steps = told(of_tile.index(3), C.warps)
    while steps > 0:
        first_k = told(of_tile.index(0), C.warps) + ME * ROWS
        end = told(of_tile.index(1), C.warps)
        head = told(of_tile.index(2), C.warps)
        band = (first_k, end, left, right)
        dk = no_sums(ROWS, S.D, S, C)
        dv = no_sums(ROWS, S.DV, S, C)
        k = 0  # a tuple cannot hold None
        v = 0
        all_k = 0
        kept = 0
        if HELD:
            k = k_buffer.index(ME).load(LEFT)
            kept = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
            if C.turned:
                all_k = all_keys(k_buffer, S, C)
            else:
                v = v_buffer.index(ME).load(LEFT)
        held = (k, v, all_k)
        mbarrier.wait(q_full.index(stage), phase)
        rings = (stage, phase, side, side_phase, turn_phase)
        state = (dk, dv, kept, rings)
        left_over = steps - 1
        state = _meet(
            state, held, buffers, notes, barriers, band, out, left_over > 0, scale_log2,
            S, C, SCORES, ME, True,
        )  # fmt: skip
        for step in range(left_over):
            state = _meet(
                state, held, buffers, notes, barriers, band, out, step + 1 < left_over, scale_log2,
                S, C, SCORES, ME, False,
            )  # fmt: skip
        dk, dv, kept, rings = state
        stage, phase, side, side_phase, turn_phase = rings
        mbarrier.wait(ds_full.index(side), side_phase)
        dq = product_of_dq(ds_buffer, k_buffer, all_k, side, S, C, ME)
        ds = _weights_of_dk(kept, ds_buffer, side, dk, S, C, ME)
        dk = add_product(ds, q_buffer.index(stage), dk, S.D, HELD)
        dk, ds, dq = wait_for(0, dk, (ds, dq))
        mbarrier.arrive(tile_empty)
        mbarrier.arrive(q_empty.index(stage))
        turn_phase = add(dq, end, out, notes, barriers, turn_phase, S, C, ME)
        stage, phase = next_slot(stage, phase, C.stages)
        side, side_phase = next_slot(side, side_phase, 2)
        if first_k < end:
            store_head(dk_ptr, times(dk, scale), first_k, end, head, KV_HEADS, S.D, alarm_ptr)
            store_head(dv_ptr, dv, first_k, end, head, KV_HEADS, S.DV, alarm_ptr)
        mbarrier.wait(tile_full, tile_phase)
        tile_phase ^= 1
        steps = told(of_tile.index(3), C.warps)


@gluon.jit
def _weights_of_dk(kept, ds, side, dk, S: gl.constexpr, C: gl.constexpr, ME: gl.constexpr):
    """dS of the block before, as the left factor of what it adds to dK."""
    # Not at the end of the loop: halves carried around it are taken apart and packed again.
    return left_factor(kept, dk, ds.dtype) if holds(S) else ds.index(side * C.consumers + ME)


@gluon.jit
def _meet(
    state, held, buffers, notes, barriers, band, out, more, scale_log2,
    S: gl.constexpr, C: gl.constexpr, SCORES: gl.constexpr, ME: gl.constexpr, FIRST: gl.constexpr,
):  # fmt: skip
    """The next block of queries, whose Q is there, adds to dV and gives its dS; the one before adds
    to dK and to dQ.

    So two products are in the making while probabilities are, and one while dS is.
    """
    k_buffer, v_buffer, q_buffer, do_buffer, lse2_buffer, delta_buffer, ds_buffer = buffers
    of_tile, of_block, of_turn = notes
    tile_full, tile_empty, q_full, q_empty, do_full, do_empty, ds_full = barriers[:7]
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORES)
    dtype: gl.constexpr = q_buffer.dtype
    k, v, all_k = held
    dk, dv, kept, rings = state
    stage, phase, side, side_phase, turn_phase = rings
    before = stage
    if not FIRST:
        stage, phase = next_slot(stage, phase, C.stages)
    # Plus 0, which the compiler does not know: addresses that it knew would be worked out before
    # the loop, and be kept where registers are not enough.
    if not holds(S):
        k = k_buffer.index(ME + stage // 64)
    if C.turned or not holds(S):
        v = v_buffer.index(ME + stage // 64)
    scores = product_with_transpose(k, q_buffer.index(stage), S.D, SCORES)
    if not FIRST:
        mbarrier.wait(ds_full.index(side), side_phase)
        dq = product_of_dq(ds_buffer, k_buffer, all_k, side, S, C, ME)
        ds = _weights_of_dk(kept, ds_buffer, side, dk, S, C, ME)
        dk = add_product(ds, q_buffer.index(before), dk, S.D, holds(S))
        side, side_phase = next_slot(side, side_phase, 2)
    note = told(of_block.index(stage), C.warps)
    LATER: gl.constexpr = 0 if FIRST else C.consumers + pieces(S.D)
    scores = warpgroup_mma_wait(LATER, deps=[scores])
    lse2 = gl.expand_dims(lse2_buffer.index(stage).load(COLUMN), 0)
    exponent = scores * scale_log2 - lse2
    if note < 0:
        exponent = _mask(exponent, -1 - note, band, S, float("-inf"))
    probabilities = gl.exp2(exponent)
    # Here because that wait is a loop: across it the assembler does not move the end of products.
    mbarrier.wait(do_full.index(stage), phase)
    if not FIRST:
        dq = warpgroup_mma_wait(pieces(S.D), deps=[dq])
        turn_phase = add(dq, band[1], out, notes, barriers, turn_phase, S, C, ME)
        dk, ds = wait_for(0, dk, (ds,))
        mbarrier.arrive(q_empty.index(before))
    d_o = do_buffer.index(stage)
    d_probabilities = product_with_transpose(v, d_o, S.DV, SCORES)
    weights = left_factor(probabilities, dv, dtype)
    dv = add_product(weights, d_o, dv, S.DV)
    d_probabilities = warpgroup_mma_wait(pieces(S.DV), deps=[d_probabilities])
    delta = gl.expand_dims(delta_buffer.index(stage).load(COLUMN), 0)
    d_scores = probabilities * (d_probabilities - delta)
    if note < 0:
        # What inf or NaN of a query made of a probability 0.
        d_scores = _mask(d_scores, -1 - note, band, S, 0.0)
    # The other half is read no more: by this consumer's products, which have ended, and by the
    # other's, which had before it gave the dS that this one has waited for.
    ds_buffer.index(side * C.consumers + ME).store(d_scores.to(dtype))
    fence_async_shared()
    mbarrier.arrive(ds_full.index(side))
    # The next block's Q is waited for here for the same reason: not before there is dS.
    ahead_stage, ahead_phase = next_slot(stage, phase, C.stages)
    mbarrier.wait(q_full.index(ahead_stage), ahead_phase, pred=more)
    dv, weights = wait_for(0, dv, (weights,))
    mbarrier.arrive(do_empty.index(stage))
    if holds(S):
        kept = d_scores
    return dk, dv, kept, (stage, phase, side, side_phase, turn_phase)


@gluon.jit
def _mask(scores, q_start, band, S: gl.constexpr, HIDDEN: gl.constexpr):
    """HIDDEN where the key does not meet the query, or one of them is another user's."""
    first_k, end, left, right = band
    layout: gl.constexpr = scores.type.layout
    key = gl.expand_dims(first_k + gl.arange(0, scores.shape[0], gl.SliceLayout(1, layout)), 1)
    query = gl.expand_dims(q_start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout)), 0)
    met = visible_band(key, query, end, left, right, S.HAS_LEFT, S.HAS_RIGHT) & (key < end)
    return gl.where(met, scores, HIDDEN)
