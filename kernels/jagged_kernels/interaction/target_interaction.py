"""`target_interaction`: the first layer of DIN's activation unit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.backends import Backend, choose_backend
from jagged_kernels.interaction.jagged_linear import ACTIVATIONS, Activation
from jagged_kernels.interaction.native_tiles import take
from jagged_kernels.interaction.native_users import token_users
from jagged_kernels.interaction.product_checks import check_matrix, check_operand
from jagged_kernels.jagged_tensor import JaggedTensor
from jagged_kernels.operators import call_op, define_gradient, define_op


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
    rows of W4: a matrix and a bias for each user. Triton adds up the matrix in float32 and rounds
    it once, where the concatenation would round k - q and k * q. Nothing of the size [T, 4 D] is
    made; beyond D or K of 64 the backward makes the matrices and their gradients: 2 [B, D, K].

    Source: Deep Interest Network, arXiv 1706.06978, section 4.3.

    >>> history = JaggedTensor(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([0, 2, 3]))
    >>> target_interaction(history, torch.tensor([[10.0], [20.0]]), torch.ones(1, 4)).values.T
    tensor([[12., 24., 66.]])
    """
    check_matrix("history", history)
    x = history.values
    dim = x.shape[1]
    check_operand("target", target, (len(history), dim), "[B, D]", x)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or 0 in weight.shape:
        got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"weight must be [K, 4 D] with K >= 1, got {got}")
    check_operand("weight", weight, (weight.shape[0], 4 * dim), "[K, 4 D]", x)
    check_operand("bias", bias, (weight.shape[0],), "[K]", x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    chosen = choose_backend(backend, x)
    if chosen == "reference":
        return history.with_values(_reference(x, target, weight, bias, history.offsets, activation))
    of_k, of_q, of_difference, scaled = weight.to(_compute(x)).mT.chunk(4)
    user_bias = target.to(_compute(x)) @ (of_q - of_difference)
    if bias is not None:
        user_bias = user_bias + bias
    function = partial(call_op, target_interaction_triton) if chosen == "triton" else _native
    shared = of_k + of_difference
    return history.with_values(
        function(x, target, shared, scaled, user_bias, history.offsets, activation)
    )


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
    ends = offsets.tolist()
    parts = [history[:0] @ weight[:, : history.shape[1]].T]
    for user in range(len(ends) - 1):
        k = history[ends[user] : ends[user + 1]]
        q = target[user].expand_as(k)
        parts.append(
            torch.nn.functional.linear(torch.cat([k, q, k - q, k * q], dim=1), weight, bias)
        )
    return ACTIVATIONS[activation](torch.cat(parts))


def _native(
    history: Tensor,
    target: Tensor,
    shared: Tensor,
    scaled: Tensor,
    user_bias: Tensor,
    offsets: Tensor,
    activation: str,
) -> Tensor:
    k = history.to(shared.dtype)
    if k.shape[0] == 0:
        return (k @ shared + user_bias.sum(0) + (target.to(shared.dtype) @ scaled).sum(0)).to(
            history.dtype
        )
    user = token_users(offsets, k.shape[0])
    out = k @ shared + (k * take(target.to(k.dtype), user)) @ scaled + take(user_bias, user)
    return ACTIVATIONS[activation](out).to(history.dtype)


def _target_interaction_triton(
    history: Tensor,
    target: Tensor,
    shared: Tensor,
    scaled: Tensor,
    user_bias: Tensor,
    offsets: Tensor,
    activation: str,
) -> Tensor:
    """activation(k_t (shared + target_b[:, None] * scaled) + user_bias_b) [T, K].

    shared, scaled [D, K] and user_bias [B, K] are float32.
    """
    from jagged_kernels.interaction.triton_linear import launch_linear

    weight = shared.expand(target.shape[0], -1, -1)
    fold = {"target": target, "scaled": scaled}
    return launch_linear(history, weight, user_bias, offsets, None, activation=activation, **fold)


def _target_interaction_triton_backward(
    d_out: Tensor,
    history: Tensor,
    target: Tensor,
    shared: Tensor,
    scaled: Tensor,
    user_bias: Tensor,
    offsets: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first five, in their dtypes and shapes."""
    from jagged_kernels.interaction.triton_target_interaction import launch_target_backward

    return launch_target_backward(
        d_out, history, target, shared, scaled, user_bias, offsets, activation=activation
    )


def _empty_output(history: Tensor, target: Tensor, shared: Tensor, *rest: Any) -> Tensor:
    return history.new_empty((history.shape[0], shared.shape[1]))


def _empty_gradients(d_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in inputs[:5])


target_interaction_triton = define_op(_target_interaction_triton, fake=_empty_output)
target_interaction_triton_backward = define_op(
    _target_interaction_triton_backward, fake=_empty_gradients
)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    return inputs


def _gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor
) -> tuple[Tensor | None, ...]:
    return call_op(target_interaction_triton_backward, d_out, *saved)


define_gradient(target_interaction_triton, save=_save, gradient=_gradient)
