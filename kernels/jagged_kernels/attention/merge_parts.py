"""Attention of the same queries over two sets of keys, put together as attention over both.

Each part's output is weighted with its share of the sum of exponentials, which lse knows.

Source: FlashAttention, arXiv 2205.14135 (section 3.1, softmax of two blocks).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend_for_rows
from jagged_kernels.core.operators import call, define_gradient, define_op


def merge_parts(
    o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """(o, lse) over the keys of both parts, which share none.

    Args:
        o1, o2: [T, H, Dv] of one dtype. lse1, lse2: [T, H], float32 (float64 for float64 outputs);
            -inf where a query sees no key of that part, whose output is 0 there.
        backend: "triton", "native", "reference" (these two are one: plain PyTorch), or "auto".

    Returns:
        o [T, H, Dv] in the dtype of the parts, added in float32 or float64, and lse [T, H] of both;
        0 and -inf where both parts see nothing. All four inputs get gradients.
    """
    if choose_backend_for_rows(backend, o1) == "triton":
        return call(merge_parts_op, o1, lse1, o2, lse2)
    return merge_parts_reference(o1, lse1, o2, lse2)


def merge_parts_reference(
    o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor]:
    """The specification, vectorised as it is."""
    outputs = torch.stack([o1, o2]).to(lse1.dtype)
    lses = torch.stack([lse1, lse2])
    nothing = (lses == -math.inf).all(0)
    # softmax of nothing is 0 here, not NaN; in its gradient too.
    lses = lses.masked_fill(nothing, 0.0)
    shares = lses.softmax(0).masked_fill(nothing, 0.0)
    o = (shares[..., None] * outputs).sum(0)
    return o.to(o1.dtype), lses.logsumexp(0).masked_fill(nothing, -math.inf)


def _merge_parts(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    from jagged_kernels.attention.triton_merge_parts import launch_merge

    return launch_merge(o1, lse1, o2, lse2)


def _merge_parts_backward(
    d_o: Tensor, d_lse: Tensor | None, o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of o1, lse1, o2 and lse2."""
    from jagged_kernels.attention.triton_merge_parts import launch_merge_backward

    return launch_merge_backward(d_o, d_lse, o1, lse1, o2, lse2)


def _empty(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return o1.new_empty(o1.shape), lse1.new_empty(lse1.shape)


def _empty_backward(
    d_o: Tensor, d_lse: Tensor | None, o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *_empty(o1, lse1, o2, lse2), *_empty(o2, lse2, o1, lse1)


merge_parts_op = define_op(_merge_parts, fake=_empty, name="merge_parts")
merge_parts_backward_op = define_op(
    _merge_parts_backward, fake=_empty_backward, name="merge_parts_backward"
)


def _save(inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    return inputs


def _gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_o: Tensor | None, d_lse: Tensor | None
) -> tuple[Tensor, ...]:
    d_o = torch.zeros_like(saved[0]) if d_o is None else d_o
    return call(merge_parts_backward_op, d_o, d_lse, *saved)


define_gradient(merge_parts_op, save=_save, gradient=_gradient)
