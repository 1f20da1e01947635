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
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jagged_kernels.attention.hopper import one_pass_order as order
from jagged_kernels.attention.hopper.blocks import (
    left_factor,
    load_numbers,
    next_slot,
    one_barrier,
    plan,
    product_with_transpose,
    ring_of_barriers,
    size_of_sums,
    store_tile,
    token_blocks,
    visible_band,
    whole_blocks,
    zero_rows,
)
from jagged_kernels.attention.plans import Call
from jagged_kernels.core.backends import multiprocessors
from jagged_kernels.core.launch import launch
from jagged_kernels.device.arithmetic import LOG2_E
from jagged_kernels.schedule.policy.hopper import HopperConfig, one_pass_config, ring_blocks

_LANES = gl.constexpr(32)
# What a block's count of adds becomes when it was the last.
_DONE = gl.constexpr(1 << 30)

# They take no layouts, and so they are the same in Gluon.
_blocks_of_tile = gluon.jit(order.blocks_of_tile.fn)
_place_of_step = gluon.jit(order.place_of_step.fn)
_tile_of_place = gluon.jit(order.tile_of_place.fn)
_start_of_tile = gluon.jit(order.start_of_tile.fn)
_turn_of_tile = gluon.jit(order.turn_of_tile.fn)


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
    ordered: bool = True,
    config: HopperConfig | None = None,
    ring: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) for what `choice.HOPPER_ONE_PASS` takes.

    Args:
        lse2, delta: [T, H] float32, contiguous.
        rows_t: tiles of `config.tile_q` keys.
        offsets: [B + 1] of queries and keys alike.
        alarm: as for `launch_dq`, of all three.
        ordered: False adds to dQ as it comes: it differs from run to run, and needs float32 numbers
            for all of it.
        config, ring: in place of the rules'.
    """
    heads, dim = q.shape[1:]
    config = config or one_pass_config(dim)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    part_k, block = config.part_q, config.block
    constants, options = plan(call.mirrored, config)
    kv_heads = k.shape[1]
    blocks = rows_t.shape[0] * heads * (config.tile_q // block)
    if ordered:
        blocks_of_sums = ring or ring_blocks(blocks, k.shape[0], heads // kv_heads, dim, config)
        sums = torch.empty((blocks_of_sums, block * dim), dtype=torch.float32, device=q.device)
        counts = torch.zeros(blocks, dtype=torch.int32, device=q.device)
    else:
        blocks_of_sums = blocks
        sums = torch.zeros((blocks, block * dim), dtype=torch.float32, device=q.device)
        counts = None
    places = rows_t.shape[0] * kv_heads
    launch(
        _one_pass_kernel,
        min(multiprocessors(k.device) * config.residents, places),
        (
            lse2, delta, dq, dk, dv, alarm, sums, counts, rows_t, offsets,
            rows_t.shape[0], blocks_of_sums, token_blocks(k, part_k), token_blocks(v, part_k),
            token_blocks(q, block), token_blocks(d_o, block),
            call.scale, call.scale * LOG2_E, right, left,
        ),
        {**constants, "ORDERED": ordered},
        # Who waits for a turn waits for other programs.
        **options, launch_cooperative_grid=ordered,
    )  # fmt: skip
    if not ordered:
        launch(
            _convert_kernel,
            places,
            (dq, alarm, sums, rows_t, offsets, rows_t.shape[0], call.scale, right, left),
            constants,
            num_warps=config.warps,
        )
    return dq, dk, dv


@gluon.jit(do_not_specialize=["row_count", "ring", "left", "right"])
def _one_pass_kernel(
    lse2_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, alarm_ptr, sums_ptr, counts_ptr, rows_ptr,
    offsets_ptr, row_count, ring, k_blocks, v_blocks, q_blocks, do_blocks,
    scale, scale_log2, left, right,
    S: gl.constexpr, C: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """
    Args:
        sums_ptr: [ring, BLOCK * D] float32, blocks of dQ in the making.
        counts_ptr: int32 for each block of all pairs, 0: how many tiles have added.
        ring: blocks in `sums_ptr`.
        ORDERED: False adds when it comes, to zeros, and leaves dq of users with several tiles to
            `_convert_kernel`; the ring has all blocks then, and there are no counts.
    """
    dtype: gl.constexpr = q_blocks.dtype
    TILE: gl.constexpr = [C.consumers, C.part_q, S.D]
    RING: gl.constexpr = [C.stages, S.BLOCK, S.D]
    NUMBERS: gl.constexpr = [C.stages, S.BLOCK]
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C.part_q, S.BLOCK], dtype)
    buffers = (
        gl.allocate_shared_memory(dtype, TILE, k_blocks.layout),
        gl.allocate_shared_memory(dtype, TILE, v_blocks.layout),
        gl.allocate_shared_memory(dtype, RING, q_blocks.layout),
        gl.allocate_shared_memory(dtype, RING, do_blocks.layout),
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
        ring_of_barriers(C.stages, 1 + _LANES),
        ring_of_barriers(C.stages, C.consumers),
        ring_of_barriers(C.stages, 1),  # dO is there
        ring_of_barriers(C.stages, C.consumers),
        ring_of_barriers(2, C.consumers),  # dS of all keys of the tile is there
        one_barrier(1),  # it is the tile's turn, says a note
        one_barrier(C.consumers),  # it has added
        one_barrier(1),  # what ends at a user's end is there, with rows of the next one
    )
    fence_async_shared()
    descriptors = (k_blocks, v_blocks, q_blocks, do_blocks)
    tables = (rows_ptr, offsets_ptr, row_count, left, right)
    load = (descriptors, lse2_ptr, delta_ptr, tables, buffers, notes, barriers)
    take_turns = (counts_ptr, tables, ring, notes, barriers)
    differentiate = (
        dq_ptr, dk_ptr, dv_ptr, alarm_ptr, sums_ptr, left, right, scale, scale_log2,
        buffers, notes, barriers,
    )  # fmt: skip
    if C.consumers == 1:
        gl.warp_specialize(
            [
                (_differentiate, (differentiate, S, C, 0)),
                (_load, (load, S, C)),
                (_take_turns, (take_turns, S, C, ORDERED)),
            ],
            [1, 1],
            [24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_differentiate, (differentiate, S, C, 0)),
                (_differentiate, (differentiate, S, C, 1)),
                (_load, (load, S, C)),
                (_take_turns, (take_turns, S, C, ORDERED)),
            ],
            [C.warps, 1, 1],
            [C.registers, 24, 24],
        )


@gluon.jit
def _tile(tables, step, S: gl.constexpr, C: gl.constexpr):
    """`tile_of_place` of this program's tile number `step`."""
    rows_ptr, offsets_ptr, row_count, left, right = tables
    KV_HEADS: gl.constexpr = S.HEADS // S.GROUP
    place = _place_of_step(step, gl.program_id(0), gl.num_programs(0), S.HAS_LEFT, S.HAS_RIGHT)
    return _tile_of_place(
        rows_ptr, offsets_ptr, place, row_count, left, right,
        KV_HEADS, S.GROUP, S.HAS_LEFT, S.HAS_RIGHT, C.tile_q, S.BLOCK,
    )  # fmt: skip


