"""`attention.fp8_numbers` on a GPU: numbers in FP8, and V^T, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.fp8_numbers import E4M3, LARGEST, ORDERED_KEYS, SMALLEST_SCALE
from jagged_kernels.attention.plans import layout_of
from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import cdiv

_LARGEST, _SMALLEST_SCALE = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_SCALE)
# Tokens of a program: 128 bytes of a row of V^T.
_TOKENS = 128
_WARPS = 4


def launch_quantise_queries(q: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8_numbers.quantise_queries` of `rows_of_dims`."""
    tokens, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=E4M3, device=q.device)
    scales = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if tokens == 0:
        return out, scales
    _, _, stride_t, stride_h = layout_of(q)
    launch(
        _quantise_queries_kernel, (cdiv(tokens, _TOKENS), heads), (q, out, scales, tokens),
        {"HEADS": heads, "D": dim, "STRIDE_T": stride_t, "STRIDE_H": stride_h, "TOKENS": _TOKENS},
        num_warps=_WARPS,
    )  # fmt: skip
    return out, scales


def launch_quantise_keys(
    k: Tensor, v: Tensor, k_scales: Tensor, v_scales: Tensor
) -> tuple[Tensor, Tensor]:
    """`fp8_numbers.quantise_keys` of `rows_of_dims`."""
    tokens, heads, dim = k.shape
    padded = cdiv(tokens, ORDERED_KEYS) * ORDERED_KEYS
    quantised = torch.empty(k.shape, dtype=E4M3, device=k.device)
    v_t = torch.empty((heads, dim, padded), dtype=E4M3, device=k.device)
    if tokens == 0:
        return quantised, v_t
    strides = (*layout_of(k)[2:], *layout_of(v)[2:])
    names = ("K_STRIDE_T", "K_STRIDE_H", "V_STRIDE_T", "V_STRIDE_H")
    launch(
        _quantise_keys_kernel, (cdiv(tokens, _TOKENS), heads),
        (k, v, k_scales, v_scales, quantised, v_t, tokens, padded),
        {"HEADS": heads, "D": dim, **dict(zip(names, strides, strict=True)), "TOKENS": _TOKENS},
        num_warps=_WARPS,
    )  # fmt: skip
    return quantised, v_t


@triton.jit(do_not_specialize=["tokens"])
def _quantise_queries_kernel(
    q_ptr, out_ptr, scales_ptr, tokens,
    HEADS: tl.constexpr, D: tl.constexpr, STRIDE_T: tl.constexpr, STRIDE_H: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    q = _load(q_ptr, token, tokens, head, D, STRIDE_T, STRIDE_H)
    size = tl.abs(q)
    largest = tl.max(tl.where(size < float("inf"), size, 0.0), 1)
    scales = tl.maximum(largest * (1.0 / _LARGEST), _SMALLEST_SCALE)
    tl.store(scales_ptr + token.to(tl.int64) * HEADS + head, scales, mask=token < tokens)
    _store(out_ptr, _e4m3(q, scales), token, tokens, head, HEADS, D)


@triton.jit(do_not_specialize=["tokens", "padded"])
def _quantise_keys_kernel(
    k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, out_ptr, v_t_ptr, tokens, padded,
    HEADS: tl.constexpr, D: tl.constexpr,
    K_STRIDE_T: tl.constexpr, K_STRIDE_H: tl.constexpr,
    V_STRIDE_T: tl.constexpr, V_STRIDE_H: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    first = tl.program_id(0) * TOKENS
    token = first + tl.arange(0, TOKENS)
    v = _load(v_ptr, token, tokens, head, D, V_STRIDE_T, V_STRIDE_H)
    finite = tl.abs(v) < float("inf")
    missing = tl.max(tl.where(finite, 0, 1), 1)
    k = _load(k_ptr, token, tokens, head, D, K_STRIDE_T, K_STRIDE_H)
    k = tl.where(missing[:, None] > 0, float("nan"), k)
    k = _e4m3(k, _load_scales(k_scales_ptr, token, tokens, head, HEADS))
    _store(out_ptr, k, token, tokens, head, HEADS, D)

    v = tl.where(finite, v, 0.0)
    v = _e4m3(v, _load_scales(v_scales_ptr, token, tokens, head, HEADS))
    # `fp8_numbers.ordered`: (group, i, c, b) to (group, c, i, b).
    v = tl.reshape(v, [TOKENS // 16, 2, 4, 2, D])
    v = tl.reshape(tl.permute(v, (4, 0, 2, 1, 3)), [D, TOKENS])
    row = head.to(tl.int64) * D + tl.arange(0, D)
    address = v_t_ptr + row[:, None] * padded + token[None, :]
    tl.store(address, v, mask=(token < padded)[None, :])


@triton.jit
def _load(
    ptr, token, tokens, head, D: tl.constexpr, STRIDE_T: tl.constexpr, STRIDE_H: tl.constexpr
):  # fmt: skip
    """[TOKENS, D] float32, 0 from `tokens` on."""
    address = token.to(tl.int64)[:, None] * STRIDE_T + tl.arange(0, D)[None, :]
    there = (token < tokens)[:, None]
    return tl.load(ptr + head * STRIDE_H + address, mask=there, other=0.0).to(tl.float32)


@triton.jit
def _load_scales(ptr, token, tokens, head, HEADS: tl.constexpr):
    return tl.load(ptr + token.to(tl.int64) * HEADS + head, mask=token < tokens, other=1.0)


@triton.jit
def _e4m3(x, scales):
    """As `fp8_numbers.quantise`, to the bit."""
    x = tl.div_rn(x, tl.broadcast_to(scales[:, None], x.shape))
    clamped = tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)
    finite = tl.abs(x) < float("inf")
    return tl.where(finite, clamped, float("nan")).to(tl.float8e4nv)


@triton.jit
def _store(ptr, out, token, tokens, head, HEADS: tl.constexpr, D: tl.constexpr):
    address = (token.to(tl.int64) * HEADS + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(ptr + address, out, mask=(token < tokens)[:, None])
