"""The native backend as operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.attention.flops import (
    backward_flops,
    forward_flops,
    pairs_of_lists,
    pairs_of_offsets,
)
from jagged_kernels.attention.meeting import MEET_SCHEMA, MeetTerms
from jagged_kernels.attention.native import (
    Mask,
    attention_native_backward,
    attention_native_forward,
)
from jagged_kernels.attention.operators.plain import empty_gradients, output_gradients
from jagged_kernels.attention.scores.bias_terms import BIAS_SCHEMA, BiasTerms, given_gradients
from jagged_kernels.core.flops import define_flops
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.schedule.row_layout import NO_LIMIT

_ARGUMENTS = (
    "Tensor q_offsets, Tensor k_offsets, int left, int right, float scale, "
    f"Tensor? dropout_seed, float dropout_p, int block, {MEET_SCHEMA}, {BIAS_SCHEMA}"
)
_MEETS = len(MeetTerms._fields)
_RANGES = MeetTerms()


def attention_native(
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
    block: int = 0,
    meets: MeetTerms = _RANGES,
) -> tuple[Tensor, Tensor]:
    """(o [Tq, H, Dv], lse [Tq, H]), as `attention_reference`; `block`: of the lists."""
    terms = BiasTerms() if bias is None else bias
    rest = (*window, scale, dropout_seed, dropout_p, block, *meets, *terms)
    return call(native_op, q, k, v, q_offsets, k_offsets, *rest)


def _attention_native(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor, *mask: Any
) -> tuple[Tensor, Tensor]:
    return attention_native_forward(q, k, v, q_offsets, k_offsets, _mask(*mask))


def _attention_native_backward(
    d_o: Tensor,
    d_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *mask: Any,
) -> tuple[Tensor, ...]:
    """(dq, dk, dv) and the gradients of `BiasTerms.learned`, empty where there is none."""
    dq, dk, dv, d_bias = attention_native_backward(
        d_o, d_lse, q, k, v, o, lse, q_offsets, k_offsets, _mask(*mask)
    )
    return dq, dk, dv, *(q.new_empty(0) if d is None else d for d in d_bias)


def _mask(
    left: int, right: int, scale: float, seed: Tensor | None, dropout_p: float, block: int,
    *terms: Any,
) -> Mask:  # fmt: skip
    meets, bias = MeetTerms(*terms[:_MEETS]), BiasTerms(*terms[_MEETS:])
    # A rule says all of the mask.
    window = (NO_LIMIT, NO_LIMIT) if meets.ruled else (left, right)
    return Mask(
        window, scale, bias if bias.adds else None, dropout_p, seed,
        meets.scores, meets.divide_by, meets.lists(block, left),
    )  # fmt: skip


def _empty_output(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2], dtype=lse_dtype)


def _empty_backward(d_o: Tensor, d_lse: Tensor | None, q: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    learned = BiasTerms(*rest[-len(BiasTerms._fields) :]).learned()
    d_bias = (q.new_empty(0) if t is None else torch.empty_like(t) for t in learned)
    return *empty_gradients(d_o, d_lse, q, *rest), *d_bias


native_op = define_op(
    _attention_native,
    fake=_empty_output,
    schema=f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)",
)
native_backward_op = define_op(
    _attention_native_backward,
    fake=_empty_backward,
    schema="(Tensor d_o, Tensor? d_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)


def _save(inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    return (*inputs[:3], *output, *inputs[3:])


def _gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_o: Tensor | None, d_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    given = output_gradients(d_o, d_lse, *saved[3:5])
    dq, dk, dv, *d_bias = call(native_backward_op, *given, *saved)
    return given_gradients((dq, dk, dv), d_bias, wanted)


define_gradient(native_op, save=_save, gradient=_gradient)


def _forward_flops(
    q: Tensor, k: Tensor, v: Tensor, q_offsets: Tensor, k_offsets: Tensor,
    left: int, right: int, *rest: Any,
) -> Any:  # fmt: skip
    return forward_flops(q, v, _pairs(q, k, q_offsets, k_offsets, left, right, *rest))


def _backward_flops(
    d_o: Tensor, d_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    q_offsets: Tensor, k_offsets: Tensor, left: int, right: int, *rest: Any,
) -> Any:  # fmt: skip
    return backward_flops(q, v, _pairs(q, k, q_offsets, k_offsets, left, right, *rest))


def _pairs(
    q: Tensor, k: Tensor, q_offsets: Tensor, k_offsets: Tensor, left: int, right: int,
    scale: float, dropout_seed: Tensor | None, dropout_p: float, block: int, *terms: Any,
) -> Any:  # fmt: skip
    meets = MeetTerms(*terms[:_MEETS])
    lists = meets.lists(block, left)
    if lists is not None:
        return pairs_of_lists(q, k, lists, q_offsets, k_offsets, (left, right))
    return pairs_of_offsets(q, k, q_offsets, k_offsets, left, right)


define_flops(native_op, _forward_flops)
define_flops(native_backward_op, _backward_flops)