@gluon.jit
def _tell(notes, number: gl.constexpr, value):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [_LANES], [1], [0])
    notes.index(number).store(gl.full([1], 0, gl.int32, LAYOUT) + value)


@gluon.jit
def _told(note, WARPS: gl.constexpr):
    return gl.sum(note.load(gl.BlockedLayout([1], [_LANES], [WARPS], [0])), 0)


@gluon.jit
def _load(args, S: gl.constexpr, C: gl.constexpr):
    """Brings each tile's K and V, and Q, dO, lse2 and delta of its queries, head by head.

    Notes are, of a tile, (first key, end of its user, kv head, steps), of 0 steps when there is
    none any more; of a block its first token, or -1 minus that if some of it is hidden.
    """
    descriptors, lse2_ptr, delta_ptr, tables, buffers, notes, barriers = args
    k_blocks, v_blocks, q_blocks, do_blocks = descriptors
    k_buffer, v_buffer, q_buffer, do_buffer, lse2_buffer, delta_buffer, ds_buffer = buffers
    of_tile, of_block, of_turn = notes
    tile_full, tile_empty, q_full, q_empty, do_full, do_empty = barriers[:6]
    landed = barriers[9]
    rows_ptr, offsets_ptr, row_count, left, right = tables
    KV_HEADS: gl.constexpr = S.HEADS // S.GROUP
    TILE: gl.constexpr = C.tile_q
    BLOCK: gl.constexpr = S.BLOCK
    CONSUMERS: gl.constexpr = C.consumers
    TILE_BYTES: gl.constexpr = 2 * CONSUMERS * k_blocks.block_type.nbytes
    BLOCK_BYTES: gl.constexpr = q_blocks.block_type.nbytes
    NOTE: gl.constexpr = gl.BlockedLayout([1], [_LANES], [1], [0])
    stage = 0
    phase = 0
    tile_phase = 0
    tail_phase = 0
    head, tile, tiles, start, length, base = _tile(tables, 0, S, C)
    for step in range(gl.cdiv(row_count * KV_HEADS, gl.num_programs(0))):
        ahead = _tile(tables, step + 1, S, C)
        if tiles > 0:
            k_start = start + tile * TILE
            end = start + length
            first, count = _blocks_of_tile(
                tile, length, left, right, S.HAS_LEFT, S.HAS_RIGHT, TILE, BLOCK
            )
            start_block = _start_of_tile(
                tile, tiles, gl.num_programs(0), S.HAS_LEFT, S.HAS_RIGHT, TILE, BLOCK
            )
            first = start + first * BLOCK
            whole_start, whole_end = whole_blocks(
                k_start, gl.minimum(k_start + TILE, end), first, end, 0, left, right,
                S.HAS_LEFT, S.HAS_RIGHT, BLOCK,
            )  # fmt: skip
            mbarrier.wait(tile_empty, tile_phase ^ 1)
            tile_phase ^= 1
            _tell(of_tile, 0, k_start)
            _tell(of_tile, 1, end)
            _tell(of_tile, 2, head)
            _tell(of_tile, 3, S.GROUP * count)
            short = k_start + TILE > end
            if short:
                mbarrier.expect(landed, TILE_BYTES)
                _load_tile(k_blocks, v_blocks, k_start, head, landed, k_buffer, v_buffer, S, C)
                mbarrier.wait(landed, tail_phase)
                tail_phase ^= 1
                # dQ sums over all keys of the tile, and 0 times what the next user may have is not
                # always 0.
                for consumer in gl.static_range(CONSUMERS):
                    zero_rows(k_buffer.index(consumer), end - k_start - consumer * C.part_q)
                mbarrier.arrive(tile_full)
                # With keys of the next user nothing is whole.
                whole_end = whole_start
            else:
                mbarrier.expect(tile_full, TILE_BYTES)
                _load_tile(k_blocks, v_blocks, k_start, head, tile_full, k_buffer, v_buffer, S, C)
            for member in range(S.GROUP):
                q_head = head * S.GROUP + member
                q_column = q_head * S.Q_STRIDE_H
                do_column = q_head * S.DO_STRIDE_H
                block = start_block
                for _ in range(count):
                    q_start = first + block * BLOCK
                    mbarrier.wait(q_empty.index(stage), phase ^ 1)
                    mbarrier.wait(do_empty.index(stage), phase ^ 1)
                    q = q_buffer.index(stage)
                    d_o = do_buffer.index(stage)
                    q_there = q_full.index(stage)
                    do_there = do_full.index(stage)
                    cut = (q_start < whole_start) | (q_start >= whole_end)
                    note = gl.where(cut, -1 - q_start, q_start)
                    of_block.index(stage).store(gl.full([1], 0, gl.int32, NOTE) + note)
                    load_numbers(
                        lse2_ptr + q_head, delta_ptr + q_head, q_start, end,
                        lse2_buffer.index(stage), delta_buffer.index(stage), q_there, S.HEADS,
                    )  # fmt: skip
                    if q_start + BLOCK > end:
                        mbarrier.expect(landed, 2 * BLOCK_BYTES)
                        tma.async_copy_global_to_shared(q_blocks, [q_start, q_column], landed, q)
                        tma.async_copy_global_to_shared(
                            do_blocks, [q_start, do_column], landed, d_o
                        )
                        mbarrier.wait(landed, tail_phase)
                        tail_phase ^= 1
                        zero_rows(q, end - q_start)
                        mbarrier.arrive(q_there)
                        zero_rows(d_o, end - q_start)
                        mbarrier.arrive(do_there)
                    else:
                        mbarrier.expect(q_there, BLOCK_BYTES)
                        tma.async_copy_global_to_shared(q_blocks, [q_start, q_column], q_there, q)
                        mbarrier.expect(do_there, BLOCK_BYTES)
                        tma.async_copy_global_to_shared(
                            do_blocks, [q_start, do_column], do_there, d_o
                        )
                    stage, phase = next_slot(stage, phase, C.stages)
                    block = gl.where(block + 1 == count, 0, block + 1)
        head, tile, tiles, start, length, base = ahead
    mbarrier.wait(tile_empty, tile_phase ^ 1)
    _tell(of_tile, 3, 0)
    mbarrier.arrive(tile_full)


