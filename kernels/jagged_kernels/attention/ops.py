"""The backends as `torch.library` operators, so that autograd, fake tensors and `torch.compile`
see one opaque call each way."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.attention.native import (
    Mask,
    attention_native_backward,
    attention_native_forward,
)


def _empty_output(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    tokens, heads = q.shape[:2]
    return q.new_empty((tokens, heads, v.shape[2])), q.new_empty((tokens, heads), dtype=lse_dtype)


# --- triton ---------------------------------------------------------------------------------------


def check_triton_runs(q: Tensor) -> None:
    """Raises the reason why the Triton kernels cannot run on this tensor."""
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"the triton backend needs CUDA tensors, got q on {q.device} (for Triton's "
            "interpreter, set TRITON_INTERPRET=1 before starting Python)"
        )
    if not q.is_cuda and q.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter computes bfloat16 products wrongly; use float32")


@torch.library.custom_op("jagged_kernels::attention_triton", mutates_args=())
def attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rows: Tensor,
    rows_t: Tensor,
    tile_q: int,
    tile_k: int,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(o [Tq, H, Dv], lse2 [Tq, H]) for the rows of an `AttentionSchedule`.

    lse2 is log2 of the sum of exponentials: the kernels work in base 2, and a backward from a
    natural logarithm would round twice more.
    """
    from jagged_kernels.attention.triton_forward import launch_forward

    return launch_forward(q, k, v, rows, tile_q=tile_q, left=left, right=right, scale=scale)


@attention_triton.register_fake
def _(q, k, v, rows, rows_t, tile_q, tile_k, left, right, scale):
    return _empty_output(q, v)


@torch.library.custom_op("jagged_kernels::attention_triton_backward", mutates_args=())
def attention_triton_backward(
    d_o: Tensor,
    d_lse2: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor,
    rows: Tensor,
    rows_t: Tensor,
    tile_q: int,
    tile_k: int,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the dtypes and shapes of q, k, v."""
    from jagged_kernels.attention.triton_backward import launch_backward

    return launch_backward(
        d_o,
        d_lse2,
        q,
        k,
        v,
        o,
        lse2,
        rows,
        rows_t,
        tile_q=tile_q,
        tile_k=tile_k,
        left=left,
        right=right,
        scale=scale,
    )


@attention_triton_backward.register_fake
def _(d_o, d_lse2, q, k, v, o, lse2, rows, rows_t, tile_q, tile_k, left, right, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _triton_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, rows, rows_t, *ctx.mask = inputs
    ctx.save_for_backward(q, k, v, *output, rows, rows_t)
    ctx.set_materialize_grads(False)


def _triton_gradient(ctx: Any, d_o: Tensor | None, d_lse2: Tensor | None) -> tuple[Any, ...]:
    unused = (None,) * 7
    if d_o is None and d_lse2 is None:
        return (None, None, None, *unused)
    q, k, v, o, lse2, rows, rows_t = ctx.saved_tensors
    d_o = torch.zeros_like(o) if d_o is None else d_o
    gradients = attention_triton_backward(d_o, d_lse2, q, k, v, o, lse2, rows, rows_t, *ctx.mask)
    return (*gradients, *unused)


attention_triton.register_autograd(_triton_gradient, setup_context=_triton_context)


# --- native ---------------------------------------------------------------------------------------


@torch.library.custom_op("jagged_kernels::attention_native", mutates_args=())
def attention_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    q_offsets: Tensor,
    k_offsets: Tensor,
    dropout_seed: Tensor | None,
    dropout_p: float,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(o [Tq, H, Dv], lse [Tq, H])."""
    mask = Mask((left, right), scale, bias, dropout_p, dropout_seed)
    return attention_native_forward(q, k, v, q_offsets, k_offsets, mask)


@attention_native.register_fake
def _(q, k, v, bias, q_offsets, k_offsets, dropout_seed, dropout_p, left, right, scale):
    return _empty_output(q, v)


@torch.library.custom_op("jagged_kernels::attention_native_backward", mutates_args=())
def attention_native_backward_op(
    d_o: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    o: Tensor,
    lse: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    dropout_seed: Tensor | None,
    dropout_p: float,
    left: int,
    right: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, dbias); dbias is empty without a bias."""
    mask = Mask((left, right), scale, bias, dropout_p, dropout_seed)
    dq, dk, dv, d_bias = attention_native_backward(
        d_o, d_lse, q, k, v, o, lse, q_offsets, k_offsets, mask
    )
    return dq, dk, dv, q.new_empty(0) if d_bias is None else d_bias


@attention_native_backward_op.register_fake
def _(
    d_o,
    d_lse,
    q,
    k,
    v,
    bias,
    o,
    lse,
    q_offsets,
    k_offsets,
    dropout_seed,
    dropout_p,
    left,
    right,
    scale,
):
    d_bias = q.new_empty(0) if bias is None else torch.empty_like(bias)
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), d_bias


def _native_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, q_offsets, k_offsets, dropout_seed, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, bias, *output, q_offsets, k_offsets, dropout_seed)
    ctx.set_materialize_grads(False)


def _native_gradient(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    unused = (None,) * 7
    if d_o is None and d_lse is None:
        return (None, None, None, None, *unused)
    q, k, v, bias, o, lse, *rest = ctx.saved_tensors
    d_o = torch.zeros_like(o) if d_o is None else d_o
    dq, dk, dv, d_bias = attention_native_backward_op(
        d_o, d_lse, q, k, v, bias, o, lse, *rest, *ctx.numbers
    )
    return (dq, dk, dv, None if bias is None else d_bias, *unused)


attention_native.register_autograd(_native_gradient, setup_context=_native_context)


def native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    window: tuple[int, int],
    scale: float,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention_native` with the signature of `attention_reference`."""
    return attention_native(
        q, k, v, bias, q_offsets, k_offsets, dropout_seed, dropout_p, *window, scale
    )
