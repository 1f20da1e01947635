"""What the forward's warps do where rows walk lists of key blocks; see `hopper.listed`.

As in `hopper.forward`, but that the mask is looked up block by block, and that the loading warp
puts zeros over what of V is the next user's: any block of a list may be the last of the keys.
"""

# Partitions get tuples, and take out of them what they need.
# ruff: noqa: RUF059

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from jagged_kernels.attention.hopper.blocks import next_slot, place_of, row_fields, zero_rows
from jagged_kernels.attention.hopper.forward_stores import store_part
from jagged_kernels.attention.hopper.heads import (
    add_product,
    bring,
    left_factor,
    no_sums,
    pieces,
    product_with_transpose,
    times_by_row,
    tokens_of,
    wait_for,
)
from jagged_kernels.attention.hopper.listed import (
    blocks_to_walk,
    ends_of_list,
    is_tail,
    mask_listed,
    note_blocks,
    note_of_part,
    note_rule,
    parts_of_list,
    read_note,
    read_rule,
    token_of_note,
    token_to_load,
    write_note,
)
from jagged_kernels.attention.hopper.policies import natural_scores
from jagged_kernels.attention.hopper.softmax import online_softmax


@gluon.jit
def load_listed(args, S: gl.constexpr, C: gl.constexpr):
    """Brings each tile's Q, and K and V of its list's blocks, from the last to the first.

    Where a block has two parts and the list an odd number of them, the one that is missing stands
    beside the list's last, which often needs the mask anyway.
    """
    rest, meets = args
    q_blocks, k_blocks, v_blocks, rows_ptr, row_count, buffers, barriers = rest
    q_buffer, k_buffer, v_buffer, notes = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, landed = barriers
    CONSUMERS: gl.constexpr = C.consumers
    PART: gl.constexpr = tokens_of(k_blocks)
    PARTS: gl.constexpr = S.BLOCK // PART
    BYTES: gl.constexpr = PARTS * k_blocks.block_type.nbytes
    stage = 0
    phase = 0
    q_phase = 0
    tail_phase = 0
    count = row_count * S.HEADS
    head, q_start, q_end, k_start, k_end, shift = row_fields(rows_ptr, place_of(0), count, S.HEADS)
    begin, end = ends_of_list(
        meets, rows_ptr, place_of(0), count, q_start, k_end, shift, head, S.HEADS, S
    )
    for step in range(gl.cdiv(count, gl.num_programs(0))):
        ahead = row_fields(rows_ptr, place_of(step + 1), count, S.HEADS)
        if k_start < k_end:
            blocks = gl.cdiv(parts_of_list(begin, end, S.TILE, PART), PARTS)
            after = blocks * PARTS - 1
            first = note_of_part(meets.col, begin, end, after, k_start, k_end, S.TILE, PART)
            second = note_of_part(
                meets.col, begin, end, after - (PARTS - 1), k_start, k_end, S.TILE, PART
            )
            mbarrier.wait(q_empty, q_phase ^ 1)
            note_blocks(notes, blocks)
            if S.RULED:
                note_rule(
                    notes, meets, rows_ptr, place_of(step), count, k_start, k_end, shift,
                    S.HEADS, False,
                )  # fmt: skip
            mbarrier.expect(q_full, CONSUMERS * q_blocks.block_type.nbytes)
            for consumer in gl.static_range(CONSUMERS):
                bring(
                    q_blocks,
                    q_start + consumer * C.part_q,
                    head,
                    q_full,
                    q_buffer.index(consumer),
                    S.Q_STRIDE_H,
                )
            q_phase ^= 1
            kv_head = head // S.GROUP
            for _ in range(blocks):
                slot = stage * PARTS
                start = token_of_note(first)
                start_2 = token_of_note(second)
                k_there = k_full.index(stage)
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                write_note(notes, slot, first)
                if PARTS == 2:
                    write_note(notes, slot + 1, second)
                mbarrier.expect(k_there, BYTES)
                at = token_to_load(start, k_end, PART)
                bring(k_blocks, at, kv_head, k_there, k_buffer.index(slot), S.K_STRIDE_H)
                if PARTS == 2:
                    at = token_to_load(start_2, k_end, PART)
                    bring(k_blocks, at, kv_head, k_there, k_buffer.index(slot + 1), S.K_STRIDE_H)
                # While V's buffer is waited for.
                after -= PARTS
                first = note_of_part(meets.col, begin, end, after, k_start, k_end, S.TILE, PART)
                second = note_of_part(
                    meets.col, begin, end, after - (PARTS - 1), k_start, k_end, S.TILE, PART
                )
                v_there = v_full.index(stage)
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                tail = is_tail(start, k_end, PART)
                if PARTS == 2:
                    tail = tail | is_tail(start_2, k_end, PART)
                if tail:
                    _load_part(
                        v_blocks, start, k_end, kv_head, landed, v_buffer.index(slot), BYTES, S
                    )
                    if PARTS == 2:
                        _load_part(
                            v_blocks,
                            start_2,
                            k_end,
                            kv_head,
                            landed,
                            v_buffer.index(slot + 1),
                            0,
                            S,
                        )
                    mbarrier.wait(landed, tail_phase)
                    tail_phase ^= 1
                    _zero_tail(v_buffer.index(slot), start, k_end)
                    if PARTS == 2:
                        _zero_tail(v_buffer.index(slot + 1), start_2, k_end)
                    mbarrier.arrive(v_there)
                else:
                    _load_part(
                        v_blocks, start, k_end, kv_head, v_there, v_buffer.index(slot), BYTES, S
                    )
                    if PARTS == 2:
                        _load_part(
                            v_blocks,
                            start_2,
                            k_end,
                            kv_head,
                            v_there,
                            v_buffer.index(slot + 1),
                            0,
                            S,
                        )
                stage, phase = next_slot(stage, phase, C.stages)
        head, q_start, q_end, k_start, k_end, shift = ahead
        begin, end = ends_of_list(
            meets, rows_ptr, place_of(step + 1), count, q_start, k_end, shift, head, S.HEADS, S
        )


