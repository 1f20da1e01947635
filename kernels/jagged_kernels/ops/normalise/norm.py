"""`jagged_layer_norm` and `jagged_rms_norm`, with the residual sum that comes before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from jagged_kernels.core.backends import Backend, choose_backend_for_rows
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.tensors.checks import check_floats, check_like, check_same_offsets, reshaped
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested


@overload
def jagged_layer_norm(
    x: JaggedTensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    *,
    eps: float = ...,
    residual: None = ...,
    backend: Backend = ...,
) -> JaggedTensor: ...
@overload
def jagged_layer_norm(
    x: JaggedTensor,
    weight: Tensor | None = ...,
    bias: Tensor | None = ...,
    *,
    eps: float = ...,
    residual: JaggedTensor,
    backend: Backend = ...,
) -> tuple[JaggedTensor, JaggedTensor]: ...
@takes_nested
def jagged_layer_norm(
    x: JaggedTensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    residual: JaggedTensor | None = None,
    backend: Backend = "auto",
) -> JaggedTensor | tuple[JaggedTensor, JaggedTensor]:
    """Layer normalisation of each token (arXiv 1607.06450), of x + residual if that is given.

    Args:
        x: [T, ..., D] of a floating dtype; the last dimension is normalised.
        weight, bias: [D], in float32 or the dtype of x; 1 and 0 when None.
        eps: added to the variance.
        residual: like x; added before.
        backend: "triton" (D up to 8192), "native", "reference" or "auto" (triton on CUDA tensors,
            beyond 8192 native).

    Returns:
        The normalised tokens in the shape and dtype of x; with a residual also the sum (in the
        dtype of x, as it was normalised), which is what the next layer adds to. Statistics are in
        float32 (float64 for float64). Gradients for x, residual, weight and bias.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype, shape or device, before any launch.
        NotImplementedError: D above 8192 on the triton backend.

    >>> x = JaggedTensor(torch.tensor([[1.0, 3.0], [5.0, 5.0]]), torch.tensor([0, 1, 2]))
    >>> jagged_layer_norm(x, eps=0.1).values
    tensor([[-0.9535,  0.9535],
            [ 0.0000,  0.0000]])
    """
    return _norm(x, weight, bias, eps, residual, backend, rms=False)


@overload
def jagged_rms_norm(
    x: JaggedTensor,
    weight: Tensor | None = ...,
    *,
    eps: float | None = ...,
    residual: None = ...,
    backend: Backend = ...,
) -> JaggedTensor: ...
@overload
def jagged_rms_norm(
    x: JaggedTensor,
    weight: Tensor | None = ...,
    *,
    eps: float | None = ...,
    residual: JaggedTensor,
    backend: Backend = ...,
) -> tuple[JaggedTensor, JaggedTensor]: ...
@takes_nested
def jagged_rms_norm(
    x: JaggedTensor,
    weight: Tensor | None = None,
    *,
    eps: float | None = 1e-6,
    residual: JaggedTensor | None = None,
    backend: Backend = "auto",
) -> JaggedTensor | tuple[JaggedTensor, JaggedTensor]:
    """Each token divided by the root of its mean square (arXiv 1910.07467), else as
    `jagged_layer_norm`: nothing is subtracted, and there is no bias.

    Args:
        eps: added to the mean square. None: as in `torch.nn.functional.rms_norm`, that of the
            dtype of the statistics (`torch.finfo`): float32, or float64 for float64.

    >>> x = JaggedTensor(torch.tensor([[3.0, 4.0]]), torch.tensor([0, 1]))
    >>> jagged_rms_norm(x).values
    tensor([[0.8485, 1.1314]])
    """
    if eps is None:
        check_floats("x", x)
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return _norm(x, weight, None, eps, residual, backend, rms=True)


def _norm(
    x: JaggedTensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: JaggedTensor | None,
    backend: Backend,
    *,
    rms: bool,
) -> JaggedTensor | tuple[JaggedTensor, JaggedTensor]:
    check_floats("x", x)
    shape = x.values.shape
    if len(shape) < 2 or shape[-1] == 0:
        raise ValueError(f"x must be [T, ..., D] with D at least 1, got {tuple(shape)}")
    for name, parameter in (("weight", weight), ("bias", bias)):
        _check_parameter(name, parameter, x.values)
    rows, added = x.values.flatten(0, -2), None
    if residual is not None:
        check_floats("residual", residual)
        check_same_offsets("residual", x.offsets, residual.offsets)
        check_like("residual", residual.values, x.values)
        if residual.values.shape != shape:
            raise ValueError(
                f"residual must be {tuple(shape)} like x, got {tuple(residual.values.shape)}"
            )
        added = residual.values.flatten(0, -2)
    chosen = choose_backend_for_rows(backend, x.values)
    if chosen == "triton":
        y, total = call(norm_op, rows, added, weight, bias, eps, rms)
    else:
        total = rows if added is None else rows + added
        # Nothing about it is irregular: the specification serves as the native backend, too.
        y = _norm_reference(total, weight, bias, eps, rms)
    out = x.with_values(reshaped(y, shape))
    return out if residual is None else (out, x.with_values(reshaped(total, shape)))


def _check_parameter(name: str, parameter: Tensor | None, x: Tensor) -> None:
    if parameter is None:
        return
    check_like(name, parameter, x, or_float32=True)
    if parameter.shape != x.shape[-1:]:
        raise ValueError(f"{name} must be [{x.shape[-1]}], got {tuple(parameter.shape)}")


def _norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, rms: bool
) -> Tensor:
    """The specification: x [rows, D]."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if not rms:
        y = y - y.mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


def _norm_triton(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
) -> tuple[Tensor, Tensor]:
    """(y, x + residual), both [rows, D]; the second is empty without a residual."""
    from jagged_kernels.ops.normalise.triton_norm import launch_norm

    return launch_norm(x, residual, weight, bias, eps=eps, rms=rms)


def _norm_triton_backward(
    d_y: Tensor,
    d_total: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of total = x + residual, weight and bias; empty for those that are None."""
    from jagged_kernels.ops.normalise.triton_norm import launch_norm_backward

    return launch_norm_backward(d_y, d_total, total, weight, bias, eps=eps, rms=rms)


def _empty_norm(x: Tensor, residual: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape)


def _empty_gradients(
    d_y: Tensor,
    d_total: Tensor | None,
    total: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    d_weight, d_bias = (
        total.new_empty(0) if p is None else p.new_empty(p.shape) for p in (weight, bias)
    )
    return total.new_empty(total.shape), d_weight, d_bias


norm_op = define_op(_norm_triton, fake=_empty_norm)
norm_backward_op = define_op(_norm_triton_backward, fake=_empty_gradients)


def _save(inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> tuple[Any, ...]:
    x, residual, *parameters = inputs
    return residual is not None, x if residual is None else output[1], *parameters


def _gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_y: Tensor | None, d_total: Tensor | None
) -> tuple[Tensor | None, ...]:
    has_sum, total, *rest = saved
    d_y = torch.zeros_like(total) if d_y is None else d_y
    d_sum, *d_parameters = call(norm_backward_op, d_y, d_total if has_sum else None, total, *rest)
    given = (d_sum, d_sum, *d_parameters)
    return tuple(d if want else None for d, want in zip(given, wanted[:4], strict=True))


define_gradient(norm_op, save=_save, gradient=_gradient)