@gluon.jit
def _load_tile(
    k_blocks, v_blocks, k_start, head, there, k, v, S: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    CONSUMERS: gl.constexpr = C.consumers
    for consumer in gl.static_range(CONSUMERS):
        start = k_start + consumer * C.part_q
        tma.async_copy_global_to_shared(
            k_blocks, [start, head * S.K_STRIDE_H], there, k.index(consumer)
        )
        tma.async_copy_global_to_shared(
            v_blocks, [start, head * S.V_STRIDE_H], there, v.index(consumer)
        )


# What a consumer does with what its tile adds to a block of dQ.
_FIRST = gl.constexpr(0)  # it is the first: store
_ADD = gl.constexpr(1)
_LAST = gl.constexpr(2)  # add, and write dq
_ALONE = gl.constexpr(3)  # write dq


@gluon.jit
def _take_turns(args, S: gl.constexpr, C: gl.constexpr, ORDERED: gl.constexpr):
    """Waits for the tile's turn at each block, and announces when it has added.

    Notes are (what to do, place in the ring, first token, query head).

    The last of a user's blocks may be missing to whole tiles: it is counted all the same, so that
    whoever is to use its place in the ring may wait for it. So are all blocks of a user of one
    tile, which need no place.
    """
    counts_ptr, tables, ring, notes, barriers = args
    rows_ptr, offsets_ptr, row_count, left, right = tables
    of_tile, of_block, of_turn = notes
    my_turn, added = barriers[7], barriers[8]
    KV_HEADS: gl.constexpr = S.HEADS // S.GROUP
    TILE: gl.constexpr = C.tile_q
    BLOCK: gl.constexpr = S.BLOCK
    RATIO: gl.constexpr = TILE // BLOCK
    phase = 0
    head, tile, tiles, start, length, base = _tile(tables, 0, S, C)
    for step in range(gl.cdiv(row_count * KV_HEADS, gl.num_programs(0))):
        ahead = _tile(tables, step + 1, S, C)
        if tiles > 0:
            first, count = _blocks_of_tile(
                tile, length, left, right, S.HAS_LEFT, S.HAS_RIGHT, TILE, BLOCK
            )
            start_block = _start_of_tile(
                tile, tiles, gl.num_programs(0), S.HAS_LEFT, S.HAS_RIGHT, TILE, BLOCK
            )
            for member in range(S.GROUP):
                base_of_head = base + member * tiles * RATIO
                block = start_block
                seen = -1
                for _ in range(count):
                    turn, turns = _turn_of_tile(
                        tile, first + block, tiles, gl.num_programs(0), left, right,
                        S.HAS_LEFT, S.HAS_RIGHT, TILE, BLOCK,
                    )  # fmt: skip
                    q_start = start + (first + block) * BLOCK
                    number = base_of_head + first + block
                    place = number
                    what = gl.where(tiles == 1, _ALONE, _ADD)
                    if ORDERED:
                        place = number % ring
                        what = gl.where(turn == 0, _FIRST, what)
                        if turn + 1 == turns:
                            what = gl.where(turn == 0, _ALONE, _LAST)
                        at, least = _wanted(number, turn, ring)
                        while seen < least:
                            seen = _count(counts_ptr + at)
                    _tell(of_turn, 0, what)
                    _tell(of_turn, 1, place)
                    _tell(of_turn, 2, q_start)
                    _tell(of_turn, 3, head * S.GROUP + member)
                    mbarrier.arrive(my_turn)
                    block = gl.where(block + 1 == count, 0, block + 1)
                    if ORDERED:
                        # The next count is on its way meanwhile; what was last seen is enough if
                        # it is the tile's turn there by now.
                        next_turn, _ = _turn_of_tile(
                            tile, first + block, tiles, gl.num_programs(0), left, right,
                            S.HAS_LEFT, S.HAS_RIGHT, TILE, BLOCK,
                        )  # fmt: skip
                        at, least = _wanted(base_of_head + first + block, next_turn, ring)
                        seen = _count(counts_ptr + at)
                    mbarrier.wait(added, phase)
                    phase ^= 1
                    if ORDERED:
                        more = gl.where(turn + 1 == turns, _DONE, 1)
                        gl.atomic_add(counts_ptr + number, more, sem="release", scope="gpu")
            if ORDERED:
                for member in range(S.GROUP):
                    # Of one tile: the last.
                    for block in range(gl.cdiv(length, BLOCK), (tile + 1) * RATIO):
                        number = base + member * tiles * RATIO + block
                        at, least = _wanted(number, 0, ring)
                        while _count(counts_ptr + at) < least:
                            pass
                        gl.atomic_add(counts_ptr + number, _DONE, sem="release", scope="gpu")
        head, tile, tiles, start, length, base = ahead


@gluon.jit
def _wanted(number, turn, ring):
    """(at, least): it is the turn at a block when the count at `at` is `least` or more. The first
    waits for the block that was at the same place of the ring, if there was one."""
    again = (turn == 0) & (number >= ring)
    return gl.where(again, number - ring, number), gl.where(again, _DONE, turn)


@gluon.jit
def _count(ptr):
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr.to(gl.int64)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


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
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, S.D, 16])
    ROWS: gl.constexpr = C.part_q
    BLOCK: gl.constexpr = S.BLOCK
    D: gl.constexpr = S.D
    KV_HEADS: gl.constexpr = S.HEADS // S.GROUP
    HELD: gl.constexpr = _holds(S)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    out = (dq_ptr, alarm_ptr, sums_ptr, scale)
    stage = 0
    phase = 0
    side = 0
    side_phase = 0
    turn_phase = 0
    mbarrier.wait(tile_full, 0)
    tile_phase = 1
    steps = _told(of_tile.index(3), C.warps)
    while steps > 0:
        first_k = _told(of_tile.index(0), C.warps) + ME * ROWS
        end = _told(of_tile.index(1), C.warps)
        head = _told(of_tile.index(2), C.warps)
        band = (first_k, end, left, right)
        dk = gl.zeros([ROWS, D], gl.float32, OUTPUT)
        dv = gl.zeros([ROWS, D], gl.float32, OUTPUT)
        k = 0  # a tuple cannot hold None
        v = 0
        all_k = 0
        kept = 0
        if HELD:
            k = k_buffer.index(ME).load(LEFT)
            kept = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
            if C.turned:
                all_k = _all_keys(k_buffer, S, C)
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
        dq = _product_of_dq(ds_buffer, k_buffer, all_k, side, S, C, ME)
        ds = _weights_of_dk(kept, ds_buffer, side, dk, S, C, ME)
        dk = warpgroup_mma(ds, q_buffer.index(stage), dk, is_async=True)
        dk, ds, dq = warpgroup_mma_wait(0, deps=[dk, ds, dq])
        mbarrier.arrive(tile_empty)
        mbarrier.arrive(q_empty.index(stage))
        turn_phase = _add(dq, end, out, notes, barriers, turn_phase, S, C, ME)
        stage, phase = next_slot(stage, phase, C.stages)
        side, side_phase = next_slot(side, side_phase, 2)
        if first_k < end:
            store_tile(dk_ptr, dk * scale, first_k, end, head, KV_HEADS, alarm_ptr)
            store_tile(dv_ptr, dv, first_k, end, head, KV_HEADS, alarm_ptr)
        mbarrier.wait(tile_full, tile_phase)
        tile_phase ^= 1
        steps = _told(of_tile.index(3), C.warps)


