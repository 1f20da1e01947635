"""`target_interaction`: the first layer of DIN's activation unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jagged_kernels.core.autocast import as_autocast
from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.flops import define_flops
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.ops.products.checks import check_matrix, check_operand
from jagged_kernels.ops.products.jagged_linear import ACTIVATIONS, Activation
from jagged_kernels.ops.products.matmul import matmul
from jagged_kernels.ops.products.native_tiles import take
from jagged_kernels.ops.users import token_users, zeros_of
from jagged_kernels.tensors.checks import user_bounds
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested


@takes_nested
def target_interaction(
    history: JaggedTensor,
    target: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    activation: Activation = "none",
    backend: Backend = "auto",
) -> JaggedTensor:
    """activation([k, q, k - q, k * q] @ weight^T + bias) for each token k of a user with target q.

    Args:
        history: [T, D], the events k.
        target: [B, D], the candidate q of each user.
        weight: [K, 4 D], as `torch.nn.Linear` has it.
        bias: [K].
        activation: "none", "relu", "silu" or "gelu" (the exact one, with erf).
        backend: "triton", "native", "reference" or "auto" (see `choose_backend`).

    Returns:
        [T, K] in the dtype of `history`; gradients for history, target, weight and bias.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype, shape or device, before any launch.

    With weight^T = [W1; W2; W3; W4] the layer is k (W1 + W3 + q W4) + q (W2 - W3), q scaling the
    rows of W4: a matrix and a bias for each user. Triton rounds the sums of the weight once, and
    k * q or the matrix, where the concatenation would round k - q and k * q. Nothing of the size
    [T, 4 D] is made; beyond D or K of 64 the backward makes the matrices and their gradients:
    2 [B, D, K].

    Source: Deep Interest Network, arXiv 1706.06978, section 4.3.

    >>> history = JaggedTensor(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 2, 3]))
    >>> target_interaction(history, torch.tensor([[10.0], [20.0]]), torch.ones(1, 4)).values.T
    tensor([[12., 24., 66.]])
    """
    if torch._C._is_any_autocast_enabled():
        history, target, weight, bias = as_autocast(history, target, weight, bias)
    check_matrix("history", history)
    x = history.values
    dim = x.shape[1]
    check_operand("target", target, (len(history), dim), "[B, D]", x, of="history")
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a tensor [K, 4 D], got {type(weight).__name__}")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ValueError(f"weight must be [K, 4 D] with K >= 1, got {tuple(weight.shape)}")
    columns = weight.shape[0]
    check_operand("weight", weight, (columns, 4 * dim), "[K, 4 D]", x, of="history")
    if bias is not None:
        check_operand("bias", bias, (columns,), "[K]", x, of="history")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    functions: dict[str, Callable[..., Tensor]] = {
        "triton": partial(call, target_interaction_triton),
        "native": _native,
        "reference": _reference,
    }
    function = functions[choose_backend(backend, x)]
    return history.with_values(function(x, target, weight, bias, history.offsets, activation))


class _Parts(NamedTuple):
    """Token k of a user with target q gets k (shared + q scaled) + q of_target."""

    shared: Tensor  # [D, K]
    scaled: Tensor  # [D, K]
    of_target: Tensor  # [D, K]


def _parts(weight: Tensor) -> _Parts:
    of_k, of_q, of_difference, scaled = weight.to(_compute(weight)).mT.chunk(4)
    return _Parts(of_k + of_difference, scaled, of_q - of_difference)


def _user_bias(target: Tensor, of_target: Tensor, bias: Tensor | None) -> Tensor:
    """[B, K]"""
    user_bias = matmul(target.to(of_target.dtype), of_target)
    return user_bias if bias is None else user_bias + bias


def _compute(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _reference(
    history: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    activation: str,
) -> Tensor:
    """The specification: a loop over users."""
    parameters = (weight,) if bias is None else (weight, bias)
    parts = [zeros_of((0, weight.shape[0]), history[:0], target, *parameters)]
    for user, (first, end) in enumerate(user_bounds(offsets)):
        k = history[first:end]
        q = target[user].expand_as(k)
        part = matmul(torch.cat([k, q, k - q, k * q], dim=1), weight.T)
        parts.append(part if bias is None else part + bias)
    return ACTIVATIONS[activation](torch.cat(parts))


def _native(
    history: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    activation: str,
) -> Tensor:
    shared, scaled, of_target = _parts(weight)
    user_bias = _user_bias(target, of_target, bias)
    k = history.to(shared.dtype)
    if k.shape[0] == 0:
        out = zeros_of((0, weight.shape[0]), k, target, scaled, shared, user_bias)
        return out.to(history.dtype)
    user = token_users(offsets, k.shape[0])
    of_both = matmul(k * take(target.to(k.dtype), user), scaled)
    out = matmul(k, shared) + of_both + take(user_bias, user)
    return ACTIVATIONS[activation](out).to(history.dtype)


def _target_interaction_triton(
    history: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    activation: str,
) -> Tensor:
    from jagged_kernels.ops.products.triton_linear import launch_linear
    from jagged_kernels.ops.products.triton_target_interaction import (
        FORWARD_MOST_FUSED,
        launch_target,
    )

    if max(weight.shape[0], history.shape[1]) <= FORWARD_MOST_FUSED[history.element_size()]:
        return launch_target(history, target, weight, bias, offsets, activation=activation)
    shared, scaled, of_target = _parts(weight)
    user_bias = _user_bias(target, of_target, bias)
    # One matrix for all users, whatever their number.
    weights = shared.as_strided((target.shape[0], *shared.shape), (0, *shared.stride()))
    fold = {"target": target, "scaled": scaled}
    return launch_linear(history, weights, user_bias, offsets, None, activation=activation, **fold)


def _target_interaction_triton_backward(
    d_out: Tensor,
    history: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first four, in their dtypes and shapes; empty for no bias."""
    from jagged_kernels.ops.products import triton_target_interaction as fused
    from jagged_kernels.ops.products.triton_linear_backward import launch_linear_backward

    if max(weight.shape[0], history.shape[1]) <= fused.MOST_FUSED:
        inputs = (history, target, weight, bias, offsets)
        return fused.launch_target_backward(d_out, *inputs, activation=activation)
    shared, scaled, of_target = _parts(weight)
    user_bias, q = _user_bias(target, of_target, bias), target.to(shared.dtype)
    weights = (shared + q[:, :, None] * scaled).to(history.dtype)
    d_history, d_weights, d_user_bias = launch_linear_backward(
        d_out, history, weights, user_bias, offsets, None, activation, (True, True, True)
    )
    d_weights = d_weights.to(shared.dtype)
    d_target = torch.einsum("bdk,dk->bd", d_weights, scaled) + d_user_bias @ of_target.mT
    d_scaled = torch.einsum("bdk,bd->dk", d_weights, q)
    d_shared, d_of_target = d_weights.sum(0), q.mT @ d_user_bias
    d_weight = torch.cat([d_shared, d_of_target, d_shared - d_of_target, d_scaled])
    d_bias = weight.new_empty(0) if bias is None else d_user_bias.sum(0).to(bias.dtype)
    return d_history, d_target.to(target.dtype), d_weight.mT.to(weight.dtype).contiguous(), d_bias


