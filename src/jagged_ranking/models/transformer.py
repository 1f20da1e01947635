"""A transformer encoder over the history, pooled by target attention.

The layers see the history alone; a candidate, which is no part of the sequence, asks their output.
So what is computed for a history is shared by all candidates of its request.
"""

from __future__ import annotations

from torch import Tensor, nn

from jagged_kernels import (
    AttentionSchedule,
    JaggedMultiheadAttention,
    JaggedTensor,
    attention_schedule,
)
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.models.target_attention import TargetAttention


class TransformerLayer(nn.Module):
    """Pre-norm causal self-attention and feed-forward inside each user.

    Both branches start at zero: the model starts as target attention and grows away from it,
    which on few data is a better place to start than a random mixture of the events.
    """

    def __init__(self, dim: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = nn.utils.skip_init(JaggedMultiheadAttention, dim, heads, causal=True)
        # Projections start as those of nn.Linear do, smaller than in nn.MultiheadAttention.
        start = nn.Linear(dim, 3 * dim)
        self.attention.in_proj_weight, self.attention.in_proj_bias = start.weight, start.bias
        self.attention.out_proj = nn.Linear(dim, dim)
        self.forward_norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, 2 * dim)
        self.narrow = nn.Linear(2 * dim, dim)
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(dropout)
        for last in (self.attention.out_proj, self.narrow):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(self, x: JaggedTensor, schedule: AttentionSchedule | None) -> JaggedTensor:
        """[T, D] -> [T, D]."""
        normed = x.with_values(self.attention_norm(x.values))
        values = x.values + self.dropout(self.attention(normed, schedule=schedule).values)
        hidden = self.activation(self.widen(self.forward_norm(values)))
        return x.with_values(values + self.dropout(self.narrow(hidden)))


class Transformer(nn.Module):
    """`layers` causal layers over the history, then target attention."""

    def __init__(self, dim: int, *, heads: int = 1, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.layers = nn.ModuleList(
            TransformerLayer(dim, heads=heads, dropout=dropout) for _ in range(layers)
        )
        self.pool = TargetAttention(dim, heads=heads, dropout=dropout)

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        schedule = None
        if history.values.is_cuda:  # only the kernels read it; all layers share one
            schedule = attention_schedule(history, causal=True, head_dim=self.head_dim)
        for layer in self.layers:
            history = layer(history, schedule)
        return self.pool(history, candidates, batch)
