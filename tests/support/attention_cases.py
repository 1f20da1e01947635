"""Inputs for attention tests, and results of every backend in one form."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from jagged_kernels import (
    JaggedTensor,
    attention_schedule,
    jagged_attention,
    lengths_to_offsets,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter takes milliseconds a block: small tiles reach every branch with few tokens.
TILE = 64 if DEVICE == "cuda" else 16
RESULTS = ("o", "lse", "dq", "dk", "dv")


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

    def double(self) -> Inputs:
        parts = {name: getattr(self, name).double() for name in ("q", "k", "v", "d_o", "d_lse")}
        return replace(self, **parts)


def run(backend: Any, inputs: Inputs, *, tile: int | None = TILE, **mask: Any) -> dict[str, Tensor]:
    """Output, lse and the gradients of q, k, v through both outputs."""
    q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    jq, jk = JaggedTensor(q, inputs.q_offsets), JaggedTensor(k, inputs.k_offsets)
    schedule = None
    if tile is not None:
        band = {name: mask[name] for name in ("causal", "window") if name in mask}
        schedule = attention_schedule(jq, jk, tile_q=tile, tile_k=tile, **band)
    out, lse = jagged_attention(
        jq, jk, jk.with_values(v), backend=backend, schedule=schedule, return_lse=True, **mask
    )
    loss = (out.values * inputs.d_o).sum(dtype=torch.float64)
    loss = loss + (lse.masked_fill(lse == -math.inf, 0.0) * inputs.d_lse).sum()
    loss.backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (q, k, v)]
    return dict(zip(RESULTS, [out.values.detach(), lse.detach(), *grads], strict=True))


def sdpa(inputs: Inputs, **mask: Any) -> dict[str, Tensor]:
    """What PyTorch makes of the same numbers in the same precision, one user at a time."""
    q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    left, right = mask.get("window") or (-1, -1)
    right = 0 if mask.get("causal") else right
    group = q.shape[1] // k.shape[1]
    scale = mask.get("scale") or 1 / math.sqrt(q.shape[2])
    o = torch.zeros_like(inputs.d_o)
    lse = torch.full_like(inputs.d_lse, -math.inf)
    q_ends, k_ends = inputs.q_offsets.tolist(), inputs.k_offsets.tolist()
    loss = inputs.d_lse.new_zeros(())
    for user in range(len(q_ends) - 1):
        q_part, k_part = slice(*q_ends[user : user + 2]), slice(*k_ends[user : user + 2])
        n, m = q_part.stop - q_part.start, k_part.stop - k_part.start
        if n == 0 or m == 0:
            continue
        distance = torch.arange(m)[None, :] - torch.arange(n)[:, None] - (m - n)
        seen = (distance >= -left) | torch.tensor(left < 0)
        seen &= (distance <= right) | torch.tensor(right < 0)
        some = seen.any(1)
        queries = torch.arange(q_part.start, q_part.stop)[some].to(q.device)
        seen = seen[some].to(q.device)
        if not len(queries):
            continue
        # PyTorch's masks do not stand a negative scale.
        q_user = (q[queries] if scale >= 0 else -q[queries]).transpose(0, 1)
        k_user = k[k_part].repeat_interleave(group, 1).transpose(0, 1)
        v_user = v[k_part].repeat_interleave(group, 1).transpose(0, 1)
        out = torch.nn.functional.scaled_dot_product_attention(
            q_user[None], k_user[None], v_user[None], attn_mask=seen, scale=abs(scale)
        )[0].transpose(0, 1)
        scores = (
            (abs(scale) * q_user @ k_user.transpose(1, 2)).float().masked_fill(~seen, -math.inf)
        )
        user_lse = scores.logsumexp(-1).t()
        o[queries], lse[queries] = out.detach(), user_lse.detach()
        loss = loss + (out * inputs.d_o[queries]).sum() + (user_lse * inputs.d_lse[queries]).sum()
    if loss.requires_grad:
        loss.backward()
    grads = [torch.zeros_like(t) if t.grad is None else t.grad for t in (q, k, v)]
    return dict(zip(RESULTS, [o, lse, *grads], strict=True))


def assert_as_exact_as_sdpa(
    inputs: Inputs, *backends: str, factor: float = 3.0, tile: int | None = TILE, **mask: Any
) -> None:
    """Errors against float64 are at most `factor` times those of same-precision PyTorch.

    A floor of one rounding of the largest value keeps cases fair in which PyTorch is exact.
    """
    exact = run("reference", inputs.double(), tile=None, **mask)
    peer = sdpa(inputs, **mask)
    for backend in backends:
        ours = run(backend, inputs, tile=tile, **mask)
        assert_no_worse(ours, peer, exact, factor=factor, name=backend)


def assert_no_worse(
    ours: dict[str, Tensor],
    peer: dict[str, Tensor],
    exact: dict[str, Tensor],
    *,
    factor: float,
    name: str,
    summands: dict[str, Tensor] | None = None,
) -> None:
    """The rule of `assert_as_exact_as_sdpa`, for the results in `ours`.

    Where a result is a sum that cancels, `summands` has the sums of absolute values: one rounding
    of those is what even an exact sum is off by.
    """
    for result in ours:
        error = _error(ours[result], exact[result])
        scale = (summands or exact).get(result, exact[result])
        rounding = torch.finfo(peer[result].dtype).eps * _largest(scale)
        allowed = factor * max(_error(peer[result], exact[result]), rounding)
        assert error <= allowed, f"{name} {result}: error {error:.3g} > {allowed:.3g}"


def _error(result: Tensor, exact: Tensor) -> float:
    assert result.shape == exact.shape
    assert torch.equal(result == -math.inf, exact == -math.inf), "other queries see nothing"
    difference = (_finite(result) - _finite(exact)).abs()
    assert not difference.isnan().any(), "NaN"
    return float(difference.max()) if difference.numel() else 0.0


def _largest(x: Tensor) -> float:
    return float(_finite(x).abs().max()) if x.numel() else 0.0


def _finite(x: Tensor) -> Tensor:
    return x.double().masked_fill(x == -math.inf, 0.0)
