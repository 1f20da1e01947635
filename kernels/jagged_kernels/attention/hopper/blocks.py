"""What the Gluon kernels share: plans, barriers and rings of buffers, a row's fields, the mask."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jagged_kernels.attention import blocks as triton_blocks
from jagged_kernels.attention import triton_meeting
from jagged_kernels.attention.meeting import MeetShape
from jagged_kernels.attention.plans import PLANS, Call
from jagged_kernels.core.backends import multiprocessors
from jagged_kernels.core.sizes import padded_dim
from jagged_kernels.schedule.policy.hopper import COUNTED_FROM, HopperConfig, counted
from jagged_kernels.schedule.row_layout import NO_LIMIT, ROW_WIDTH
from jagged_kernels.schedule.rows import users_of_rows

# They take no layouts, and so they are the same in Gluon.
whole_blocks = gluon.jit(triton_blocks.whole_blocks.fn)
visible_band = gluon.jit(triton_blocks.band.fn)
_factor_of_user = gluon.jit(triton_meeting.factor_of_user.fn)

_ROW_WIDTH = gl.constexpr(ROW_WIDTH)
LANES = gl.constexpr(32)
_GLUON_DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


@lru_cache(PLANS)
def plan(
    call: Call, config: HopperConfig, meets: MeetShape
) -> tuple[dict[str, Any], dict[str, int]]:
    """(compile-time parameters S and C, launch options) of a kernel whose rows hold q's side."""
    shape = call.shape(tile=config.tile_q, block=config.block, meets=meets)
    options = {"num_warps": config.warps, "maxnreg": config.start_registers}
    return {"S": shape, "C": config}, options


def programs(device: torch.device, config: HopperConfig, tiles: int) -> int:
    """How many are launched for so many tiles, each of one head."""
    if not config.stays:
        return tiles
    return min(multiprocessors(device) * config.residents, tiles)


def for_mask(
    config: HopperConfig, x: Tensor, rows: Tensor, left: int, right: int, meets: MeetShape
) -> HopperConfig:
    """`config`, counted where a limit on one side makes tiles of a user unequal, and users have as
    many tokens as it then takes for that to be faster.

    Args:
        x: [T, H, D] of the side whose tiles the rows are.
    """
    tokens, _, dim = x.shape
    if meets.groups or (left == NO_LIMIT) == (right == NO_LIMIT):
        return config
    least = COUNTED_FROM["softmax" if meets.weight is None else "pointwise"][padded_dim(dim)]
    pays = tokens >= least * users_of_rows(rows, tokens, config.tile_q)
    return counted(config) if pays else config


def counter(config: HopperConfig, device: torch.device) -> Tensor | None:
    """What programs count tiles out by, if they do."""
    return torch.zeros(1, dtype=torch.int32, device=device) if config.counted else None


def token_blocks(x: Tensor, block: int) -> TensorDescriptor:
    """What `heads.bring` needs to bring `block` tokens of a head of x [T, H, D] (unit stride in D).

    A box has D padded to a power of two columns. What is behind D, and tokens from T on, read as 0.
    """
    tokens, heads, dim = x.shape
    stride_t, stride_h, _ = x.stride()
    # One that is the same for all, see `heads.bring`.
    heads = heads if stride_h else 1
    # Past its constructor, whose checks take as long as a launch: `tma_reads` has looked at x, and
    # what else there is was checked with the first of its kind.
    descriptor = object.__new__(TensorDescriptor)
    kept = _kept_fields(block, heads, dim, stride_t, stride_h, x.dtype)
    descriptor.__dict__ = {**kept, "base": x, "shape": [tokens, heads, dim]}
    return descriptor


