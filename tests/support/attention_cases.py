"""Inputs for attention tests, and results of every backend in one form."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from jagged_kernels import (
    AttentionSchedule,
    JaggedTensor,
    attention_schedule,
    jagged_attention,
    lengths_to_offsets,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter takes milliseconds a block: small tiles reach every branch with few tokens.
TILE = 64 if DEVICE == "cuda" else 16
RESULTS = ("o", "lse", "dq", "dk", "dv")
FACTOR = 3.0  # see `Standard`
# Of q and k, and of v. On a GPU what is compiled differs with each.
DIFFERENT_DIMS = (
    (16, 32), (16, 64), (32, 16), (32, 64), (64, 16), (64, 32), (64, 128), (80, 16),
    (128, 16), (128, 32), (128, 64), (256, 16), (256, 64), (16, 256),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One attention problem; `mask` holds causal, window and scale."""

    q_lengths: Sequence[int]
    k_lengths: Sequence[int] | None = None
    heads: int = 2
    kv_heads: int = 2
    dim: int = 16
    dim_v: int | None = None
    mask: dict[str, Any] = field(default_factory=dict)
    offsets_dtype: torch.dtype = torch.int64

    def inputs(self, dtype: torch.dtype, *, seed: int = 0) -> Inputs:
        generator = torch.Generator().manual_seed(seed)
        dim_v = self.dim_v or self.dim
        q_lengths = torch.tensor(self.q_lengths, dtype=self.offsets_dtype)
        k_lengths = torch.tensor(self.k_lengths or self.q_lengths, dtype=self.offsets_dtype)
        tq, tk = int(q_lengths.sum()), int(k_lengths.sum())

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(DEVICE, dtype)

        return Inputs(
            q=random(tq, self.heads, self.dim),
            k=random(tk, self.kv_heads, self.dim),
            v=random(tk, self.kv_heads, dim_v),
            d_o=random(tq, self.heads, dim_v),
            d_lse=random(tq, self.heads).float(),
            q_offsets=lengths_to_offsets(q_lengths).to(DEVICE),
            k_offsets=lengths_to_offsets(k_lengths).to(DEVICE),
        )


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    d_o: Tensor
    d_lse: Tensor
    q_offsets: Tensor
    k_offsets: Tensor

    def with_shared_offsets(self) -> Inputs:
        """Queries and keys with one tensor of offsets, as self-attention has it."""
        return replace(self, k_offsets=self.q_offsets)

    def double(self) -> Inputs:
        parts = {name: getattr(self, name).double() for name in ("q", "k", "v", "d_o", "d_lse")}
        return replace(self, **parts)


def run(
    backend: Any,
    inputs: Inputs,
    *,
    tile: int | None = TILE,
    split: Any = None,
    **mask: Any,
) -> dict[str, Tensor]:
    """Output, lse and the gradients of q, k, v through both outputs; `split`: as `queries_of` has
    it, in place of tiles."""
    q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    jk = JaggedTensor(k, inputs.k_offsets)
    jq, schedule = queries_of(inputs, q, jk, split, **mask)
    if split is None and tile is not None:
        band = {name: mask[name] for name in ("causal", "window") if name in mask}
        # Offsets of their own stay so, for the kernels that self-attention does without.
        options = {"tile_q": tile, "tile_k": tile, "shared_offsets": False}
        schedule = attention_schedule(jq, jk, **options, **band)
    out, lse = jagged_attention(
        jq, jk, jk.with_values(v), backend=backend, schedule=schedule, return_lse=True, **mask
    )
    o = out.values if isinstance(out, JaggedTensor) else out.flatten(0, 1)
    lse = lse.view(o.shape[:2])
    loss = (o * inputs.d_o).sum(dtype=torch.float64)
    loss = loss + (lse.masked_fill(lse == -math.inf, 0.0) * inputs.d_lse).sum()
    loss.backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (q, k, v)]
    return dict(zip(RESULTS, [o.detach(), lse.detach(), *grads], strict=True))


def queries_of(
    inputs: Inputs, q: Tensor, k: JaggedTensor, split: Any, **mask: Any
) -> tuple[Any, AttentionSchedule | None]:
    """(jagged queries, None), or with `split` (dense ones, as many of each user, and a schedule
    whose rows are cut so)."""
    if split is None:
        return JaggedTensor(q, inputs.q_offsets), None
    dense = q.view(len(k), -1, *q.shape[1:])
    shown = {name: mask[name] for name in ("causal", "window", "keys") if name in mask}
    return dense, attention_schedule(dense, k, split=split, **shown)


