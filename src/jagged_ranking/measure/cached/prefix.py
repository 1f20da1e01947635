"""A prefix that all users share, in front of their histories: the problem, and a copy for each."""

from typing import Any

import torch
from torch import Tensor

from jagged_kernels import (
    JaggedTensor,
    attention_schedule,
    jagged_attention,
    jagged_cat,
    lengths_to_offsets,
    prefix_schedule,
    prefixed_attention,
)
from jagged_ranking.measure.cached.cases import Case
from jagged_ranking.measure.interaction.problem import Peer, Problem


def prefixing(case: Case, device: torch.device) -> Problem:
    """`prefixed_attention`, causal in the histories; schedules made beforehand."""
    lengths = case.lengths()
    offsets = lengths_to_offsets(lengths).to(device)
    tokens, prefix = int(lengths.sum()), case.prefix
    generator = torch.Generator(device).manual_seed(case.seed + 2)
    inputs = tuple(
        torch.randn(
            count, case.heads, case.head_dim, generator=generator, device=device
        ).to(case.dtype)
        for count in (tokens, tokens, tokens, prefix, prefix)
    )  # fmt: skip
    q = JaggedTensor(inputs[0], offsets, validate=False)
    own = attention_schedule(q, causal=True)
    before = prefix_schedule(q, inputs[3])

    def call(backend: Any, q: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Tensor:
        keys = JaggedTensor(k, offsets, validate=False)
        schedules: dict[str, Any] = {}
        if backend == "auto":
            schedules = {"schedule": own, "prefix_schedule": before}
        return prefixed_attention(
            keys.with_values(q), keys, keys.with_values(v), pk, pv,
            causal=True, backend=backend, **schedules,
        ).values  # fmt: skip

    width, size = case.heads * case.head_dim, case.dtype.itemsize
    pairs = float((lengths.double() ** 2).sum()) / 2 + float(tokens * prefix)
    flops = 4.0 * width * pairs
    moved = 2.0 * (2 * tokens + prefix) * width * size
    return Problem(
        call=call,
        inputs=inputs,
        bytes=(moved, moved),
        flops=(flops, 2.5 * flops),
        peers={"cat": _copied(case, q, lengths.to(device))},
    )


def _copied(case: Case, q: JaggedTensor, lengths: Tensor) -> Peer:
    """`jagged_cat` of the prefix in front of every user's keys and values, at each call, since
    every layer has others."""
    steps = torch.arange(case.users + 1, device=lengths.device)
    offsets = q.offsets + steps * case.prefix
    tokens = len(q.values) + case.users * case.prefix
    like = torch.empty((tokens, 0), dtype=case.dtype, device=lengths.device)
    joined = JaggedTensor(like, offsets, validate=False)
    schedule = attention_schedule(q, joined, causal=True, shared_offsets=False)

    def forward(q_values: Tensor, k: Tensor, v: Tensor, pk: Tensor, pv: Tensor) -> Tensor:
        keys, values = (
            joined.with_values(jagged_cat([before, q.with_values(own)]).values)
            for before, own in ((pk, k), (pv, v))
        )
        asked = q.with_values(q_values)
        return jagged_attention(asked, keys, values, causal=True, schedule=schedule).values

    needs = 2 * tokens * case.heads * case.head_dim * case.dtype.itemsize
    return Peer(forward, needs=needs)
