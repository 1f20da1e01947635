"""Attention by other weights than softmax, and over the keys of rules and lists: the formulas once
more, in the precision of the inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from attention_cases import DEVICE, Inputs, assert_no_worse, queries_of
from torch import Tensor

from jagged_kernels import JaggedTensor, jagged_attention

GRADIENTS = ("dq", "dk", "dv")
# [H or 1, n, m] of (user, queries, keys): which pairs are visible.
Mask = Callable[[int, int, int], Tensor]


def run(backend: Any, inputs: Inputs, *, split: Any = None, **options: Any) -> dict[str, Tensor]:
    """o and the gradients of q, k and v; `split` as `attention_cases.queries_of` has it."""
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    k, v = (JaggedTensor(x, inputs.k_offsets) for x in leaves[1:])
    q, schedule = queries_of(inputs, leaves[0], k, split, **options)
    given: dict[str, Any] = {"schedule": schedule, **options}
    out: Any = jagged_attention(q, k, v, backend=backend, **given)
    o = out.values if isinstance(out, JaggedTensor) else out.flatten(0, 1)
    return _with_gradients(o, inputs, leaves)


def formula(
    inputs: Inputs, mask: Mask, weigh: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """What PyTorch makes of the same numbers in the same precision, one user at a time.

    Args:
        mask: what is visible.
        weigh: ([H, n, m] scaled scores, visible pairs) -> weights, 0 of hidden ones.
    """
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    q, _, v = leaves
    outputs = [q[:0, :, :1].expand(-1, -1, v.shape[2])]
    for user, (_, _, q_user, k_user, v_user) in enumerate(_users(inputs, leaves)):
        seen = mask(user, q_user.shape[1], k_user.shape[1]).to(DEVICE)
        scores = q_user @ k_user.mT / math.sqrt(q.shape[2])
        weights = weigh(scores, seen.expand(scores.shape))
        outputs.append((weights.to(v.dtype) @ v_user).transpose(0, 1))
    return _with_gradients(torch.cat(outputs), inputs, leaves)


def terms(
    inputs: Inputs, mask: Mask, weigh: Callable[[Tensor, Tensor], Tensor]
) -> dict[str, Tensor]:
    """As `attention_cases.Terms`, of inputs in float64: for each result the sum of the absolute
    values of the products that it is a sum of."""
    results = {"o": torch.zeros_like(inputs.d_o)}
    results |= {n: torch.zeros_like(getattr(inputs, n[1:])) for n in GRADIENTS}
    scale, leaves = 1 / math.sqrt(inputs.q.shape[2]), (inputs.q, inputs.k, inputs.v)
    for user, (queries, keys, *parts) in enumerate(_users(inputs, leaves)):
        q, k, v = (x.abs() for x in parts)
        d_o = inputs.d_o[queries].transpose(0, 1).abs()
        scores = (scale * parts[0] @ parts[1].mT).requires_grad_()
        seen = mask(user, q.shape[1], k.shape[1]).to(DEVICE).expand(scores.shape)
        weights = weigh(scores, seen)
        kept, d_scores = weights.detach().abs(), d_o @ v.mT
        o = kept @ v
        if weigh is softmax:
            d_scores = kept * (d_scores + (d_o * o).sum(-1, keepdim=True))
        else:
            (slope,) = torch.autograd.grad(weights.sum(), scores)
            d_scores = slope.abs() * d_scores
        results["o"][queries] = o.transpose(0, 1)
        results["dq"][queries] = scale * (d_scores @ k).transpose(0, 1)
        for name, part in (("dk", scale * d_scores.mT @ q), ("dv", kept.mT @ d_o)):
            total = results[name][keys]
            total += part.transpose(0, 1).unflatten(1, (total.shape[1], -1)).sum(2)
    return results


def _users(
    inputs: Inputs, leaves: Sequence[Tensor]
) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """(its queries, its keys, q, k, v) of each user; heads in front, one of k and v for each of
    q."""
    q, k, v = leaves
    group = q.shape[1] // k.shape[1]
    bounds = (pairwise(x.tolist()) for x in (inputs.q_offsets, inputs.k_offsets))
    for ends in zip(*bounds, strict=True):
        queries, keys = (slice(*some) for some in ends)
        k_user, v_user = (x[keys].repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
        yield queries, keys, q[queries].transpose(0, 1), k_user, v_user


def softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Of a query that sees nothing all weights are 0."""
    some = seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, -math.inf).masked_fill(~some, 0.0)
    return scores.softmax(-1).masked_fill(~seen, 0.0)


def pointwise(
    function: Callable[[Tensor], Tensor], divide_by: float | None
) -> Callable[[Tensor, Tensor], Tensor]:
    def weigh(scores: Tensor, seen: Tensor) -> Tensor:
        n = scores.shape[-1] if divide_by is None else divide_by
        return function(scores).masked_fill(~seen, 0.0) / max(n, 1)

    return weigh


def assert_as_exact(
    inputs: Inputs,
    backend: str,
    mask: Mask,
    weigh: Callable[[Tensor, Tensor], Tensor],
    **options: Any,
) -> None:
    """At most as far from the specification in float64 as `attention_cases.Standard` allows beside
    PyTorch in the same precision; and the specification is the formula."""
    double = inputs.double()
    exact = run("reference", double, **options)
    for name, result in formula(double, mask, weigh).items():
        torch.testing.assert_close(exact[name], result, rtol=1e-9, atol=1e-9)
    peer = formula(inputs, mask, weigh)
    products = terms(double, mask, weigh)
    assert_no_worse(run(backend, inputs, **options), peer, exact, terms=products, name=backend)


def _with_gradients(out: Tensor, inputs: Inputs, leaves: list[Tensor]) -> dict[str, Tensor]:
    (out * inputs.d_o).sum(dtype=torch.float64).backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
    return {"o": out.detach(), **dict(zip(GRADIENTS, grads, strict=True))}