@gluon.jit
def _load_part(
    v_blocks, start, range_end, head, there, buffer, EXPECTED: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """EXPECTED: bytes of all parts, told with the first of them."""
    PART: gl.constexpr = tokens_of(v_blocks)
    if EXPECTED > 0:
        mbarrier.expect(there, EXPECTED)
    at = token_to_load(start, range_end, PART)
    bring(v_blocks, at, head, there, buffer, S.V_STRIDE_H)


@gluon.jit
def _zero_tail(buffer, start, range_end):
    if start < range_end:
        zero_rows(buffer, range_end - start)


@gluon.jit
def attend_listed(
    args, S: gl.constexpr, C: gl.constexpr, NEGATE: gl.constexpr, WEIGHT: gl.constexpr,
    ME: gl.constexpr,
):  # fmt: skip
    """One consumer, as `hopper.forward._attend`: part ME of every tile's queries."""
    rows_ptr, row_count = args[3:5]
    scale_log2, left, right, buffers, barriers = args[6:]
    q_buffer, k_parts, v_parts, notes = buffers
    q_full, q_empty, k_full, k_empty, v_full, v_empty, landed = barriers
    ROWS: gl.constexpr = C.part_q
    BLOCK: gl.constexpr = S.BLOCK
    PARTS: gl.constexpr = BLOCK // k_parts.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, BLOCK, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    dtype: gl.constexpr = q_buffer.dtype
    k_buffer = _by_block(k_parts, C.stages, BLOCK)
    v_buffer = _by_block(v_parts, C.stages, BLOCK)
    q = q_buffer.index(ME)
    stage = 0
    phase = 0
    q_phase = 0
    count = row_count * S.HEADS
    head, q_start, q_end, k_start, k_end, shift = row_fields(rows_ptr, place_of(0), count, S.HEADS)
    for step in range(gl.cdiv(count, gl.num_programs(0))):
        first_q = q_start + ME * ROWS
        acc = no_sums(ROWS, S.DV, S, C)
        total = gl.zeros([ROWS], gl.float32, ROW)
        top = gl.full([ROWS], float("-inf"), gl.float32, ROW)
        reach = gl.zeros([ROWS], gl.float32, ROW)
        if k_start < k_end:
            mbarrier.wait(q_full, q_phase)
            q_phase ^= 1
            blocks = blocks_to_walk(notes)
            # The first part of a tile is never empty.
            if (blocks > 0) & ((ME == 0) or (first_q < q_end)):
                row = (first_q, k_end, shift, notes, left, right)
                mbarrier.wait(k_full.index(stage), phase)
                weights = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
                # A first block is met in the loop over the others, by a product of zeros and its V:
                # code for it alone would not fit the instruction cache beside the loop's. Where V
                # makes NaN of a 0 that the mask hides, `hopper.exact` computes the part again.
                for block in range(blocks):
                    later = block > 0
                    v_stage = stage
                    v_phase = phase
                    ahead_stage, ahead_phase = next_slot(stage, phase, C.stages)
                    stage = gl.where(later, ahead_stage, stage)
                    phase = gl.where(later, ahead_phase, phase)
                    # As in `hopper.forward._walk`.
                    p = left_factor(weights, acc, dtype)
                    scores = product_with_transpose(q, k_buffer.index(stage), S.D, SCORES)
                    mbarrier.wait(v_full.index(v_stage), v_phase)
                    running = add_product(p, v_buffer.index(v_stage), acc, S.DV)
                    first = read_note(notes, stage * PARTS)
                    second = read_note(notes, stage * PARTS + (PARTS - 1))
                    scores = warpgroup_mma_wait(pieces(S.DV), deps=[scores])
                    mbarrier.arrive(k_empty.index(stage))
                    state = (top, total, reach)
                    weights, correction, state = _weigh(
                        scores, state, first, second, row, scale_log2, S, NEGATE, WEIGHT, PARTS
                    )
                    top, total, reach = state
                    ahead_stage, ahead_phase = next_slot(stage, phase, C.stages)
                    mbarrier.wait(k_full.index(ahead_stage), ahead_phase, pred=block < blocks - 1)
                    acc, p = wait_for(0, running, (p,))
                    mbarrier.arrive(v_empty.index(v_stage), pred=later)
                    if WEIGHT is None:
                        acc = times_by_row(acc, correction)

                mbarrier.arrive(q_empty)
                p = left_factor(weights, acc, dtype)
                mbarrier.wait(v_full.index(stage), phase)
                acc = add_product(p, v_buffer.index(stage), acc, S.DV)
                acc, p = wait_for(0, acc, (p,))
                mbarrier.arrive(v_empty.index(stage))
                stage, phase = next_slot(stage, phase, C.stages)
            else:
                # The list is empty, or the tile ends before this part: only the other consumer's
                # waits are served, in step with the loads.
                mbarrier.arrive(q_empty)
                for _ in range(blocks):
                    mbarrier.wait(k_full.index(stage), phase)
                    mbarrier.arrive(k_empty.index(stage))
                    mbarrier.wait(v_full.index(stage), phase)
                    mbarrier.arrive(v_empty.index(stage))
                    stage, phase = next_slot(stage, phase, C.stages)
        ahead = row_fields(rows_ptr, place_of(step + 1), count, S.HEADS)
        row = (head, q_start, q_end, k_start, k_end, shift)
        store_part((acc, total, top, reach), row, place_of(step), count, args, S, C, WEIGHT, ME)
        head, q_start, q_end, k_start, k_end, shift = ahead


@gluon.jit
def _by_block(parts, STAGES: gl.constexpr, BLOCK: gl.constexpr):
    """A ring of parts as one of blocks: the parts of a block stand one behind the other."""
    if parts.shape[1] == BLOCK:
        blocks = parts
    else:
        blocks = parts._reinterpret(parts.dtype, [STAGES, BLOCK, parts.shape[2]], parts.layout)
    return blocks


@gluon.jit
def _weigh(
    scores, state, first, second, row, scale_log2,
    S: gl.constexpr, NEGATE: gl.constexpr, WEIGHT: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """(weights, correction of what was summed before, state) of a block of products.

    Args:
        state: (top, total, reach) of `online_softmax`, as they are for weights by a policy.
        first, second: the notes of the block's parts, one and the same if it has one.
    """
    top, total, reach = state
    correction = top
    cut = (first | second) < 0
    if NEGATE:
        scores = -scores
    if WEIGHT is None:
        if cut:
            scores = _mask(scores, first, second, row, S, PARTS, float("-inf"))
        weights, correction, top, total, reach = online_softmax(
            scores, top, total, reach, scale_log2, True
        )
    else:
        weights = WEIGHT(natural_scores(scores, scale_log2))
        if cut:
            weights = _mask(weights, first, second, row, S, PARTS, 0.0)
    return weights, correction, (top, total, reach)


@gluon.jit
def _mask(
    scores, first, second, row, S: gl.constexpr, PARTS: gl.constexpr, HIDDEN: gl.constexpr
):  # fmt: skip
    PART: gl.constexpr = S.BLOCK // PARTS
    first_q, k_end, shift, notes, left, right = row
    starts = (token_of_note(first), token_of_note(second))
    rule = 0
    if S.RULED:
        # Here, because few blocks need it, and there are no registers to hold it.
        rule = read_rule(notes)
    return mask_listed(
        scores, first_q, starts, (k_end, shift), rule, left, right, S, PART, False, HIDDEN
    )