@lru_cache(PLANS)
def _kept_fields(
    block: int, heads: int, dim: int, stride_t: int, stride_h: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Of a descriptor, what a batch does not change."""
    box = [block, 1, padded_dim(dim)]
    # Of one head it may be any, and TMA takes none of 0.
    strides = [stride_t, max(stride_h, dim), 1]
    layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[dtype])
    base = torch.empty(0, dtype=dtype)
    first = TensorDescriptor(base, [block, heads, dim], strides, box, layout)
    return {name: value for name, value in vars(first).items() if name not in ("base", "shape")}


def row_blocks(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """What TMA needs to bring `rows` x `columns` of x [R, C], contiguous."""
    descriptor = object.__new__(TensorDescriptor)
    shape = {"base": x, "shape": list(x.shape), "strides": [x.shape[1], 1]}
    descriptor.__dict__ = {**_kept_of_rows(rows, columns, x.dtype), **shape}
    return descriptor


@lru_cache(PLANS)
def _kept_of_rows(rows: int, columns: int, dtype: torch.dtype) -> dict[str, Any]:
    box = [rows, columns]
    layout = gl.NVMMASharedLayout.get_default_for(box, _GLUON_DTYPES[dtype])
    return vars(TensorDescriptor(torch.empty(0, dtype=dtype), box, [columns, 1], box, layout))


@gluon.jit
def one_barrier(ARRIVALS: gl.constexpr):
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=ARRIVALS)
    return barrier


@gluon.jit
def ring_of_barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=ARRIVALS)
    return barriers


@gluon.jit
def next_slot(stage, phase, STAGES: gl.constexpr):
    """The ring's next buffer, and the parity of the barrier phase that fills it."""
    stage += 1
    around = stage == STAGES
    return gl.where(around, 0, stage), gl.where(around, phase ^ 1, phase)


@gluon.jit
def place_of(step):
    """Of this program's tile number `step` among all, row * HEADS + head.

    Tiles are dealt out to and fro, since they come longest first.
    """
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    return step * programs + gl.where(step % 2 == 0, program, programs - 1 - program)


@gluon.jit
def row_fields(rows_ptr, place, count, HEADS: gl.constexpr):
    """(head, tile_start, tile_end, range_start, range_end, shift) of a tile; an empty one from
    `count` = rows * HEADS on."""
    there = place < count
    base = rows_ptr + (place // HEADS).to(gl.int64) * _ROW_WIDTH
    return (
        place % HEADS,
        gl.load(base, mask=there, other=0),
        gl.load(base + 1, mask=there, other=0),
        gl.load(base + 2, mask=there, other=0),
        gl.load(base + 3, mask=there, other=0),
        gl.load(base + 4, mask=there, other=0),
    )


@gluon.jit
def factor_of_place(meets, rows_ptr, place, count, HEADS: gl.constexpr):
    """1 / n of a policy's weights, of the user of a tile; of any user from `count` on."""
    return _factor_of_user(meets, rows_ptr, gl.minimum(place, count - 1) // HEADS)


# --- tiles that are counted out -------------------------------------------------------------------


@gluon.jit
def new_dealing(CONSUMERS: gl.constexpr):
    """Where the loading warp says which tile comes next: one for this tile, one for the next.

    Returns (their places, barriers: it is there, barriers: all consumers have read it).
    """
    places = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return places, ring_of_barriers(2, 1), ring_of_barriers(2, CONSUMERS)


@gluon.jit
def hand_out(taken_ptr, dealing, side, phase):
    """The place of the next tile that nobody has, told to the consumers by the loading warp."""
    places, full, empty = dealing
    place = gl.num_programs(0) + take(taken_ptr)
    mbarrier.wait(empty.index(side), phase ^ 1)
    tell(places, side, place)
    mbarrier.arrive(full.index(side))
    return place


@gluon.jit
def handed_out(dealing, side, phase, WARPS: gl.constexpr):
    """For a consumer, what `hand_out` gave."""
    places, full, empty = dealing
    mbarrier.wait(full.index(side), phase)
    place = told(places.index(side), WARPS)
    mbarrier.arrive(empty.index(side))
    return place


@gluon.jit
def take(ptr):
    """The next number of a counter in memory, for one warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [LANES], [1], [0])
    lane = gl.arange(0, LANES, LAYOUT)
    one = gl.full([LANES], 1, gl.int32, LAYOUT)
    taken = gl.atomic_add(ptr + 0 * lane, one, mask=lane == 0, sem="relaxed")
    return gl.sum(gl.where(lane == 0, taken, 0), 0)


@gluon.jit
def tell(notes, number, value):
    """Leaves a number for other warps, by one warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [LANES], [1], [0])
    notes.index(number).store(gl.full([1], 0, gl.int32, LAYOUT) + value)


@gluon.jit
def told(note, WARPS: gl.constexpr):
    """The number that was left there."""
    return gl.sum(note.load(gl.BlockedLayout([1], [LANES], [WARPS], [0])), 0)


@gluon.jit
def mask_scores(
    scores, band, before, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
    HIDDEN: gl.constexpr = float("-inf"),
):  # fmt: skip
    """HIDDEN where the query does not see the key; see `attention.blocks.visible`.

    Args:
        band: (first query, first key of the last block, end of the keys, shift, left, right).
        before: keys between this block and the last one.
    """
    q_start, last_k, k_end, shift, left, right = band
    k_start = last_k - before
    return mask_block(
        scores, q_start, k_start, k_end, shift, left, right, HAS_LEFT, HAS_RIGHT, HIDDEN
    )


@gluon.jit
def mask_block(
    scores, q_start, k_start, k_end, shift, left, right,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, HIDDEN: gl.constexpr = float("-inf"),
):  # fmt: skip
    """HIDDEN where the query does not see the key; see `attention.blocks.visible`."""
    layout: gl.constexpr = scores.type.layout
    seen_from = gl.expand_dims(
        q_start + shift + gl.arange(0, scores.shape[0], gl.SliceLayout(1, layout)), 1
    )
    token = gl.expand_dims(k_start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout)), 0)
    inside = visible_band(seen_from, token, k_end, left, right, HAS_LEFT, HAS_RIGHT)
    return gl.where(inside, scores, HIDDEN)


