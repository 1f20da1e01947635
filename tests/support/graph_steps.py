"""A model of what carries numbers from tokens to weights, and batches for it: what steps over
padded batches, and captured ones, are held against."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jagged_kernels import (
    JaggedTensor,
    attention_schedule,
    jagged_attention,
    jagged_embedding,
    jagged_layer_norm,
    jagged_max,
    jagged_softmax,
    jagged_sum,
    jagged_weighted_sum,
)

GENERATOR = torch.Generator().manual_seed(0)


def some_lengths(users, longest):
    return torch.randint(0, longest + 1, (users,), generator=GENERATOR)


def a_batch(lengths, dtype=torch.float64, *, bad=False, device="cpu"):
    """Two jagged tensors over the same offsets, and one over others; a label and a rate."""
    lengths = torch.as_tensor(lengths)
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
    tokens, users = int(offsets[-1]), len(lengths)
    values = torch.randn(tokens, 8, generator=GENERATOR, dtype=dtype)
    if bad:
        values = values.fill_(torch.nan)
    item = torch.randint(0, 20, (tokens,), generator=GENERATOR)
    asked = some_lengths(users, 3)
    asked[0] += 1
    query = torch.randn(int(asked.sum()), 8, generator=GENERATOR, dtype=dtype)
    x = JaggedTensor(values, offsets)
    batch = {
        "x": x,
        "item": x.with_values(item),
        "query": JaggedTensor.from_lengths(query, asked),
        "label": torch.rand(users, generator=GENERATOR, dtype=dtype),
        "rate": torch.tensor(0.5, dtype=dtype),
    }
    return {name: x.to(device) for name, x in batch.items()}


def everyone(batch):
    """The mask of a batch without padding."""
    return torch.ones_like(batch["label"], dtype=torch.bool)


class Model(nn.Module):
    """Embeddings, self-attention, a LayerNorm, a network for each token, cross-attention, pooling:
    what carries numbers from a token to weights."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, backend: Any = "auto"):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(20, 8, dtype=dtype))
        self.norm = nn.LayerNorm(8, dtype=dtype)
        self.qkv = nn.Linear(8, 24, dtype=dtype)
        self.wide = nn.Sequential(nn.Linear(8, 16, dtype=dtype), nn.GELU(),
                                  nn.Linear(16, 8, dtype=dtype))  # fmt: skip
        self.score = nn.Linear(8, 1, dtype=dtype)
        self.out = nn.Linear(24, 1, dtype=dtype)
        self.backend = backend

    def forward(self, inputs):
        """Logits [B]."""
        x, query = inputs["x"], inputs["query"]
        x = x.with_values(x.values + jagged_embedding([inputs["item"]], [self.table]).values)
        x = jagged_layer_norm(x, self.norm.weight, self.norm.bias)
        qkv = self.qkv(x.values).unflatten(1, (3, 2, 4)).unbind(1)
        schedule = attention_schedule(x, causal=True, head_dim=4)
        q, k, v = map(x.with_values, qkv)
        attended = jagged_attention(q, k, v, causal=True, schedule=schedule, backend=self.backend)
        x = x.with_values(self.wide(x.values + attended.values.flatten(1)))
        heads = x.with_values(x.values.unflatten(1, (2, 4)))
        asked = query.with_values(query.values.unflatten(1, (2, 4)))
        answer = jagged_attention(asked, heads, heads, backend=self.backend)
        weight = jagged_softmax(x.with_values(self.score(x.values))).values[:, 0]
        parts = [
            jagged_sum(query.with_values(answer.values.flatten(1))),
            jagged_weighted_sum(x, weight),
            jagged_max(x),
        ]
        return self.out(torch.cat(parts, 1))[:, 0]


def step_loss(model, inputs, real):
    each = (model(inputs) - inputs["label"]).square() * inputs["rate"]
    return torch.where(real, each, 0).sum() / real.sum()