@dataclass(frozen=True)
class User:
    """One user who sees something, with the heads in front."""

    index: int
    q_part: slice  # of all its queries
    keys: slice
    queries: Tensor  # [n], those of its queries that see a key
    q: Tensor  # [H, n, D]
    k: Tensor  # [H, m, D], a head for each of q
    v: Tensor  # [H, m, Dv]
    seen: Tensor  # [n, m] bool


def seen_keys(
    n: int, m: int, *, causal: bool = False, window: tuple[int, int] | None = None
) -> Tensor:
    """[n, m] bool on the CPU: does this query of a user see that key?"""
    left, right = window or (-1, -1)
    right = 0 if causal else right
    distance = torch.arange(m)[None, :] - torch.arange(n)[:, None] - (m - n)
    seen = (distance >= -left) | torch.tensor(left < 0)
    return seen & ((distance <= right) | torch.tensor(right < 0))


def users(
    inputs: Inputs,
    leaves: Sequence[Tensor],
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
) -> Iterator[User]:
    """The users of `inputs`, of q, k and v in `leaves`."""
    q, k, v = leaves
    group = q.shape[1] // k.shape[1]
    q_ends, k_ends = inputs.q_offsets.tolist(), inputs.k_offsets.tolist()
    for user in range(len(q_ends) - 1):
        q_part, keys = slice(*q_ends[user : user + 2]), slice(*k_ends[user : user + 2])
        n, m = q_part.stop - q_part.start, keys.stop - keys.start
        seen = seen_keys(n, m, causal=causal, window=window)
        some = seen.any(1)
        if not some.any():
            continue
        queries = torch.arange(q_part.start, q_part.stop)[some].to(q.device)
        yield User(
            user,
            q_part,
            keys,
            queries,
            q[queries].transpose(0, 1),
            k[keys].repeat_interleave(group, 1).transpose(0, 1),
            v[keys].repeat_interleave(group, 1).transpose(0, 1),
            seen[some].to(q.device),
        )


def sdpa(inputs: Inputs, *, scale: float | None = None, **mask: Any) -> dict[str, Tensor]:
    """What PyTorch makes of the same numbers in the same precision, one user at a time."""
    q, k, v = leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    scale = scale or 1 / math.sqrt(q.shape[2])
    o = torch.zeros_like(inputs.d_o)
    lse = torch.full_like(inputs.d_lse, -math.inf)
    loss = inputs.d_lse.new_zeros(())
    for user in users(inputs, leaves, **mask):
        # PyTorch's masks do not stand a negative scale.
        signed = user.q if scale >= 0 else -user.q
        out = torch.nn.functional.scaled_dot_product_attention(
            signed[None], user.k[None], user.v[None], attn_mask=user.seen, scale=abs(scale)
        )[0].transpose(0, 1)
        scores = (abs(scale) * signed @ user.k.transpose(1, 2)).float()
        user_lse = scores.masked_fill(~user.seen, -math.inf).logsumexp(-1).t()
        o[user.queries], lse[user.queries] = out.detach(), user_lse.detach()
        loss = loss + (out * inputs.d_o[user.queries]).sum()
        loss = loss + (user_lse * inputs.d_lse[user.queries]).sum()
    if loss.requires_grad:
        loss.backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (q, k, v)]
    return dict(zip(RESULTS, [o, lse, *grads], strict=True))


def sdpa_in_order(inputs: Inputs, order: Tensor, **mask: Any) -> dict[str, Tensor]:
    """`sdpa` with the columns of queries and keys in another order: the same sums, rounded
    elsewhere."""
    turned = replace(inputs, q=inputs.q[..., order], k=inputs.k[..., order])
    found = sdpa(turned, **mask)
    back = order.argsort()
    return {**found, "dq": found["dq"][..., back], "dk": found["dk"][..., back]}


class Terms:
    """For each result the sum of the absolute values of the products that it is a sum of.

    Sums are in float32, whatever the dtype: every product is off by a rounding of its own, so that
    a sum which cancels is off by a rounding of these: `results`, in the form of those of `run`.
    """

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        like = (inputs.d_o, inputs.d_lse, inputs.q, inputs.k, inputs.v)
        self.results = {name: torch.zeros_like(x) for name, x in zip(RESULTS, like, strict=True)}

    def add(self, user: User, scale: float, p: Tensor, kept: Tensor) -> Tensor:
        """One more user.

        Args:
            user: in float64.
            scale: of its scores.
            p: [H, n, m], its probabilities.
            kept: [H, n, m], those after dropout.

        Returns:
            [H, n, m]: of the gradients of the scores.
        """
        q, k, v = (t.detach().abs() for t in (user.q, user.k, user.v))
        d_o = self.inputs.d_o[user.queries].abs().transpose(0, 1)
        d_lse = self.inputs.d_lse[user.queries].abs().t()[:, :, None]
        o, d_p = kept @ v, d_o @ v.transpose(1, 2)
        d_s = kept * d_p + p * ((d_o * o).sum(-1, keepdim=True) + d_lse)
        scores = abs(scale) * q @ k.transpose(1, 2)
        self.results["o"][user.queries] = o.transpose(0, 1)
        self.results["lse"][user.queries] = (p * scores).sum(-1).t()
        self.results["dq"][user.queries] = abs(scale) * (d_s @ k).transpose(0, 1)
        for name, part in (("dk", abs(scale) * d_s.mT @ q), ("dv", kept.mT @ d_o)):
            total = self.results[name][user.keys]
            total += part.transpose(0, 1).unflatten(1, (total.shape[1], -1)).sum(2)
        return d_s


