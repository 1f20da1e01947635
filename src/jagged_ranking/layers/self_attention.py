"""Layers of self-attention: what transformers over histories have in common."""

from __future__ import annotations

from torch import nn

from jagged_kernels import (
    AttentionSchedule,
    JaggedMultiheadAttention,
    JaggedTensor,
    attention_schedule,
)


class TransformerLayer(nn.Module):
    """Pre-norm self-attention and feed-forward inside each user.

    Both branches start at zero: a model starts as what comes behind its layers and grows away from
    it, which on few data is a better place to start than a random mixture of the events.
    """

    def __init__(self, dim: int, *, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(dim)
        self.attention = nn.utils.skip_init(JaggedMultiheadAttention, dim, heads, causal=causal)
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

    def forward(self, x: JaggedTensor, schedule: AttentionSchedule | None = None) -> JaggedTensor:
        """[T, D] -> [T, D]."""
        normed = x.with_values(self.attention_norm(x.values))
        values = x.values + self.dropout(self.attention(normed, schedule=schedule).values)
        hidden = self.activation(self.widen(self.forward_norm(values)))
        return x.with_values(values + self.dropout(self.narrow(hidden)))


class TransformerLayers(nn.ModuleList):
    """`layers` of them, which share one schedule."""

    def __init__(self, dim: int, *, layers: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__(
            TransformerLayer(dim, heads=heads, dropout=dropout, causal=causal)
            for _ in range(layers)
        )
        self.head_dim, self.causal = dim // heads, causal

    def forward(self, x: JaggedTensor) -> JaggedTensor:
        """[T, D] -> [T, D]."""
        schedule = None
        if x.values.is_cuda:  # only the kernels read it
            schedule = attention_schedule(x, causal=self.causal, head_dim=self.head_dim)
        for layer in self:
            x = layer(x, schedule)
        return x
