"""The Triton backend with bias or dropout as operators; plain attention has its own in `ops.py`,
which takes less time to call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_kernels.attention.bias_launch import bias_arguments, bias_slots, reduce_slots
from jagged_kernels.attention.bias_terms import BiasTerms
from jagged_kernels.attention.ops import empty_output, split_arguments

# The last ten arguments are the fields of `BiasTerms`. An empty tensor stands for no gradient.
_TERMS = len(BiasTerms._fields)
_LEARNED = len(BiasTerms().learned())


@torch.library.custom_op("jagged_kernels::attention_triton_biased", mutates_args=())
def attention_triton_biased(
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
    q_offsets: Tensor,
    k_offsets: Tensor,
    dropout_seed: Tensor | None,
    dropout_p: float,
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
    """(o [Tq, H, Dv], lse2 [Tq, H]), as `ops.attention_triton`."""
    from jagged_kernels.attention.triton_forward import launch_forward

    learned = (position, time, slopes, scores)
    numbers = (max_distance, bidirectional, time_unit, time_base)
    terms = BiasTerms(*learned, q_times, k_times, *numbers)
    bias = bias_arguments(terms, q_offsets, k_offsets, dropout_seed, dropout_p)
    return launch_forward(
        q, k, v, rows, tile_q=tile_q, left=left, right=right, scale=scale, bias=bias
    )


@attention_triton_biased.register_fake
def _(q, k, v, *rest):
    return empty_output(q, v)


@torch.library.custom_op("jagged_kernels::attention_triton_biased_backward", mutates_args=())
def attention_triton_biased_backward(
    d_o: Tensor,
    d_lse2: Tensor | None,
    o: Tensor,
    lse2: Tensor,
    wanted: list[bool],
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
    q_offsets: Tensor,
    k_offsets: Tensor,
    dropout_seed: Tensor | None,
    dropout_p: float,
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
    """(dq, dk, dv, d_position, d_time, d_slopes, d_scores), the last four where `wanted`."""
    from jagged_kernels.attention.triton_backward import launch_backward

    learned = (position, time, slopes, scores)
    numbers = (max_distance, bidirectional, time_unit, time_base)
    terms = BiasTerms(*learned, q_times, k_times, *numbers)
    bias = bias_arguments(terms, q_offsets, k_offsets, dropout_seed, dropout_p)
    # Without a query no program runs, and an empty sum is 0.
    slots = bias_slots(terms, wanted, rows.shape[0] if q.shape[0] else 0, q.shape[1])
    gradients = launch_backward(
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
        bias=bias,
        bias_slots=slots,
    )
    d_bias = reduce_slots(terms, slots)
    position, time, slopes, scores = (q.new_empty(0) if d is None else d for d in d_bias)
    return *gradients, position, time, slopes, scores


@attention_triton_biased_backward.register_fake
def _(d_o, d_lse2, o, lse2, wanted, q, k, v, *rest):
    gradients = [t.new_empty(t.shape) for t in (q, k, v)]
    learned = rest[-_TERMS:][:_LEARNED]
    d_bias = [
        q.new_empty(0) if t is None or not want else t.new_empty(t.shape)
        for t, want in zip(learned, wanted, strict=True)
    ]
    return *gradients, *d_bias


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.numbers = split_arguments(inputs)
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, d_o: Tensor | None, d_lse2: Tensor | None) -> tuple[Any, ...]:
    count = len(ctx.numbers)
    if d_o is None and d_lse2 is None:
        return (None,) * count
    o, lse2, *tensors = ctx.saved_tensors
    inputs = [n if t is None else t for t, n in zip(tensors, ctx.numbers, strict=True)]
    d_o = torch.zeros_like(o) if d_o is None else d_o
    wanted = list(ctx.needs_input_grad[-_TERMS:][:_LEARNED])
    dq, dk, dv, *d_bias = attention_triton_biased_backward(d_o, d_lse2, o, lse2, wanted, *inputs)
    d_bias = [d if want else None for d, want in zip(d_bias, wanted, strict=True)]
    return (dq, dk, dv, *(None,) * (count - 3 - _TERMS), *d_bias, *(None,) * (_TERMS - _LEARNED))


attention_triton_biased.register_autograd(_gradient, setup_context=_context)
