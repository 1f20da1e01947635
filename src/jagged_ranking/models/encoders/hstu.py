"""Hierarchical Sequential Transduction Units (Zhai et al., ICML 2024, arXiv 2402.17152, section
3.2), pooled by target attention as `transformer` is.

Attention without a softmax: the weight of an event is silu(q k + bias) / n, so that how strong an
interest is stays in the size of the sum. n is the longest history there can be, as in the authors'
code. A gate u takes the place of the feed-forward network. The bias is learned by distance and by
the time between two events.

Every pair of a user's events has a number in memory: sums of n ** 2 and no more, as there is no
padding. Heads are users of one batch, so that each product is one launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu

from jagged_kernels import (
    Jagged2Tensor,
    JaggedLayerNorm,
    JaggedTensor,
    jagged2_like,
    jagged2_matmul,
    jagged_embedding,
    jagged_outer,
)
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.embeddings import BUCKETS, log_bucket
from jagged_ranking.layers.target_pooling import TargetPooling
from jagged_ranking.models.model_config import ModelConfig


@dataclass(frozen=True)
class Pairs:
    """What all layers share: S pairs (query, key) of events, user by user and row by row.

    visible: [S], 1 where the key is no later, else 0. place: [S], of a pair's distance in events
    and the bucket of its distance in time, distance first. offsets [H * R + 1] and layout are those
    of H heads as users.
    """

    visible: Tensor
    place: JaggedTensor
    offsets: Tensor
    layout: Jagged2Tensor

    @classmethod
    def of(cls, history: JaggedTensor, batch: JaggedBatch, *, heads: int, longest: int) -> Pairs:
        """Sized by what the host knows."""
        tokens, device = history.values.shape[0], history.device
        lengths = history.lengths
        user = torch.repeat_interleave(lengths, output_size=tokens)
        start, width = history.offsets[user], lengths[user]  # of each token's user
        total = int((batch.events**2).sum())
        pair = torch.arange(total, device=device)
        query = torch.repeat_interleave(width, output_size=total)
        row = pad(width.cumsum(0), (1, 0))[:-1]  # where a token's scores begin
        key = pair + (start - row)[query]
        distance = query - key
        age = batch.age.values
        gap = log_bucket(age[key] - age[query])
        place = distance.clamp(0, longest - 1) * BUCKETS + gap
        squares = pad(lengths.long().square().cumsum(0), (1, 0))
        head = torch.arange(heads, device=device)[:, None] * tokens
        offsets = pad((history.offsets[1:] + head).flatten(), (1, 0))
        shape = JaggedTensor(history.values.new_empty(heads * tokens), offsets, validate=False)
        return cls(
            visible=(distance >= 0).to(history.values.dtype),
            place=JaggedTensor(place, squares, validate=False),
            offsets=offsets,
            layout=jagged2_like(shape, total=heads * total),
        )


class HSTULayer(nn.Module):
    """x + out(norm(A v) * u), of which the last part starts at zero."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.longest = config.heads, config.max_history
        self.norm = JaggedLayerNorm(config.dim)
        self.project = nn.Linear(config.dim, 4 * config.dim)
        self.position = nn.Parameter(torch.zeros(config.max_history, config.heads))
        self.time = nn.Parameter(torch.zeros(BUCKETS, config.heads))
        self.attended_norm = JaggedLayerNorm(config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: JaggedTensor, pairs: Pairs) -> JaggedTensor:
        """[T, D] -> [T, D]."""
        u, *qkv = silu(self.project(self.norm(x).values)).chunk(4, dim=1)
        q, k, v = (self._by_head(of, pairs) for of in qkv)
        # every distance with every bucket, a small table, so that a pair is one lookup
        table = (self.position[:, None] + self.time).flatten(0, 1)
        bias = jagged_embedding([pairs.place], [table])
        score = jagged_outer(q, k, like=pairs.layout)
        weight = silu(score.values + bias.values.T.flatten()).unflatten(0, (self.heads, -1))
        weight = (weight * (pairs.visible / self.longest)).flatten()
        summed = jagged2_matmul(score.with_values(weight.to(v.values.dtype)), v)
        attended = summed.values.unflatten(0, (self.heads, -1)).transpose(0, 1).flatten(1)
        gated = self.attended_norm(x.with_values(attended)).values * u
        return x.with_values(x.values + self.dropout(self.out(gated)))

    def _by_head(self, values: Tensor, pairs: Pairs) -> JaggedTensor:
        """[T, D] -> [H * T, D / H]."""
        heads = values.unflatten(1, (self.heads, -1)).transpose(0, 1).flatten(0, 1)
        return JaggedTensor(heads, pairs.offsets, validate=False)


class HSTU(nn.Module):
    """`layers` causal layers over the history, then target attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.longest = config.heads, config.max_history
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.layers))
        self.pool = TargetPooling(config)

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        pairs = Pairs.of(history, batch, heads=self.heads, longest=self.longest)
        for layer in self.layers:
            history = layer(history, pairs)
        return self.pool(history, candidates, longest=batch.longest)


ENCODER = HSTU
