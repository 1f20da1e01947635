"""What the mask hides touches nothing, be it NaN or inf.

A matrix product of weights is not enough for that: a hidden weight is 0, and 0 * NaN is NaN. So the
products of attention are sums over what is seen alone, and their gradients are such sums again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are finite; at times not known of such as have enormous sums."""
    return all(math.isfinite(x.sum()) for x in tensors)


def seen_product(
    weights: Tensor,
    x: Tensor,
    seen: Tensor,
    matmul: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:
    """[..., N, D]: the sums of weights [..., N, M] times x [..., M, D] over what is seen.

    Args:
        seen: [..., N, M] bool, of a shape that expands to that of `weights`. Weights and x that
            are hidden may be anything; those that are seen count as in any sum of numbers.
        matmul: of such weights and x, for dimensions in front that do not broadcast.
    """
    weights = weights.masked_fill(~seen, 0.0)
    bad = ~x.isfinite()
    product = matmul(weights, x.masked_fill(bad, 0.0))
    # What is mapped over by `torch.func.vmap` cannot be asked.
    mapped = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore[reportAttributeAccessIssue]
    if not mapped and not bad.any():
        return product
    # Of the terms with a bad number of x, how many there are, how many are a number times inf, and
    # of these how many more are inf than -inf; then what is left are terms of NaN.
    infinite = x.isinf()
    signs = x.masked_fill(~infinite, 0.0).sign()
    terms = matmul(seen.expand(weights.shape).to(x.dtype), bad.to(x.dtype))
    of_inf = matmul((weights != 0.0).to(x.dtype), infinite.to(x.dtype))
    excess = matmul(weights.sign(), signs)
    product = product.masked_fill(terms > of_inf, math.nan)
    product = torch.where(of_inf + excess > 0, product + math.inf, product)
    return torch.where(of_inf - excess > 0, product - math.inf, product)


class _Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(weights: Tensor, x: Tensor, seen: Tensor) -> Tensor:
        return seen_product(weights, x, seen)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (d_out,), (weights, x, seen) = gradients, ctx.saved_tensors
        d_weights = (d_out @ x.mT).masked_fill(~seen, 0.0)
        return d_weights, weighted_sum(weights.mT, d_out, seen.mT), None


class _Scores(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        return (q @ k.mT).masked_fill(~seen, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (d_scores,), (q, k, seen) = gradients, ctx.saved_tensors
        d_q = weighted_sum(d_scores, k, seen)
        return d_q, weighted_sum(d_scores.mT, q, seen.mT), None


def weighted_sum(weights: Tensor, x: Tensor, seen: Tensor) -> Tensor:
    """`seen_product` with gradients, of any order."""
    return _Product.apply(weights, x, seen)  # pyright: ignore[reportReturnType]


def scores_of(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """[..., N, M]: q [..., N, D] times the transpose of k [..., M, D] with gradients of any order;
    0 where a query does not see a key."""
    return _Scores.apply(q, k, seen)  # pyright: ignore[reportReturnType]