def _empty_output(history: Tensor, target: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return history.new_empty((history.shape[0], weight.shape[0]))


def _empty_gradients(
    d_out: Tensor,
    history: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_bias = weight.new_empty(0 if bias is None else bias.shape)
    inputs = (history, target, weight)
    d_history, d_target, d_weight = (x.new_empty(x.shape) for x in inputs)
    return d_history, d_target, d_weight, d_bias


target_interaction_triton = define_op(_target_interaction_triton, fake=_empty_output)
target_interaction_triton_backward = define_op(
    _target_interaction_triton_backward, fake=_empty_gradients
)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    return inputs


def _gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor
) -> tuple[Tensor | None, ...]:
    found = call(target_interaction_triton_backward, d_out, *saved)
    return tuple(d if want else None for d, want in zip(found, wanted[:4], strict=True))


define_gradient(target_interaction_triton, save=_save, gradient=_gradient)


def _forward_flops(history: Tensor, target: Tensor, weight: Tensor, *rest: Any) -> int:
    """Of each token with the matrix of its user, [D, K]."""
    return 2 * history.numel() * weight.shape[0]


def _backward_flops(d_out: Tensor, *inputs: Any) -> int:
    # What is before the activation is computed once more.
    return (2 + (inputs[-1] != "none")) * _forward_flops(*inputs)


define_flops(target_interaction_triton, _forward_flops)
define_flops(target_interaction_triton_backward, _backward_flops)
