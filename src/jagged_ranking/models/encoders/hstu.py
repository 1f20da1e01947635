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
    RelativePositionBias,
    RelativeTimeBias,
    SiLU,
    attention_schedule,
    jagged_attention,
)
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.embeddings import BUCKETS
from jagged_ranking.layers.target_pooling import TargetPooling
from jagged_ranking.models.model_config import ModelConfig


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

    def forward(
        self, x: JaggedTensor, age: JaggedTensor, schedule: AttentionSchedule | None
    ) -> JaggedTensor:
        """[T, D], and the seconds since each event [T] -> [T, D]."""
        u, *qkv = silu(self.project(self.norm(x).values)).chunk(4, dim=1)
        q, k, v = (x.with_values(part.unflatten(1, (self.heads, -1))) for part in qkv)
        attended = jagged_attention(
            q,
            k,
            v,
            causal=True,
            scale=1.0,
            bias=(self._by_distance(), RelativeTimeBias(self.time, age)),
            scores=SiLU(divide_by=self.longest),
            schedule=schedule,
        )
        gated = self.attended_norm(x.with_values(attended.values.flatten(1))).values * u
        return x.with_values(x.values + self.dropout(self.out(gated)))

    def _by_distance(self) -> RelativePositionBias:
        """A number for each distance: half of the buckets are single distances, and the others,
        which grow, have the last one's number."""
        far = self.position[-1:].expand(self.longest, -1)
        table = torch.cat([self.position, far])
        return RelativePositionBias(table, max_distance=self.longest + 1, bidirectional=False)


class HSTU(nn.Module):
    """`layers` causal layers over the history, which share one schedule; then target attention."""

    self_attention = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.layers))
        self.pool = TargetPooling(config)

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        schedule = None
        if history.values.is_cuda:  # only the kernels read it
            schedule = attention_schedule(history, causal=True, head_dim=self.head_dim)
        for layer in self.layers:
            history = layer(history, batch.age, schedule)
        return self.pool(history, candidates, longest=batch.longest)


ENCODER = HSTU
