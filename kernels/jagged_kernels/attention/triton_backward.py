"""The backward kernels: dQ over the rows, then dK and dV over the rows of the transpose.

Probabilities are recomputed from lse (FlashAttention-2, arXiv 2307.08691, section 3.1.2). Every
output element is written by one program in one order, so there are no atomics, no float32 copy
of dQ in memory, and results do not change from run to run.
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

from jagged_kernels.attention.bias_launch import NO_BIAS, NO_SLOTS, BiasSlots, launch_options
from jagged_kernels.attention.tiles import backward_config
from jagged_kernels.attention.triton_bias import (
    add_to_sums,
    bias_block,
    bias_place,
    keep_block,
    store_sums,
    zero_sums,
)
from jagged_kernels.attention.triton_blocks import (
    LOG2_E,
    add_dot,
    band_arguments,
    dot_precision,
    load_block,
    load_numbers,
    load_row,
    padded_dim,
    probability,
    rows_of_dims,
    scale_arguments,
    store_block,
    store_numbers,
    visible,
    whole_blocks,
)

_LOG2_E = tl.constexpr(LOG2_E)


def launch_backward(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor,
    rows: Tensor,
    rows_t: Tensor,
    *,
    tile_q: int,
    tile_k: int,
    left: int,
    right: int,
    scale: float,
    bias: dict[str, Any] | None = None,
    bias_slots: BiasSlots | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), contiguous, in the dtypes of q, k and v. `lse2` is the forward's.

    `bias`: from `bias_launch.bias_arguments`, or None; its gradients are left in `bias_slots`.
    """
    q, k, v, d_o = rows_of_dims(q), rows_of_dims(k), rows_of_dims(v), rows_of_dims(d_o)
    heads, dim = q.shape[1:]
    kv_heads, dim_v = v.shape[1:]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    delta = torch.empty_like(lse2)
    d_lse2 = None if d_lse2 is None else d_lse2.contiguous()
    pad_d, pad_dv = padded_dim(dim), padded_dim(dim_v)
    config = backward_config(max(pad_d, pad_dv), q.element_size())
    bias = bias or NO_BIAS
    strides = (
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        d_o.stride(0), d_o.stride(1),
    )  # fmt: skip
    shape = {
        **scale_arguments(scale),
        **bias,
        "HEADS": heads,
        "GROUP": heads // kv_heads,
        "D": dim,
        "DV": dim_v,
        "PAD_D": pad_d,
        "PAD_DV": pad_dv,
        "BLOCK": config.block,
        "PRECISION": dot_precision(q.dtype),
        **launch_options(bias["BIAS"], config),
    }
    with torch.cuda.device_of(q):
        if q.shape[0]:
            _dq_kernel[(rows.shape[0] * heads,)](
                q, k, v, o, d_o, lse2, d_lse2, delta, dq, rows, *strides, scale,
                **band_arguments(left, right), slots=bias_slots or NO_SLOTS,
                TILE=tile_q, HAS_DLSE=d_lse2 is not None, **shape,
            )  # fmt: skip
        if k.shape[0]:
            # From the keys' side the band is mirrored.
            _dkv_kernel[(rows_t.shape[0] * kv_heads,)](
                q, k, v, d_o, lse2, delta, dk, dv, rows_t, *strides, scale,
                **band_arguments(right, left), TILE=tile_k, **shape,
            )  # fmt: skip
    return dq, dk, dv


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse2_ptr, d_lse2_ptr, delta_ptr, dq_ptr, rows_ptr,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, do_stride_t,
    do_stride_h, scale, scale_log2, NEGATE: tl.constexpr, left, right,
    bias, slots, BIAS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_DLSE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PAD_D: tl.constexpr, PAD_DV: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries, and delta = rowsum(o * dO) - d_lse for the other kernel."""
    row, head = tl.program_id(0) // HEADS, (tl.program_id(0) % HEADS).to(tl.int64)
    q_start, q_end, k_start, k_end, shift = load_row(rows_ptr, row)
    d_position, d_time, d_slope = zero_sums(slots, BIAS)
    if q_start == q_end:
        if BIAS.ANY:
            store_sums(d_position, d_time, d_slope, slots, row, head, BIAS, HEADS)
        return
    q = load_block(q_ptr + head * q_stride_h, q_start, q_end, q_stride_t, TILE, D, PAD_D, True)
    if NEGATE:
        q = -q
    d_o = load_block(
        do_ptr + head * do_stride_h, q_start, q_end, do_stride_t, TILE, DV, PAD_DV, True
    )
    o = load_block(o_ptr + head * DV, q_start, q_end, HEADS * DV, TILE, DV, PAD_DV, True)
    delta = tl.sum(o.to(tl.float32) * d_o.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= load_numbers(d_lse2_ptr + head, q_start, q_end, HEADS, TILE) * _LOG2_E
    store_numbers(delta_ptr + head, delta, q_start, q_end, HEADS, TILE)
    lse2 = load_numbers(lse2_ptr + head, q_start, q_end, HEADS, TILE)
    lse2 = tl.where(lse2 == float("-inf"), 0.0, lse2)
    k_ptr += (head // GROUP) * k_stride_h
    v_ptr += (head // GROUP) * v_stride_h
    place = None
    if BIAS.ANY:
        place = bias_place(bias, rows_ptr, row, head, BIAS)

    dq = tl.zeros([TILE, PAD_D], tl.float32)
    whole_start, whole_end = whole_blocks(
        q_start, q_end, k_start, k_end, shift, left, right, HAS_LEFT, HAS_RIGHT, BLOCK
    )
    if HAS_LEFT:
        dq, d_position, d_time, d_slope = _dq_walk(
            dq, d_position, d_time, d_slope, q, d_o, lse2, delta, k_ptr, v_ptr,
            k_start, tl.minimum(whole_start, k_end),
            q_start, k_end, shift, k_stride_t, v_stride_t, scale_log2, left, right,
            bias, slots, place, q_end, head, BIAS, HEADS,
            HAS_LEFT, HAS_RIGHT, D, DV, PAD_D, PAD_DV, TILE, BLOCK, PRECISION, True,
        )  # fmt: skip
    dq, d_position, d_time, d_slope = _dq_walk(
        dq, d_position, d_time, d_slope, q, d_o, lse2, delta, k_ptr, v_ptr,
        whole_start, whole_end,
        q_start, k_end, shift, k_stride_t, v_stride_t, scale_log2, left, right,
        bias, slots, place, q_end, head, BIAS, HEADS,
        HAS_LEFT, HAS_RIGHT, D, DV, PAD_D, PAD_DV, TILE, BLOCK, PRECISION, False,
    )  # fmt: skip
    dq, d_position, d_time, d_slope = _dq_walk(
        dq, d_position, d_time, d_slope, q, d_o, lse2, delta, k_ptr, v_ptr,
        tl.maximum(whole_start, whole_end), k_end,
        q_start, k_end, shift, k_stride_t, v_stride_t, scale_log2, left, right,
        bias, slots, place, q_end, head, BIAS, HEADS,
        HAS_LEFT, HAS_RIGHT, D, DV, PAD_D, PAD_DV, TILE, BLOCK, PRECISION, True,
    )  # fmt: skip
    store_block(dq_ptr + head * D, dq * scale, q_start, q_end, HEADS * D, TILE, D, PAD_D)
    if BIAS.ANY:
        store_sums(d_position, d_time, d_slope, slots, row, head, BIAS, HEADS)


@triton.jit
def _dq_walk(
    dq, d_position, d_time, d_slope, q, d_o, lse2, delta, k_ptr, v_ptr, start, end,
    q_start, k_end, shift, k_stride_t, v_stride_t, scale_log2, left, right,
    bias, slots, place, q_end, head, BIAS: tl.constexpr, HEADS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PAD_D: tl.constexpr, PAD_DV: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    for k_start in range(start, end, BLOCK):
        k = load_block(k_ptr, k_start, k_end, k_stride_t, BLOCK, D, PAD_D, MASKED)
        v = load_block(v_ptr, k_start, k_end, v_stride_t, BLOCK, DV, PAD_DV, MASKED)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        if BIAS.ANY:
            q_token = (q_start + tl.arange(0, TILE))[:, None]
            k_token = (k_start + tl.arange(0, BLOCK))[None, :]
            bucket = 0
            if BIAS.ADDS:
                added, bucket = bias_block(
                    bias, place, q_token, k_token, q_end, k_end, shift, head, BIAS, HEADS
                )
                scores += added * _LOG2_E
        if MASKED:
            inside = visible(
                q_start, k_start, k_end, shift, left, right, HAS_LEFT, HAS_RIGHT, TILE, BLOCK
            )
            scores = tl.where(inside, scores, float("-inf"))
        probabilities = probability(scores, lse2[:, None])
        d_probabilities = tl.dot(d_o, tl.trans(v), input_precision=PRECISION)
        if BIAS.DROPS:
            d_probabilities *= keep_block(bias, place, q_token, k_token)
        d_scores = probabilities * (d_probabilities - delta[:, None])
        if BIAS.ANY:
            d_position, d_time, d_slope = add_to_sums(
                d_position, d_time, d_slope, d_scores, slots, bias, place, bucket,
                q_start, k_start, q_end, k_end, shift, head, BIAS, HEADS,
            )  # fmt: skip
        dq = add_dot(dq, d_scores.to(k.dtype), k, PRECISION)
    return dq, d_position, d_time, d_slope


@triton.jit
def _dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, rows_ptr,
    q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, do_stride_t,
    do_stride_h, scale, scale_log2, NEGATE: tl.constexpr, left, right,
    bias, BIAS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PAD_D: tl.constexpr, PAD_DV: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of keys, summed over the heads of its group in order."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    row, kv_head = tl.program_id(0) // KV_HEADS, (tl.program_id(0) % KV_HEADS).to(tl.int64)
    k_start, k_end, q_start, q_end, shift = load_row(rows_ptr, row)
    if k_start == k_end:
        return
    k = load_block(k_ptr + kv_head * k_stride_h, k_start, k_end, k_stride_t, TILE, D, PAD_D, True)
    if NEGATE:
        k = -k
    v = load_block(v_ptr + kv_head * v_stride_h, k_start, k_end, v_stride_t, TILE, DV, PAD_DV, True)
    dk = tl.zeros([TILE, PAD_D], tl.float32)
    dv = tl.zeros([TILE, PAD_DV], tl.float32)
    whole_start, whole_end = whole_blocks(
        k_start, k_end, q_start, q_end, shift, left, right, HAS_LEFT, HAS_RIGHT, BLOCK
    )
    for member in range(GROUP):
        head = kv_head * GROUP + member
        q_head = q_ptr + head * q_stride_h
        do_head = do_ptr + head * do_stride_h
        place = None
        if BIAS.ANY:
            place = bias_place(bias, rows_ptr, row, head, BIAS)
        if HAS_LEFT:
            dk, dv = _dkv_walk(
                dk, dv, k, v, q_head, do_head, lse2_ptr + head, delta_ptr + head,
                q_start, tl.minimum(whole_start, q_end), k_start, q_end, shift,
                q_stride_t, do_stride_t, scale_log2, left, right,
                bias, place, k_end, head, BIAS, HAS_LEFT, HAS_RIGHT,
                HEADS, D, DV, PAD_D, PAD_DV, TILE, BLOCK, PRECISION, True,
            )  # fmt: skip
        dk, dv = _dkv_walk(
            dk, dv, k, v, q_head, do_head, lse2_ptr + head, delta_ptr + head,
            whole_start, whole_end, k_start, q_end, shift,
            q_stride_t, do_stride_t, scale_log2, left, right,
            bias, place, k_end, head, BIAS, HAS_LEFT, HAS_RIGHT,
            HEADS, D, DV, PAD_D, PAD_DV, TILE, BLOCK, PRECISION, False,
        )  # fmt: skip
        dk, dv = _dkv_walk(
            dk, dv, k, v, q_head, do_head, lse2_ptr + head, delta_ptr + head,
            tl.maximum(whole_start, whole_end), q_end, k_start, q_end, shift,
            q_stride_t, do_stride_t, scale_log2, left, right,
            bias, place, k_end, head, BIAS, HAS_LEFT, HAS_RIGHT,
            HEADS, D, DV, PAD_D, PAD_DV, TILE, BLOCK, PRECISION, True,
        )  # fmt: skip
    store_block(dk_ptr + kv_head * D, dk * scale, k_start, k_end, KV_HEADS * D, TILE, D, PAD_D)
    store_block(dv_ptr + kv_head * DV, dv, k_start, k_end, KV_HEADS * DV, TILE, DV, PAD_DV)


@triton.jit
def _dkv_walk(
    dk, dv, k, v, q_ptr, do_ptr, lse2_ptr, delta_ptr, start, end, k_start, q_end, shift,
    q_stride_t, do_stride_t, scale_log2, left, right, bias, place, k_end, head,
    BIAS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PAD_D: tl.constexpr, PAD_DV: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys stand in the rows here: the scores are transposed."""
    for q_start in range(start, end, BLOCK):
        q = load_block(q_ptr, q_start, q_end, q_stride_t, BLOCK, D, PAD_D, MASKED)
        d_o = load_block(do_ptr, q_start, q_end, do_stride_t, BLOCK, DV, PAD_DV, MASKED)
        lse2 = load_numbers(lse2_ptr, q_start, q_end, HEADS, BLOCK)
        delta = load_numbers(delta_ptr, q_start, q_end, HEADS, BLOCK)
        scores = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale_log2
        if BIAS.ANY:
            q_token = (q_start + tl.arange(0, BLOCK))[None, :]
            k_token = (k_start + tl.arange(0, TILE))[:, None]
            if BIAS.ADDS:
                # The shift of a transposed row goes from keys to queries.
                added, _ = bias_block(
                    bias, place, q_token, k_token, q_end, k_end, -shift, head, BIAS, HEADS
                )
                scores += added * _LOG2_E
        if MASKED:
            lse2 = tl.where(lse2 == float("-inf"), 0.0, lse2)
            inside = visible(
                k_start, q_start, q_end, shift, left, right, HAS_LEFT, HAS_RIGHT, TILE, BLOCK
            )
            scores = tl.where(inside, scores, float("-inf"))
        probabilities = probability(scores, lse2[None, :])
        kept = probabilities
        if BIAS.DROPS:
            keep = keep_block(bias, place, q_token, k_token)
            kept = probabilities * keep
        dv = add_dot(dv, kept.to(d_o.dtype), d_o, PRECISION)
        d_probabilities = tl.dot(v, tl.trans(d_o), input_precision=PRECISION)
        if BIAS.DROPS:
            d_probabilities *= keep
        d_scores = probabilities * (d_probabilities - delta[None, :])
        dk = add_dot(dk, d_scores.to(q.dtype), q, PRECISION)
    return dk, dv
