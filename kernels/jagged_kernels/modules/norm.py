"""`JaggedLayerNorm` and `JaggedRMSNorm`: PyTorch's modules, over the tokens of a jagged tensor."""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import nn

from jagged_kernels.core.backends import Backend
from jagged_kernels.ops.normalise.norm import jagged_layer_norm, jagged_rms_norm
from jagged_kernels.tensors.checks import check_floats
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested


class JaggedLayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` by `jagged_layer_norm`.

    Args:
        normalized_shape: D, the last dimension of the tokens.
        eps, elementwise_affine, bias, device, dtype: as there.
        backend: as for `jagged_layer_norm`.

    Parameters and their names are those of `torch.nn.LayerNorm`. The result is in the dtype of x,
    with autocast, too.

    Raises:
        ValueError: `normalized_shape` has several dimensions.

    >>> norm = JaggedLayerNorm(2)
    >>> x = JaggedTensor(torch.tensor([[1.0, 3.0], [4.0, 2.0]]), torch.tensor([0, 1, 2]))
    >>> y, total = norm(x, residual=x)
    >>> y.values.round().tolist(), total.values.tolist()
    ([[-1.0, 1.0], [1.0, -1.0]], [[2.0, 6.0], [8.0, 4.0]])
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        _check_one(self)
        self.backend: Backend = backend

    def extra_repr(self) -> str:
        return super().extra_repr() + _backend_repr(self.backend)

    @overload
    def forward(self, input: JaggedTensor, residual: None = ...) -> JaggedTensor: ...
    @overload
    def forward(
        self, input: JaggedTensor, residual: JaggedTensor
    ) -> tuple[JaggedTensor, JaggedTensor]: ...
    @takes_nested
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input: JaggedTensor, residual: JaggedTensor | None = None
    ) -> JaggedTensor | tuple[JaggedTensor, JaggedTensor]:
        """Of input + residual, if that is given, and then also that sum; both [T, ..., D]."""
        _check_tokens(self, input)
        options: Any = {"eps": self.eps, "residual": residual, "backend": self.backend}
        return jagged_layer_norm(input, self.weight, self.bias, **options)


class JaggedRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` by `jagged_rms_norm`; else as `JaggedLayerNorm`.

    Args:
        eps: as for `jagged_rms_norm`, None too.

    >>> x = JaggedTensor(torch.tensor([[3.0, 4.0]]), torch.tensor([0, 1]))
    >>> JaggedRMSNorm(2)(x).values.detach()
    tensor([[0.8485, 1.1314]])
    """

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        _check_one(self)
        self.backend: Backend = backend

    def extra_repr(self) -> str:
        return super().extra_repr() + _backend_repr(self.backend)

    @overload
    def forward(self, x: JaggedTensor, residual: None = ...) -> JaggedTensor: ...
    @overload
    def forward(
        self, x: JaggedTensor, residual: JaggedTensor
    ) -> tuple[JaggedTensor, JaggedTensor]: ...
    @takes_nested
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: JaggedTensor, residual: JaggedTensor | None = None
    ) -> JaggedTensor | tuple[JaggedTensor, JaggedTensor]:
        """Of x + residual, if that is given, and then also that sum; both [T, ..., D]."""
        _check_tokens(self, x)
        options: Any = {"eps": self.eps, "residual": residual, "backend": self.backend}
        return jagged_rms_norm(x, self.weight, **options)


def _backend_repr(backend: str) -> str:
    return "" if backend == "auto" else f", backend={backend!r}"


def _check_one(module: nn.LayerNorm | nn.RMSNorm) -> None:
    if len(module.normalized_shape) != 1:
        raise ValueError(
            "normalized_shape must be D, the last dimension of the tokens, "
            f"got {tuple(module.normalized_shape)}"
        )


def _check_tokens(module: nn.LayerNorm | nn.RMSNorm, x: JaggedTensor) -> None:
    """Without parameters the operation would take tokens of any dimension."""
    check_floats("x", x)
    if x.values.shape[-1:] != module.normalized_shape:
        raise ValueError(
            f"x must be [T, ..., {module.normalized_shape[0]}], got {tuple(x.values.shape)}"
        )