def terms(inputs: Inputs, *, scale: float | None = None, **mask: Any) -> dict[str, Tensor]:
    """`Terms` of attention without bias and dropout, of inputs in float64."""
    scale = scale or 1 / math.sqrt(inputs.q.shape[2])
    found = Terms(inputs)
    for user in users(inputs, (inputs.q, inputs.k, inputs.v), **mask):
        scores = scale * user.q @ user.k.transpose(1, 2)
        p = scores.masked_fill(~user.seen, -math.inf).softmax(-1)
        found.add(user, scale, p, p)
    return found.results


def assert_as_exact_as_sdpa(
    inputs: Inputs, *backends: str, tile: int | None = TILE, **mask: Any
) -> None:
    """`Standard` of every backend."""
    standard = Standard(inputs, **mask)
    for backend in backends:
        standard.assert_met(run(backend, inputs, tile=tile, **mask), backend)


class Standard:
    """How exact attention must be: at most `FACTOR` times as far from float64 as PyTorch is in the
    same precision.

    PyTorch is exact by chance where a batch is small, more so on one processor than on another. So
    what counts at least is a rounding of the largest result, and one to float32 of the `Terms`.
    """

    def __init__(self, inputs: Inputs, **mask: Any) -> None:
        double = inputs.double()
        self.exact = run("reference", double, tile=None, **mask)
        self.peer = sdpa(inputs, **mask)
        self.terms = terms(double, **mask)

    def assert_met(self, ours: dict[str, Tensor], name: str, *, factor: float = FACTOR) -> None:
        assert_no_worse(ours, self.peer, self.exact, terms=self.terms, name=name, factor=factor)

    def least(self, result: str) -> float:
        """The error that counts at least."""
        return _least(self.peer[result].dtype, self.exact[result], self.terms.get(result))


def assert_no_worse(
    ours: dict[str, Tensor],
    peer: dict[str, Tensor],
    exact: dict[str, Tensor],
    *,
    name: str,
    terms: Mapping[str, Tensor] = MappingProxyType({}),
    summands: Mapping[str, Tensor] = MappingProxyType({}),
    rounded_to: torch.dtype = torch.float64,
    factor: float = FACTOR,
) -> None:
    """The rule of `Standard`, for the results in `ours`.

    Where a result is a sum of what is rounded before, to its own precision or to `rounded_to`,
    `summands` has the sums of those absolute values: one rounding of them is what even an exact sum
    is off by.
    """
    for result in ours:
        error = error_of(ours[result], exact[result])
        of_sums = summands.get(result), rounded_to
        least = _least(peer[result].dtype, exact[result], terms.get(result), *of_sums)
        allowed = factor * max(error_of(peer[result], exact[result]), least)
        assert error <= allowed, f"{name} {result}: error {error:.3g} > {allowed:.3g}"


def _least(
    dtype: torch.dtype, exact: Tensor, terms: Tensor | None, summands: Tensor | None = None,
    rounded_to: torch.dtype = torch.float64,
) -> float:  # fmt: skip
    """The error of a result that counts at least: see `Standard` and `assert_no_worse`."""
    eps = torch.finfo(dtype).eps
    if summands is not None:
        eps = max(eps, torch.finfo(rounded_to).eps)
    rounding = eps * largest(exact if summands is None else summands)
    if terms is not None:
        rounding = max(rounding, torch.finfo(torch.float32).eps * largest(terms))
    return rounding


def error_of(result: Tensor, exact: Tensor) -> float:
    assert result.shape == exact.shape
    assert torch.equal(result == -math.inf, exact == -math.inf), "other queries see nothing"
    difference = (_finite(result) - _finite(exact)).abs()
    assert not difference.isnan().any(), "NaN"
    return float(difference.max()) if difference.numel() else 0.0


def largest(x: Tensor) -> float:
    return float(_finite(x).abs().max()) if x.numel() else 0.0


def _finite(x: Tensor) -> Tensor:
    return x.double().masked_fill(x == -math.inf, 0.0)
