"""Matrix products of the native and reference implementations, which autocast leaves alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.operators import transforms


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in their dtype, as its gradients are, under autocast too.

    Args:
        a: [..., M, K].
        b: [..., K, N] with the same leading dimensions.
    """
    if transforms():
        return _matmul(a, b)
    return _Matmul.apply(a, b)  # pyright: ignore[reportReturnType]


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    # Not `without_autocast`, which torch.compile cannot trace. Nobody casts on "meta".
    if a.device.type == "meta" or not torch.is_autocast_enabled(a.device.type):
        return a @ b
    with torch.autocast(a.device.type, enabled=False):
        return a @ b


class _Matmul(torch.autograd.Function):
    # A step of autograd of its own: autocast may be on where the backward runs.
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return _matmul(a, b)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        a, b = ctx.saved_tensors
        return (
            matmul(d_out, b.mT) if ctx.needs_input_grad[0] else None,
            matmul(a.mT, d_out) if ctx.needs_input_grad[1] else None,
        )
