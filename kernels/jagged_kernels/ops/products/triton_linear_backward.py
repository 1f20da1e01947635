"""The backward of `jagged_linear`: one launch over the tokens where matrices fit a program."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.ops.products import triton_products
from jagged_kernels.ops.products.triton_linear import launch_linear
from jagged_kernels.ops.products.triton_products import launch_products


def launch_linear_backward(
    d_out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    groups: Tensor | None,
    activation: str,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx [T, D], d_weight [G, D, K], d_bias [G, K]), empty where not wanted."""
    none = x.new_empty(0)
    want_d_x, want_d_weight, want_d_bias = wanted
    fused = max(weight.shape[1:]) <= triton_products.FUSED_UP_TO[x.element_size()]
    d_x = d_weight = d_bias = None
    if activation != "none" and not fused:
        before = launch_linear(x, weight, bias, offsets, groups, activation="none")
        d_out, activation = _through_activation(d_out, before, activation), "none"
    sums = want_d_weight or want_d_bias or activation != "none"
    if want_d_x and not (sums and fused):
        d_x = launch_linear(d_out, weight.mT, None, offsets, groups, activation="none")
    if sums:
        d_weight, d_bias, fused_d_x = launch_products(
            x,
            d_out,
            offsets,
            weight.shape[0],
            groups=groups,
            sum_y=bias.dtype if want_d_bias and bias is not None else None,
            weight=weight if fused and (want_d_x or activation != "none") else None,
            bias=bias if activation != "none" else None,
            activation=activation,
            want_d_x=want_d_x and fused,
        )
        d_x = fused_d_x if d_x is None else d_x
    d_weight = d_weight if want_d_weight else None
    return (
        none if d_x is None else d_x,
        none.clone() if d_weight is None else d_weight,
        none.clone() if d_bias is None else d_bias,
    )


def _through_activation(d_out: Tensor, before: Tensor, activation: str) -> Tensor:
    """The gradient before the activation."""
    if activation == "relu":
        return torch.ops.aten.threshold_backward(d_out, before, 0)
    if activation == "silu":
        return torch.ops.aten.silu_backward(d_out, before)
    return torch.ops.aten.gelu_backward(d_out, before)
