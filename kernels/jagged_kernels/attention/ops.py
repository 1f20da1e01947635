"""The backends as `torch.library` operators, so that autograd, fake tensors and `torch.compile`
see one opaque call each way."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.attention.bias_terms import BiasTerms
from jagged_kernels.attention.native import (
    Mask,
    attention_native_backward,
    attention_native_forward,
)


def empty_output(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    tokens, heads = q.shape[:2]
    return q.new_empty((tokens, heads, v.shape[2])), q.new_empty((tokens, heads), dtype=lse_dtype)


# --- triton ---------------------------------------------------------------------------------------


def triton_runs(x: Tensor) -> bool:
    """Whether Triton kernels can run where this tensor is: on CUDA, or in the interpreter."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def check_triton_runs(q: Tensor) -> None:
    """Raises the reason why the Triton kernels cannot run on this tensor."""
    if not triton_runs(q):
        raise ValueError(
            f"the triton backend needs CUDA tensors, got q on {q.device} (for Triton's "
            "interpreter, set TRITON_INTERPRET=1 before starting Python)"
        )
    if not q.is_cuda and q.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter computes bfloat16 products wrongly; use float32")


# Defined below `torch.library.custom_op` and with an autograd kernel of its own: on short histories
# the time that a call takes on the host is the time that it takes, and this way is 3x cheaper.
LIBRARY = torch.library.Library("jagged_kernels", "FRAGMENT")


def define_op(function: Callable[..., Any]) -> Any:
    """The operator of a function, its schema from the annotations."""
    name = function.__name__.lstrip("_")
    LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    for device in ("CUDA", "CPU"):  # CPU: Triton's interpreter
        LIBRARY.impl(name, function, device)
    return getattr(torch.ops.jagged_kernels, name).default


def _attention_triton(
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


def _attention_triton_backward(
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


attention_triton = define_op(_attention_triton)
attention_triton_backward = define_op(_attention_triton_backward)


@torch.library.register_fake("jagged_kernels::attention_triton")
def _(q, k, v, rows, rows_t, tile_q, tile_k, left, right, scale):
    return empty_output(q, v)


@torch.library.register_fake("jagged_kernels::attention_triton_backward")
def _(d_o, d_lse2, q, k, v, o, lse2, rows, rows_t, tile_q, tile_k, left, right, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _TritonAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            output = attention_triton(*inputs)
        q, k, v, rows, rows_t, *ctx.mask = inputs
        ctx.save_for_backward(q, k, v, *output, rows, rows_t)
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(ctx: Any, d_o: Tensor | None, d_lse2: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        unused = (None,) * 7
        if d_o is None and d_lse2 is None:
            return (None, None, None, *unused)
        q, k, v, o, lse2, rows, rows_t = ctx.saved_tensors
        d_o = torch.zeros_like(o) if d_o is None else d_o
        gradients = attention_triton_backward(
            d_o, d_lse2, q, k, v, o, lse2, rows, rows_t, *ctx.mask
        )
        return (*gradients, *unused)


LIBRARY.impl("attention_triton", lambda *inputs: _TritonAttention.apply(*inputs), "Autograd")


# --- native ---------------------------------------------------------------------------------------

# The fields of `BiasTerms` are the last ten arguments. An empty tensor stands for no gradient.


@torch.library.custom_op("jagged_kernels::attention_native", mutates_args=())
def attention_native(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    dropout_seed: Tensor | None,
    dropout_p: float,
    left: int,
    right: int,
    scale: float,
    position: Tensor | None,
    time: Tensor | None,
    slopes: Tensor | None,
    scores: Tensor | None,
    q_times: Tensor | None,
    k_times: Tensor | None,
    max_distance: int,
    bidirectional: bool,
    time_unit: float,
    time_base: float,
) -> tuple[Tensor, Tensor]:
    """(o [Tq, H, Dv], lse [Tq, H])."""
    learned = (position, time, slopes, scores)
    numbers = (max_distance, bidirectional, time_unit, time_base)
    bias = given_terms(BiasTerms(*learned, q_times, k_times, *numbers))
    mask = Mask((left, right), scale, bias, dropout_p, dropout_seed)
    return attention_native_forward(q, k, v, q_offsets, k_offsets, mask)


@attention_native.register_fake
def _(q, k, v, *rest):
    return empty_output(q, v)


@torch.library.custom_op("jagged_kernels::attention_native_backward", mutates_args=())
def attention_native_backward_op(
    d_o: Tensor,
    d_lse: Tensor | None,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    dropout_seed: Tensor | None,
    dropout_p: float,
    left: int,
    right: int,
    scale: float,
    position: Tensor | None,
    time: Tensor | None,
    slopes: Tensor | None,
    scores: Tensor | None,
    q_times: Tensor | None,
    k_times: Tensor | None,
    max_distance: int,
    bidirectional: bool,
    time_unit: float,
    time_base: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, d_position, d_time, d_slopes, d_scores)."""
    learned = (position, time, slopes, scores)
    numbers = (max_distance, bidirectional, time_unit, time_base)
    bias = given_terms(BiasTerms(*learned, q_times, k_times, *numbers))
    mask = Mask((left, right), scale, bias, dropout_p, dropout_seed)
    dq, dk, dv, d_bias = attention_native_backward(
        d_o, d_lse, q, k, v, o, lse, q_offsets, k_offsets, mask
    )
    position, time, slopes, scores = (q.new_empty(0) if d is None else d for d in d_bias)
    return dq, dk, dv, position, time, slopes, scores


@attention_native_backward_op.register_fake
def _(d_o, d_lse, o, lse, q, k, v, *rest):
    qkv = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    learned = rest[-10:-6]
    return *qkv, *(q.new_empty(0) if t is None else torch.empty_like(t) for t in learned)


def given_terms(terms: BiasTerms) -> BiasTerms | None:
    """None instead of terms that add nothing."""
    return None if all(tensor is None for tensor in terms.learned()) else terms


def split_arguments(inputs: tuple[Any, ...]) -> tuple[list[Tensor | None], list[Any]]:
    """Arguments that are tensors (or None) go into `save_for_backward`, numbers into ctx."""
    tensors = [x if isinstance(x, Tensor) else None for x in inputs]
    return tensors, [None if isinstance(x, Tensor) else x for x in inputs]


def _native_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.numbers = split_arguments(inputs)
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _native_gradient(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
    if d_o is None and d_lse is None:
        return (None,) * len(ctx.numbers)
    o, lse, *tensors = ctx.saved_tensors
    inputs = [n if t is None else t for t, n in zip(tensors, ctx.numbers, strict=True)]
    d_o = torch.zeros_like(o) if d_o is None else d_o
    dq, dk, dv, *d_bias = attention_native_backward_op(d_o, d_lse, o, lse, *inputs)
    learned = inputs[-10:-6]
    d_bias = [None if t is None else d for t, d in zip(learned, d_bias, strict=True)]
    return (dq, dk, dv, *(None,) * 7, *d_bias, *(None,) * 6)


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
    bias: BiasTerms | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention_native` with the signature of `attention_reference`."""
    terms = BiasTerms() if bias is None else bias
    rest = (dropout_seed, dropout_p, *window, scale, *terms)
    return attention_native(q, k, v, q_offsets, k_offsets, *rest)