@gluon.constexpr_function
def _holds(S):
    """Whether there are registers for K and dS of the block before, and for V or, where dQ is made
    as its transpose, for that of K: shared memory then need not bring them."""
    return S.D == 64


@gluon.constexpr_function
def _layout_of_dq(S, C):
    """Of the share of a consumer: half of dQ's columns, or half of those of its transpose."""
    width = (S.BLOCK if C.turned else S.D) // C.consumers
    return gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, width, 16])


@gluon.jit
def _all_keys(k, S: gl.constexpr, C: gl.constexpr):
    """The transposes of the tile's K as left factors, one for each consumer's keys."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, _layout_of_dq(S, C), 2)
    keys = (k.index(0).permute((1, 0)).load(LEFT),)
    if C.consumers == 2:
        keys = keys + (k.index(1).permute((1, 0)).load(LEFT),)  # noqa: RUF005
    return keys


@gluon.jit
def _product_of_dq(ds, k, all_k, side, S: gl.constexpr, C: gl.constexpr, ME: gl.constexpr):
    """A consumer's share of what the tile adds to a block of dQ, in the making, by one product for
    each consumer's keys: [BLOCK, D / consumers], or [D, BLOCK / consumers] of the transpose."""
    CONSUMERS: gl.constexpr = C.consumers
    ROWS: gl.constexpr = S.D if C.turned else S.BLOCK
    WIDTH: gl.constexpr = (S.BLOCK if C.turned else S.D) // CONSUMERS
    dq = gl.full([ROWS, WIDTH], 0.0, gl.float32, _layout_of_dq(S, C))
    for consumer in gl.static_range(CONSUMERS):
        weights = ds.index(side * CONSUMERS + consumer)
        if C.turned:
            left = all_k[consumer]
            right = weights.slice(ME * WIDTH, WIDTH, 1)
        else:
            left = weights.permute((1, 0))
            right = k.index(consumer).slice(ME * WIDTH, WIDTH, 1)
        dq = warpgroup_mma(left, right, dq, use_acc=consumer > 0, is_async=True)
    return dq


