"""Attention with a NaN or inf in one place: what may see it, and what must not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from attention_cases import DEVICE, RESULTS, Inputs, seen_keys
from torch import Tensor

from jagged_kernels import ALiBi, JaggedTensor, jagged_attention

PLACES = ("q", "k", "v", "d_o", "d_lse")
# Of q, k, v and d_o the number that is bad.
DIM = 3


@dataclass(frozen=True)
class Kind:
    """A way to compute attention.

    Attributes:
        inputs: of a dtype.
        tokens: of each of `PLACES`, where a number is bad.
        mask: causal and window.
        schedule: of jagged queries and keys, or None for the one by rule.
        dense: queries come as [B, N, H, D].
        bias: with ALiBi and a number for each score.
        dropout_p: with a seed that is always the same.
    """

    inputs: Callable[[torch.dtype], Inputs]
    tokens: dict[str, int]
    mask: dict[str, Any] = field(default_factory=dict)
    schedule: Callable[..., Any] | None = None
    dense: bool = False
    bias: bool = False
    dropout_p: float = 0.0

    def seen(self, inputs: Inputs) -> Tensor:
        """[Tq, Tk] bool on the CPU: does this query see that key?"""
        seen = torch.zeros(inputs.q.shape[0], inputs.k.shape[0], dtype=torch.bool)
        for queries, keys in _users(inputs):
            inside = seen_keys(len(queries), len(keys), **self.mask)
            seen[queries.start : queries.stop, keys.start : keys.stop] = inside
        return seen

    def run(self, backend: Any, inputs: Inputs) -> dict[str, Tensor]:
        """`attention_cases.RESULTS`, and the gradient of the scores' bias if there is one."""
        leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
        q, k, v = leaves
        keys = JaggedTensor(k, inputs.k_offsets)
        if self.dense:
            queries: Any = q.view(len(keys), -1, *q.shape[1:])
        else:
            queries = JaggedTensor(q, inputs.q_offsets)
        bias = None
        if self.bias:
            flat = sum(len(queries) * len(keys) for queries, keys in _users(inputs))
            leaves.append(torch.linspace(-1, 1, flat * q.shape[1], device=DEVICE))
            leaves[-1] = leaves[-1].to(q.dtype).view(flat, q.shape[1]).requires_grad_()
            slopes = torch.linspace(0.1, 0.5, q.shape[1], device=DEVICE, dtype=q.dtype)
            bias = (ALiBi(slopes), leaves[-1])
        torch.manual_seed(11)
        out, lse = jagged_attention(
            queries, keys, keys.with_values(v), **self.mask, bias=bias, dropout_p=self.dropout_p,
            schedule=None if self.schedule is None else self.schedule(queries, keys, **self.mask),
            backend=backend, return_lse=True,
        )  # fmt: skip
        o = out.values if isinstance(out, JaggedTensor) else out.flatten(0, 1)
        lse = lse.view(o.shape[:2])
        # Not through a loss: its backward would multiply.
        d_lse = inputs.d_lse.to(lse.dtype)
        gradients = torch.autograd.grad([o, lse], leaves, [inputs.d_o, d_lse])
        return dict(zip((*RESULTS, "d_bias"), [o.detach(), lse.detach(), *gradients], strict=False))


class Bad(NamedTuple):
    """Where the number is: of which tensor (`PLACES`), token and head."""

    place: str
    token: int
    head: int


def spoil(inputs: Inputs, bad: Bad, value: float) -> None:
    tensor = getattr(inputs, bad.place)
    index = (bad.token, bad.head) if bad.place == "d_lse" else (bad.token, bad.head, DIM)
    tensor[index] = value


def touched(kind: Kind, inputs: Inputs, bad: Bad) -> dict[str, Tensor]:
    """Which results depend on the number, bool on the CPU: of o and lse those of queries that see
    it, of gradients also those of what such queries see."""
    seen = kind.seen(inputs)
    heads, kv_heads = inputs.q.shape[1], inputs.k.shape[1]
    group = heads // kv_heads
    rows = torch.zeros(inputs.q.shape[0], heads, dtype=torch.bool)
    if bad.place in ("k", "v"):
        rows[:, bad.head * group : (bad.head + 1) * group] = seen[:, bad.token, None]
    else:
        rows[bad.token, bad.head] = seen[bad.token].any()
    keys = (seen.t().float() @ rows.float()).unflatten(1, (kv_heads, group)).sum(2) > 0
    shapes = {"o": inputs.d_o, "lse": inputs.d_lse, "dq": inputs.q, "dk": inputs.k, "dv": inputs.v}
    found = {name: torch.zeros(x.shape, dtype=torch.bool) for name, x in shapes.items()}
    found["dq"] |= rows[:, :, None]
    found["dk"] |= keys[:, :, None]
    if bad.place in ("q", "k"):
        found["o"] |= rows[:, :, None]
        found["lse"] |= rows
        found["dv"] |= keys[:, :, None]
    elif bad.place == "v":
        found["o"][:, :, DIM] = rows
    elif bad.place == "d_o":
        found["dv"][:, :, DIM] = keys
    if kind.bias:
        pairs = [
            (seen[q.start : q.stop, k.start : k.stop, None] & rows[q.start : q.stop, None]).flatten(
                0, 1
            )
            for q, k in _users(inputs)
        ]
        found["d_bias"] = torch.cat(pairs)
    return found


def _users(inputs: Inputs) -> list[tuple[range, range]]:
    ends = pairwise(inputs.q_offsets.tolist()), pairwise(inputs.k_offsets.tolist())
    return [(range(*q), range(*k)) for q, k in zip(*ends, strict=True)]
