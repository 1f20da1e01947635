"""Attention in FP8 as operators, without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_kernels.attention.fp8_numbers import E4M3, ORDERED_KEYS, quantise_keys
from jagged_kernels.attention.operators.plain import given_lse
from jagged_kernels.core.operators import define_op
from jagged_kernels.schedule.policy.hopper import is_hopper


def _fp8_keys(k: Tensor, v: Tensor, k_scales: Tensor, v_scales: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8_numbers.quantise_keys`."""
    if is_hopper(k.device):
        from jagged_kernels.attention.hopper.fp8_quantise import launch_quantise_keys

        return launch_quantise_keys(k, v, k_scales, v_scales)
    return quantise_keys(k, v, k_scales, v_scales)


def _empty_keys(k: Tensor, v: Tensor, k_scales: Tensor, v_scales: Tensor) -> tuple[Tensor, Tensor]:
    tokens, heads, dim = k.shape
    padded = (tokens + ORDERED_KEYS - 1) // ORDERED_KEYS * ORDERED_KEYS
    v_t = k.new_empty((heads, dim, padded), dtype=E4M3)
    return k.new_empty((tokens, heads, dim), dtype=E4M3), v_t


def _attention_fp8(
    q: Tensor,
    k: Tensor,
    v_t: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    rows: Tensor,
    left: int,
    right: int,
    scale: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    """(o [Tq, H, D] in q's dtype, lse2 [Tq, H], or [0] without) by the kernel for Hopper.

    Args:
        k, v_t, k_scale, v_scale: of `FP8Keys`.
        rows: of an `AttentionSchedule` of the kernel's tiles.
    """
    from jagged_kernels.attention.hopper.fp8_forward import launch_fp8_forward
    from jagged_kernels.attention.hopper.fp8_quantise import launch_quantise_queries

    if q.shape[0] == 0 or k.shape[0] == 0:
        lse2 = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32) if with_lse else None
        return q.new_zeros(q.shape), given_lse(lse2, q)
    numbers, q_scales = launch_quantise_queries(q)
    o, lse2 = launch_fp8_forward(
        numbers, k, v_t, (q_scales, k_scale, v_scale), rows,
        left=left, right=right, scale=scale, dtype=q.dtype, with_lse=with_lse,
    )  # fmt: skip
    return o, given_lse(lse2, q)


def _empty_output(
    q: Tensor,
    k: Tensor,
    v_t: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    rows: Tensor,
    left: int,
    right: int,
    scale: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor]:
    lse2 = q.new_empty(q.shape[:2], dtype=torch.float32) if with_lse else None
    return q.new_empty(q.shape), given_lse(lse2, q)


fp8_keys: Any = define_op(_fp8_keys, fake=_empty_keys)
attention_fp8: Any = define_op(_attention_fp8, fake=_empty_output)
