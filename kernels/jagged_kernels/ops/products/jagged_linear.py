"""`jagged_linear` and `jagged_dense_bmm`: a matrix for each user or group of users."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from jagged_kernels.core.autocast import as_autocast
from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.contents import readable
from jagged_kernels.core.flops import define_flops
from jagged_kernels.core.operators import call, define_gradient, define_op
from jagged_kernels.ops.products.checks import check_matrix, check_operand
from jagged_kernels.ops.products.matmul import matmul
from jagged_kernels.ops.products.native_tiles import from_places, take, to_places, token_tiles
from jagged_kernels.ops.users import zeros_of
from jagged_kernels.tensors.checks import check_like, user_bounds
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested

Activation = Literal["none", "relu", "silu", "gelu"]
ACTIVATIONS = {"none": lambda x: x, "relu": F.relu, "silu": F.silu, "gelu": F.gelu}


@takes_nested
def jagged_linear(
    x: JaggedTensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    groups: Tensor | None = None,
    activation: Activation = "none",
    backend: Backend = "auto",
) -> JaggedTensor:
    """activation(x_b @ weight[g] + bias[g]) for each user b of group g: a layer of a jagged MLP.

    Args:
        x: [T, D].
        weight: [G, D, K].
        bias: [G, K].
        groups: [B] int32 or int64, the group of each user, 0 to G - 1 (on a GPU not checked: that
            would wait for it). None: every user has a group of its own, G == B.
        activation: "none", "relu", "silu" or "gelu" (the exact one, with erf).
        backend: "triton", "native", "reference" or "auto" (see `choose_backend`).

    Returns:
        [T, K] in the dtype of `x`; gradients for x, weight and bias. A group without tokens has
        gradients of 0.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype, shape or device, before any launch.

    Triton accumulates in float32; float32 products use TF32 only if
    `torch.backends.cuda.matmul.fp32_precision` is "tf32", else six products of bfloat16 parts,
    which are as exact as one of float32. The backward recomputes what is before the activation;
    beyond D or K of 128 (64 in float32) in memory, with its gradient: 2 [T, K].

    Source: the jagged MLP of arXiv 2409.15373.

    >>> x = JaggedTensor(torch.ones(3, 2), torch.tensor([0, 2, 2, 3]))
    >>> weight = torch.tensor([[[1.0], [1.0]], [[-1.0], [-1.0]]])
    >>> jagged_linear(x, weight, groups=torch.tensor([0, 0, 1]), activation="relu").values
    tensor([[2.],
            [2.],
            [0.]])
    """
    if torch._C._is_any_autocast_enabled():
        x, weight, bias = as_autocast(x, weight, bias)
    _check_matrices(x, "weight", weight, bias, "G")
    count = weight.shape[0]
    if groups is not None:
        _check_groups(groups, x, count)
    elif count != len(x):
        raise ValueError(f"without groups, G must be B = {len(x)}, got weight of G = {count}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    return _linear(x, weight, bias, groups, activation, backend)


@takes_nested
def jagged_dense_bmm(
    x: JaggedTensor,
    dense: Tensor,
    *,
    bias: Tensor | None = None,
    backend: Backend = "auto",
) -> JaggedTensor:
    """x_b @ dense[b] + bias[b] for each user b.

    Args:
        x: [T, D].
        dense: [B, D, K].
        bias: [B, K].
        backend: as in `jagged_linear`, of which this is the case G == B.

    Returns:
        [T, K] in the dtype of `x`; gradients for x, dense and bias.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype, shape or device, before any launch.

    Source: the jagged-dense product of arXiv 2409.15373.

    >>> x = JaggedTensor(torch.ones(3, 2), torch.tensor([0, 2, 3]))
    >>> jagged_dense_bmm(x, torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])).values.T
    tensor([[3., 3., 7.]])
    """
    if torch._C._is_any_autocast_enabled():
        x, dense, bias = as_autocast(x, dense, bias)
    _check_matrices(x, "dense", dense, bias, "B")
    if dense.shape[0] != len(x):
        raise ValueError(f"dense must be [B, D, K] with B = {len(x)}, got {tuple(dense.shape)}")
    return _linear(x, dense, bias, None, "none", backend)


def _linear(
    x: JaggedTensor,
    weight: Tensor,
    bias: Tensor | None,
    groups: Tensor | None,
    activation: str,
    backend: Backend,
) -> JaggedTensor:
    chosen = choose_backend(backend, x.values)
    function = {
        "triton": partial(call, jagged_linear_triton),
        "native": linear_native,
        "reference": _reference,
    }[chosen]
    return x.with_values(function(x.values, weight, bias, x.offsets, groups, activation))


def _check_matrices(
    x: JaggedTensor, name: str, weight: Tensor, bias: Tensor | None, first: str
) -> None:
    """`x` and what the caller knows as `name`, of a first dimension that it knows as `first`."""
    check_matrix("x", x)
    dim, form = x.values.shape[1], f"[{first}, D, K]"
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name} must be a tensor {form}, got {type(weight).__name__}")
    if weight.dim() != 3 or weight.shape[1] != dim or weight.shape[2] == 0:
        got = tuple(weight.shape)
        raise ValueError(f"{name} must be {form} with D = {dim} and K >= 1, got {got}")
    check_like(name, weight, x.values)
    if bias is not None:
        shape = (weight.shape[0], weight.shape[2])
        check_operand("bias", bias, shape, f"[{first}, K]", x.values)


def _check_groups(groups: Tensor, x: JaggedTensor, count: int) -> None:
    if not isinstance(groups, Tensor):
        raise TypeError(f"groups must be a tensor [B], got {type(groups).__name__}")
    if groups.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"groups must be int32 or int64, got {groups.dtype}")
    if tuple(groups.shape) != (len(x),) or groups.device != x.device:
        raise ValueError(
            f"groups must be [B] = {(len(x),)} on {x.device}, got {tuple(groups.shape)} "
            f"on {groups.device}"
        )
    if readable(groups) and groups.numel():
        low, high = int(groups.min()), int(groups.max())
        if low < 0 or high >= count:
            raise ValueError(f"groups must lie in [0, G = {count}), got {low} to {high}")


def _reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    groups: Tensor | None,
    activation: str,
) -> Tensor:
    """The specification: a loop over users."""
    parts = []
    for user, (first, end) in enumerate(user_bounds(offsets)):
        group = user if groups is None else int(groups[user])
        part = matmul(x[first:end], weight[group])
        parts.append(part if bias is None else part + bias[group])
    if not parts:
        return _no_tokens(x, weight, bias)
    return ACTIVATIONS[activation](torch.cat(parts))


def _no_tokens(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    parameters = (weight,) if bias is None else (weight, bias)
    return zeros_of((x.shape[0], weight.shape[2]), x, *parameters)


def linear_native(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    groups: Tensor | None,
    activation: str,
) -> Tensor:
    tokens, users = x.shape[0], offsets.shape[0] - 1
    if tokens == 0 or users == 0:
        return _no_tokens(x, weight, bias)
    compute = torch.promote_types(x.dtype, torch.float32)
    tiles = token_tiles(offsets, tokens)
    places = (tiles.token, tiles.valid, tiles.place)
    group = tiles.user if groups is None else groups[tiles.user].long()
    out = matmul(to_places(x.to(compute), *places), take(weight.to(compute), group))
    if bias is not None:
        out = out + take(bias.to(compute), group)[:, None]
    return ACTIVATIONS[activation](from_places(out, *places)).to(x.dtype)


def _jagged_linear_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    groups: Tensor | None,
    activation: str,
) -> Tensor:
    from jagged_kernels.ops.products.triton_linear import launch_linear

    return launch_linear(x, weight, bias, offsets, groups, activation=activation)


def _jagged_linear_triton_backward(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    groups: Tensor | None,
    activation: str,
    want_d_x: bool,
    want_d_weight: bool,
    want_d_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, d_weight, d_bias), empty where not wanted."""
    from jagged_kernels.ops.products.triton_linear_backward import launch_linear_backward

    wanted = (want_d_x, want_d_weight, want_d_bias)
    return launch_linear_backward(d_out, x, weight, bias, offsets, groups, activation, wanted)