@gluon.jit
def zero_tail(buffer, valid, cleaned, phase, PARTS: gl.constexpr, PART: gl.constexpr):
    """Zeros the rows of `buffer` from `valid` on, before products read them.

    They are the next user's, and 0 times what he may have there, inf or NaN, is not 0. Each of
    PARTS consumers does its share, and `cleaned` waits for them all.
    """
    D: gl.constexpr = buffer.shape[1]
    LENGTH: gl.constexpr = buffer.shape[0] // PARTS
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [gl.num_warps(), 1], [1, 0])
    share = buffer.slice(PART * LENGTH, LENGTH)
    token = PART * LENGTH + gl.arange(0, LENGTH, gl.SliceLayout(1, LAYOUT))
    inside = gl.expand_dims(token, 1) < valid
    values = share.load(LAYOUT)
    share.store(gl.where(inside, values, gl.zeros_like(values)))
    fence_async_shared()
    mbarrier.arrive(cleaned)
    mbarrier.wait(cleaned, phase)


@gluon.jit
def zero_rows(buffer, valid):
    """`zero_tail` by the loading warp alone, which then says that the buffer is full."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    # 8 x 64 at a time: this warp has few registers.
    for part in gl.static_range(buffer.shape[0] // 8):
        token = 8 * part + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
        if valid < 8 * part + 8:
            for column in gl.static_range(buffer.shape[1] // 64):
                share = buffer.slice(8 * part, 8).slice(64 * column, 64, 1)
                values = share.load(LAYOUT)
                inside = gl.expand_dims(token, 1) < valid
                share.store(gl.where(inside, values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def load_numbers(
    lse2_ptr, delta_ptr, start, end, lse2, delta, there, HEADS: gl.constexpr
):  # fmt: skip
    """One head's numbers of the block from `start`, 0 from `end` on.

    Not by TMA, which wants the innermost coordinate at a multiple of 16 bytes. Each lane arrives
    at `there` when its own copies have.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [LANES], [1], [0])
    token = start + gl.arange(0, lse2.shape[0], LAYOUT)
    place = token.to(gl.int64) * HEADS
    async_copy.async_copy_global_to_shared(lse2, lse2_ptr + place, mask=token < end)
    async_copy.async_copy_global_to_shared(delta, delta_ptr + place, mask=token < end)
    async_copy.mbarrier_arrive(there, increment_count=False)


@gluon.jit
def by_row(numbers, block):
    """One number a row, to go with a block."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, block.type.layout)
    return gl.expand_dims(gl.convert_layout(numbers, LAYOUT), 1)


@gluon.jit
def size_of_sums(x):
    """`seen.triton_sums.size_of_sums`"""
    return gl.abs(gl.sum(x, 1))
