"""The forward kernel: one program walks one row of the schedule for one head.

FlashAttention-2 (arXiv 2307.08691, section 3.1) with online softmax in base 2. What differs from
a padded kernel is the grid: programs are the tiles that exist, long users first. Blocks that the
mask leaves whole are computed without it.
"""

# Triton's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# What compile-time branches define is there where they use it.
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.bias_launch import NO_BIAS, launch_options
from jagged_kernels.attention.tiles import forward_config
from jagged_kernels.attention.triton_bias import bias_block, bias_place, keep_block
from jagged_kernels.attention.triton_blocks import (
    LOG2_E,
    add_dot,
    band_arguments,
    dot_precision,
    load_block,
    load_row,
    padded_dim,
    rows_of_dims,
    scale_arguments,
    store_block,
    store_numbers,
    visible,
    whole_blocks,
)

_LOG2_E = tl.constexpr(LOG2_E)


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    *,
    tile_q: int,
    left: int,
    right: int,
    scale: float,
    bias: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """o [Tq, H, Dv] in q's dtype, and log2 of the sum of exponentials [Tq, H], float32.

    `bias`: from `bias_launch.bias_arguments`, or None.
    """
    q, k, v = rows_of_dims(q), rows_of_dims(k), rows_of_dims(v)
    tokens, heads, dim = q.shape
    dim_v = v.shape[2]
    o = torch.empty((tokens, heads, dim_v), dtype=q.dtype, device=q.device)
    lse2 = torch.empty((tokens, heads), dtype=torch.float32, device=q.device)
    if tokens == 0:
        return o, lse2
    pad_d, pad_dv = padded_dim(dim), padded_dim(dim_v)
    config = forward_config(max(pad_d, pad_dv), q.element_size())
    bias = bias or NO_BIAS
    with torch.cuda.device_of(q):
        _forward_kernel[(rows.shape[0] * heads,)](
            q, k, v, o, lse2, rows,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            **scale_arguments(scale),
            **band_arguments(left, right),
            **bias,
            HEADS=heads, GROUP=heads // k.shape[1],
            D=dim, DV=dim_v, PAD_D=pad_d, PAD_DV=pad_dv,
            TILE=tile_q, BLOCK=config.block, PRECISION=dot_precision(q.dtype),
            **launch_options(bias["BIAS"], config),
        )  # fmt: skip
    return o, lse2


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse2_ptr, rows_ptr,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h,
    scale_log2, NEGATE: tl.constexpr, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, bias, BIAS: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PAD_D: tl.constexpr, PAD_DV: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) // HEADS, (tl.program_id(0) % HEADS).to(tl.int64)
    q_start, q_end, k_start, k_end, shift = load_row(rows_ptr, row)
    if q_start == q_end:
        return
    q = load_block(q_ptr + head * q_stride_h, q_start, q_end, q_stride_t, TILE, D, PAD_D, True)
    if NEGATE:
        q = -q
    k_ptr += (head // GROUP) * k_stride_h
    v_ptr += (head // GROUP) * v_stride_h
    place = None
    if BIAS.ANY:
        place = bias_place(bias, rows_ptr, row, head, BIAS)

    top = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, PAD_DV], tl.float32)
    whole_start, whole_end = whole_blocks(
        q_start, q_end, k_start, k_end, shift, left, right, HAS_LEFT, HAS_RIGHT, BLOCK
    )
    if HAS_LEFT:
        acc, top, total = _attend(
            acc, top, total, q, k_ptr, v_ptr, k_start, tl.minimum(whole_start, k_end),
            q_start, k_end, shift, k_stride_t, v_stride_t, scale_log2, left, right,
            bias, place, q_end, head, BIAS, HEADS,
            HAS_LEFT, HAS_RIGHT, D, DV, PAD_D, PAD_DV, TILE, BLOCK, PRECISION, True,
        )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_ptr, v_ptr, whole_start, whole_end,
        q_start, k_end, shift, k_stride_t, v_stride_t, scale_log2, left, right,
        bias, place, q_end, head, BIAS, HEADS,
        HAS_LEFT, HAS_RIGHT, D, DV, PAD_D, PAD_DV, TILE, BLOCK, PRECISION, False,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, q, k_ptr, v_ptr, tl.maximum(whole_start, whole_end), k_end,
        q_start, k_end, shift, k_stride_t, v_stride_t, scale_log2, left, right,
        bias, place, q_end, head, BIAS, HEADS,
        HAS_LEFT, HAS_RIGHT, D, DV, PAD_D, PAD_DV, TILE, BLOCK, PRECISION, True,
    )  # fmt: skip

    top_scale = 1.0 if BIAS.ANY else scale_log2
    # A query that saw nothing has total 0: its output is 0 and its lse -inf.
    divisor = tl.where(total == 0.0, 1.0, total)
    acc = acc / divisor[:, None]
    lse2 = tl.where(total == 0.0, float("-inf"), top * top_scale + tl.log2(divisor))
    store_block(o_ptr + head * DV, acc, q_start, q_end, HEADS * DV, TILE, DV, PAD_DV)
    store_numbers(lse2_ptr + head, lse2, q_start, q_end, HEADS, TILE)


@triton.jit
def _attend(
    acc, top, total, q, k_ptr, v_ptr, start, end,
    q_start, k_end, shift, k_stride_t, v_stride_t, scale_log2, left, right,
    bias, place, q_end, head, BIAS: tl.constexpr, HEADS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PAD_D: tl.constexpr, PAD_DV: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key blocks that start in [start, end)."""
    top_scale = 1.0 if BIAS.ANY else scale_log2
    for k_start in range(start, end, BLOCK):
        k = load_block(k_ptr, k_start, k_end, k_stride_t, BLOCK, D, PAD_D, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if BIAS.ANY:
            # A sum of scaled scores and bias has no scale left to apply.
            scores = scores * scale_log2
            q_token = (q_start + tl.arange(0, TILE))[:, None]
            k_token = (k_start + tl.arange(0, BLOCK))[None, :]
            if BIAS.ADDS:
                added, _ = bias_block(
                    bias, place, q_token, k_token, q_end, k_end, shift, head, BIAS, HEADS
                )
                scores += added * _LOG2_E
        if MASKED:
            inside = visible(
                q_start, k_start, k_end, shift, left, right, HAS_LEFT, HAS_RIGHT, TILE, BLOCK
            )
            scores = tl.where(inside, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # -inf - -inf is NaN: a query that has seen nothing yet subtracts 0.
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        # Subtract before scaling: exact, so no weight passes 1 however large the scores are. A
        # fused scores * scale - top * scale would differ from 0 by a rounding of top * scale.
        weights = tl.exp2((scores - finite_top[:, None]) * top_scale)
        correction = tl.exp2((top - finite_top) * top_scale)
        total = total * correction + tl.sum(weights, 1)
        if BIAS.DROPS:
            weights = weights * keep_block(bias, place, q_token, k_token)
        v = load_block(v_ptr, k_start, k_end, v_stride_t, BLOCK, DV, PAD_DV, MASKED)
        acc = acc * correction[:, None]
        acc = add_dot(acc, weights.to(v.dtype), v, PRECISION)
        top = new_top
    return acc, top, total