@gluon.jit
def _weights_of_dk(kept, ds, side, dk, S: gl.constexpr, C: gl.constexpr, ME: gl.constexpr):
    """dS of the block before, as the left factor of what it adds to dK."""
    # Not at the end of the loop: halves carried around it are taken apart and packed again.
    return left_factor(kept, dk, ds.dtype) if _holds(S) else ds.index(side * C.consumers + ME)


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
    if not _holds(S):
        k = k_buffer.index(ME + stage // 64)
    if C.turned or not _holds(S):
        v = v_buffer.index(ME + stage // 64)
    scores = product_with_transpose(k, q_buffer.index(stage), SCORES)
    if not FIRST:
        mbarrier.wait(ds_full.index(side), side_phase)
        dq = _product_of_dq(ds_buffer, k_buffer, all_k, side, S, C, ME)
        ds = _weights_of_dk(kept, ds_buffer, side, dk, S, C, ME)
        dk = warpgroup_mma(ds, q_buffer.index(before), dk, is_async=True)
        side, side_phase = next_slot(side, side_phase, 2)
    note = _told(of_block.index(stage), C.warps)
    scores = warpgroup_mma_wait(0 if FIRST else C.consumers + 1, deps=[scores])
    lse2 = gl.expand_dims(lse2_buffer.index(stage).load(COLUMN), 0)
    exponent = scores * scale_log2 - lse2
    if note < 0:
        exponent = _mask(exponent, -1 - note, band, S, float("-inf"))
    probabilities = gl.exp2(exponent)
    # Here because that wait is a loop: across it the assembler does not move the end of products.
    mbarrier.wait(do_full.index(stage), phase)
    if not FIRST:
        dq = warpgroup_mma_wait(1, deps=[dq])
        turn_phase = _add(dq, band[1], out, notes, barriers, turn_phase, S, C, ME)
        dk, ds = warpgroup_mma_wait(0, deps=[dk, ds])
        mbarrier.arrive(q_empty.index(before))
    d_o = do_buffer.index(stage)
    d_probabilities = product_with_transpose(v, d_o, SCORES)
    weights = left_factor(probabilities, dv, dtype)
    dv = warpgroup_mma(weights, d_o, dv, is_async=True)
    d_probabilities = warpgroup_mma_wait(1, deps=[d_probabilities])
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
    dv, weights = warpgroup_mma_wait(0, deps=[dv, weights])
    mbarrier.arrive(do_empty.index(stage))
    if _holds(S):
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


@gluon.jit
def _add(
    dq, end, out, notes, barriers, turn_phase, S: gl.constexpr, C: gl.constexpr, ME: gl.constexpr
):  # fmt: skip
    """Adds a consumer's share to a block of dQ when it is the tile's turn."""
    dq_ptr, alarm_ptr, sums_ptr, scale = out
    of_turn = notes[2]
    my_turn, added = barriers[7], barriers[8]
    PART: gl.constexpr = S.BLOCK * S.D // C.consumers
    FLAT: gl.constexpr = gl.BlockedLayout([4], [_LANES], [C.warps], [0])
    LAYOUT: gl.constexpr = dq.type.layout
    mbarrier.wait(my_turn, turn_phase)
    what = _told(of_turn.index(0), C.warps)
    place = _told(of_turn.index(1), C.warps) * C.consumers + ME
    address = sums_ptr + place.to(gl.int64) * PART + gl.arange(0, PART, FLAT)
    if what == _ADD:
        gl.atomic_add(address, _flat(dq, FLAT), sem="relaxed")
    elif what == _FIRST:
        gl.store(address, _flat(dq, FLAT))
    else:
        if what == _LAST:
            flat = gl.load(address, cache_modifier=".cg")
            dq += _block(flat, LAYOUT)
        q_start = _told(of_turn.index(2), C.warps)
        head = _told(of_turn.index(3), C.warps)
        _write(dq * scale, dq_ptr, alarm_ptr, q_start, end, head, S, C, ME)
    mbarrier.arrive(added)
    return turn_phase ^ 1


@gluon.jit
def _flat(x, LAYOUT: gl.constexpr):
    """[64, N] as a product leaves it in a warpgroup's registers: the numbers of a thread four by
    four, those of threads next to each other. So no data moves, and every thread adds 16 bytes."""
    N: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, N // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([64 * N])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _block(flat, LAYOUT: gl.constexpr):
    """`_flat` undone."""
    N: gl.constexpr = flat.shape[0] // 64
    x = flat.reshape([N // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(x.reshape([64, N]), LAYOUT, assert_trivial=True)


@gluon.jit
def _write(
    share, ptr, alarm_ptr, start, end, head, S: gl.constexpr, C: gl.constexpr, ME: gl.constexpr
):  # fmt: skip
    """Stores a consumer's share of a block of dQ, which starts at token `start`."""
    block = share.to(ptr.dtype.element_ty)
    first_column = 0
    if C.turned:
        block = block.permute((1, 0))
        BY_TOKEN: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        block = gl.convert_layout(block, BY_TOKEN)
        start += ME * block.shape[0]
    else:
        first_column = ME * block.shape[1]
    COLUMNS: gl.constexpr = block.shape[1]
    LAYOUT: gl.constexpr = block.type.layout
    token = start + gl.arange(0, block.shape[0], gl.SliceLayout(1, LAYOUT))
    own = token < end
    token = gl.expand_dims(token, 1)
    column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)), 0)
    address = ptr + (token.to(gl.int64) * S.HEADS + head) * S.D + (first_column + column)
    gl.store(address, block, mask=token < end)
    if alarm_ptr is not None:
        sizes = size_of_sums(block.to(gl.float32))
        alarms = alarm_ptr + gl.zeros([block.shape[0]], gl.int32, gl.SliceLayout(1, LAYOUT))
        gl.store(alarms, 1, mask=~(sizes < float("inf")) & own)


@gluon.jit(do_not_specialize=["row_count", "left", "right"])
def _convert_kernel(
    dq_ptr, alarm_ptr, sums_ptr, rows_ptr, offsets_ptr, row_count, scale, left, right,
    S: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """dq of the queries of a tile, of sums that were added up in no order."""
    CONSUMERS: gl.constexpr = C.consumers
    KV_HEADS: gl.constexpr = S.HEADS // S.GROUP
    TILE: gl.constexpr = C.tile_q
    BLOCK: gl.constexpr = S.BLOCK
    RATIO: gl.constexpr = TILE // BLOCK
    PART: gl.constexpr = BLOCK * S.D // CONSUMERS
    FLAT: gl.constexpr = gl.BlockedLayout([4], [_LANES], [C.warps], [0])
    LAYOUT: gl.constexpr = _layout_of_dq(S, C)
    head, tile, tiles, start, length, base = _tile_of_place(
        rows_ptr, offsets_ptr, gl.program_id(0), row_count, left, right,
        KV_HEADS, S.GROUP, S.HAS_LEFT, S.HAS_RIGHT, TILE, BLOCK,
    )  # fmt: skip
    if tiles > 1:
        for index in range(S.GROUP * RATIO):
            member = index // RATIO
            block = tile * RATIO + index % RATIO
            if block * BLOCK < length:
                number = base + member * tiles * RATIO + block
                for part in gl.static_range(CONSUMERS):
                    place = number.to(gl.int64) * CONSUMERS + part
                    flat = gl.load(sums_ptr + place * PART + gl.arange(0, PART, FLAT))
                    dq = _block(flat, LAYOUT)
                    _write(
                        dq * scale, dq_ptr, alarm_ptr, start + block * BLOCK, start + length,
                        head * S.GROUP + member, S, C, part,
                    )  # fmt: skip
