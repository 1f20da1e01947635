"""Hierarchical Sequential Transduction Units (Zhai et al., ICML 2024, arXiv 2402.17152, section
3.2), pooled by target attention as `transformer` is.

Attention without a softmax: the weight of an event is silu(q k + bias) / n, so that how strong an
interest is stays in the size of the sum. n is the longest history there can be, as in the authors'
code. A gate u takes the place of the feed-forward network. The bias is learned by distance and by
the time between two events.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from jagged_kernels import (
    AttentionSchedule,
    JaggedLayerNorm,
    JaggedTensor,
    attention_schedule,
)
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.attention import PointwiseAttention
from jagged_ranking.layers.embeddings import BUCKETS
from jagged_ranking.layers.target_pooling import TargetPooling
from jagged_ranking.models.model_config import ModelConfig


class HSTULayer(nn.Module):
    """x + out(norm(A v) * u), of which the last part starts at zero."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention = PointwiseAttention(config.attention, divide_by=config.max_history)
        self.norm = JaggedLayerNorm(config.dim)
        self.project = nn.Linear(config.dim, 4 * config.dim)
        self.position = nn.Parameter(torch.zeros(config.max_history, config.heads))
        self.time = nn.Parameter(torch.zeros(BUCKETS, config.heads))
        self.attended_norm = JaggedLayerNorm(config.dim)
        self.out = nn.Linear(config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(
        self,
        x: JaggedTensor,
        age: JaggedTensor,
        *,
        longest: int | None = None,
        schedule: AttentionSchedule | None = None,
    ) -> JaggedTensor:
        """[T, D], and the seconds since each event [T] -> [T, D]; `longest` as in `attend`."""
        u, *qkv = silu(self.project(self.norm(x).values)).chunk(4, dim=1)
        q, k, v = (x.with_values(part.unflatten(1, (self.heads, -1))) for part in qkv)
        attended = self.attention(
            q,
            k,
            v,
            position=self.position,
            time=self.time,
            age=age,
            longest=longest,
            schedule=schedule,
        )
        gated = self.attended_norm(x.with_values(attended.values.flatten(1))).values * u
        return x.with_values(x.values + self.dropout(self.out(gated)))


class HSTU(nn.Module):
    """`layers` causal layers over the history, which share one schedule; then target attention."""

    self_attention = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim, self.attention = config.dim // config.heads, config.attention
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.layers))
        self.pool = TargetPooling(config)

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        schedule = None
        if history.values.is_cuda and self.attention == "jagged":  # only the kernels read it
            schedule = attention_schedule(history, causal=True, head_dim=self.head_dim)
        for layer in self.layers:
            history = layer(history, batch.age, longest=batch.longest[1], schedule=schedule)
        return self.pool(history, candidates, longest=batch.longest)


ENCODER = HSTU