def _empty_output(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[2]))


def _empty_gradients(
    d_out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    count, dim, columns = weight.shape
    shapes = (x.shape, (count, dim, columns), (count, columns))
    wanted = rest[-3:]
    d_x, d_weight, d_bias = (
        x.new_empty(shape if want else (0,)) for shape, want in zip(shapes, wanted, strict=True)
    )
    return d_x, d_weight, d_bias


jagged_linear_triton = define_op(_jagged_linear_triton, fake=_empty_output)
jagged_linear_triton_backward = define_op(_jagged_linear_triton_backward, fake=_empty_gradients)


def _save(inputs: tuple[Any, ...], output: Tensor) -> tuple[Any, ...]:
    return inputs


def _gradient(
    saved: Sequence[Any], wanted: Sequence[bool], d_out: Tensor
) -> tuple[Tensor | None, ...]:
    found = call(jagged_linear_triton_backward, d_out, *saved, *wanted[:3])
    return tuple(d if want else None for d, want in zip(found, wanted[:3], strict=True))


define_gradient(jagged_linear_triton, save=_save, gradient=_gradient)


def product_flops(x: Tensor, weight: Tensor, *rest: Any) -> int:
    """Of each token with a matrix [D, K], the last two dimensions of `weight`."""
    return 2 * x.shape[0] * weight.shape[-2] * weight.shape[-1]


def _backward_flops(d_out: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    activation, want_d_x, want_d_weight, _ = rest[-4:]
    # What is before the activation is computed once more.
    products = (activation != "none") + want_d_x + want_d_weight
    return products * product_flops(x, weight)


define_flops(jagged_linear_triton, product_flops)
define_flops(jagged_linear_triton_backward, _backward_flops)
