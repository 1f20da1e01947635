"""What the Gluon kernels share: barriers and rings of buffers, a row's fields, and the mask."""

# Gluon's jit is not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportReturnType=false
# What compile-time branches define is there where they use it.
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from jagged_kernels.attention import triton_blocks
from jagged_kernels.attention.rows import ROW_WIDTH

# They take no layouts, and so they are the same in Gluon.
whole_blocks = gluon.jit(triton_blocks.whole_blocks.fn)
_band = gluon.jit(triton_blocks.band.fn)

_ROW_WIDTH = gl.constexpr(ROW_WIDTH)
_GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def token_blocks(x: Tensor, block: int) -> TensorDescriptor:
    """What TMA needs to bring [block, D] of one head of x [T, H, D] (unit stride in D).

    A token's heads are one long row to it, whatever the heads' stride: head h starts at
    h * x.stride(1). Tokens from T on read as 0.
    """
    tokens, heads, dim = x.shape
    width = (heads - 1) * x.stride(1) + dim
    layout = _block_layout(block, dim, x.dtype)
    return TensorDescriptor(x, [tokens, width], [x.stride(0), 1], [block, dim], layout)


@lru_cache  # 20 microseconds
def _block_layout(block: int, dim: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([block, dim], _GLUON_DTYPES[dtype])


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
def row_fields(rows_ptr, step, count, HEADS: gl.constexpr):
    """(head, tile_start, tile_end, range_start, range_end, shift) of this program's tile number
    `step`; an empty tile from `count` = rows * HEADS on.

    Tiles are dealt out to and fro, since they come longest first.
    """
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    place = step * programs + gl.where(step % 2 == 0, program, programs - 1 - program)
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
def mask_scores(scores, band, before, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr):
    """-inf where the query does not see the key; see `triton_blocks.visible`.

    Args:
        band: (first query, first key of the last block, end of the keys, shift, left, right).
        before: keys between this block and the last one.
    """
    q_start, last_k, k_end, shift, left, right = band
    k_start = last_k - before
    layout: gl.constexpr = scores.type.layout
    seen_from = gl.expand_dims(
        q_start + shift + gl.arange(0, scores.shape[0], gl.SliceLayout(1, layout)), 1
    )
    token = gl.expand_dims(k_start + gl.arange(0, scores.shape[1], gl.SliceLayout(0, layout)), 0)
    inside = _band(seen_from, token, k_end, left, right, HAS_LEFT, HAS_RIGHT)
    return gl.where(inside, scores, float("-inf"))


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
