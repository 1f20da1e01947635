"""Statistics of keys: one program walks one row of the transpose for one key head.

A tile of keys is read once, and the queries that see it, block by block, of each head that shares
it: what a backward does for dK, without values.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.blocks import finite, probability, visible
from jagged_kernels.attention.plans import PLANS, Call, LaunchPlan
from jagged_kernels.core.backends import has_small_memory
from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.device.arithmetic import LOG2_E
from jagged_kernels.device.float32 import dot_factors, factor, transposed
from jagged_kernels.device.memory import load_block, load_numbers, store_numbers
from jagged_kernels.schedule.policy.plain import forward_config, parts_of_tile
from jagged_kernels.schedule.row_access import load_part, load_user

_LOG2_E = tl.constexpr(LOG2_E)


def launch_statistics(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    rows_t: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    tile: int,
    left: int,
    right: int,
    recent: int,
    scale: float,
    below: float,
) -> tuple[Tensor, Tensor]:
    """(counts [Tk, Hk] int32, mass [Tk, Hk] float32); `left` and `right` are the queries'.

    Args:
        below: a probability counts that is less than so many shares.
    """
    q, k, lse = rows_of_dims(q), rows_of_dims(k), lse.contiguous()
    counts = torch.empty(k.shape[:2], dtype=torch.int32, device=k.device)
    mass = torch.empty(k.shape[:2], dtype=torch.float32, device=k.device)
    if k.shape[0] == 0:
        return counts, mass
    call = Call.of(q, k, k, left=left, right=right, scale=scale).mirrored
    plan = _plan(call, k.shape[1], tile, has_small_memory(k.device))
    # From the keys' side the band is mirrored.
    launch(
        _statistics_kernel,
        rows_t.shape[0] * plan.programs,
        (q, k, lse, counts, mass, rows_t, q_offsets, k_offsets, plan.scale_log2, right, left,
         recent, below),
        plan.constants,
        **plan.options,
    )  # fmt: skip
    return counts, mass


@lru_cache(PLANS)
def _plan(call: Call, kv_heads: int, tile: int, small_memory: bool) -> LaunchPlan:
    config = forward_config(call.pad_dim, call.element_size, call.precision)
    parts = parts_of_tile(tile, call.pad_dim, call.element_size, small_memory)
    shape = call.shape(tile=tile, parts=parts, block=config.block)
    return call.plan(parts * kv_heads, shape, config.options())


@triton.jit(do_not_specialize=["left", "right", "recent"])
def _statistics_kernel(
    q_ptr, k_ptr, lse_ptr, counts_ptr, mass_ptr, rows_ptr, q_offsets_ptr, k_offsets_ptr,
    scale_log2, left, right, recent, below, S: tl.constexpr, NEGATE: tl.constexpr,
):  # fmt: skip
    KV_HEADS: tl.constexpr = S.HEADS // S.GROUP
    TILE: tl.constexpr = S.TILE
    PRECISION: tl.constexpr = S.PRECISION
    slot, kv_head = tl.program_id(0) // KV_HEADS, (tl.program_id(0) % KV_HEADS).to(tl.int64)
    row = slot // S.PARTS
    k_start, k_end, q_start, q_end, shift = load_part(
        rows_ptr, row, slot % S.PARTS, left, right, S.HAS_LEFT, S.HAS_RIGHT, TILE, S.PARTS, False
    )
    if k_start == k_end:
        return
    user = load_user(rows_ptr, row)
    q_last = tl.load(q_offsets_ptr + user + 1).to(tl.int32)
    q_start = tl.maximum(q_start, q_last - recent)
    k_first = tl.load(k_offsets_ptr + user).to(tl.int32)
    k_last = tl.load(k_offsets_ptr + user + 1).to(tl.int32)
    k_ptr += kv_head * S.K_STRIDE_H
    k = load_block(k_ptr, k_start, k_end, S.K_STRIDE_T, TILE, S.D, S.PAD_D)
    if NEGATE:
        k = -k
    k = factor(k, PRECISION)
    ends = (k_start, q_start, q_end, shift, k_first, k_last)
    counts = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.float32)
    for member in range(S.GROUP):
        counts, mass = _add_head(
            counts, mass, k, q_ptr, lse_ptr, kv_head * S.GROUP + member, ends, scale_log2,
            left, right, below, S,
        )  # fmt: skip
    store_numbers(counts_ptr + kv_head, counts, k_start, k_end, KV_HEADS, TILE)
    store_numbers(mass_ptr + kv_head, mass, k_start, k_end, KV_HEADS, TILE)


@triton.jit
def _add_head(
    counts, mass, k, q_ptr, lse_ptr, head, ends, scale_log2, left, right, below, S: tl.constexpr
):  # fmt: skip
    """What one head's queries add."""
    TILE: tl.constexpr = S.TILE
    BLOCK: tl.constexpr = S.BLOCK
    PRECISION: tl.constexpr = S.PRECISION
    k_start, first, q_end, shift, k_first, k_last = ends
    q_ptr += head * S.Q_STRIDE_H
    lse_ptr += head
    for q_start in tl.range(first, q_end, BLOCK):
        q = load_block(q_ptr, q_start, q_end, S.Q_STRIDE_T, BLOCK, S.D, S.PAD_D)
        lse2 = load_numbers(lse_ptr, q_start, q_end, S.HEADS, BLOCK) * _LOG2_E
        scores = dot_factors(k, transposed(factor(q, PRECISION), PRECISION), PRECISION)
        inside = visible(
            k_start, q_start, q_end, shift, left, right, S.HAS_LEFT, S.HAS_RIGHT, TILE, BLOCK
        )
        p = probability(scores * scale_log2, finite(lse2)[None, :], True)
        # How many keys these queries see; their window is the mirrored one.
        aligned = q_start + tl.arange(0, BLOCK) - shift
        low, high = k_first, k_last - 1
        if S.HAS_RIGHT:
            low = tl.maximum(aligned - right, low)
        if S.HAS_LEFT:
            high = tl.minimum(aligned + left, high)
        share = (high - low + 1).to(tl.float32)
        if S.HAS_LEFT or S.HAS_RIGHT:
            share = share[None, :]
        counts += tl.sum((inside & (p * share < below)).to(tl.int32), 1)
        mass += tl.sum(tl.where(inside, p, 0.0), 1)
    return counts, mass
