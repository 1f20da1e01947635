"""Layers of self-attention: what transformers over histories have in common."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from jagged_kernels import AttentionSchedule, JaggedTensor, attention_schedule
from jagged_ranking.layers.attention import Attention
from jagged_ranking.layers.growing_cache import GrowingCache
from jagged_ranking.layers.layer_options import LayerOptions


class TransformerLayer(nn.Module):
    """Pre-norm self-attention and feed-forward inside each user.

    Both branches start at zero: a model starts as what comes behind its layers and grows away from
    it, which on few data is a better place to start than a random mixture of the events.
    """

    def __init__(self, config: LayerOptions, *, causal: bool) -> None:
        super().__init__()
        dim, self.heads = config.dim, config.heads
        self.attention = Attention(config.attention, causal=causal)
        self.attention_norm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.forward_norm = nn.LayerNorm(dim)
        self.widen = nn.Linear(dim, 2 * dim)
        self.narrow = nn.Linear(2 * dim, dim)
        self.activation = nn.GELU()
        self.dropout = nn.Dropout(config.dropout)
        for last in (self.out, self.narrow):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)

    def forward(
        self,
        x: JaggedTensor,
        *,
        longest: int | None = None,
        schedule: AttentionSchedule | None = None,
        cache: GrowingCache | None = None,
    ) -> JaggedTensor:
        """[T, D] -> [T, D]; of `attend`, whose `longest` is that of x twice. With a cache x are
        new events, which are appended to it."""
        projected = self.query_key_value(self.attention_norm(x.values))
        parts = projected.unflatten(1, (3, self.heads, -1)).unbind(1)
        q, k, v = (x.with_values(part) for part in parts)
        if cache is not None:
            attended = cache.attend(q, k, v, causal=self.attention.causal)
        else:
            attended = self.attention(
                q,
                k,
                v,
                longest=None if longest is None else (longest, longest),
                schedule=schedule,
            )
        values = x.values + self.dropout(self.out(attended.values.flatten(1)))
        hidden = self.activation(self.widen(self.forward_norm(values)))
        return x.with_values(values + self.dropout(self.narrow(hidden)))


class TransformerLayers(nn.ModuleList):
    """`config.layers` of them, which share one schedule."""

    def __init__(self, config: LayerOptions, *, causal: bool) -> None:
        super().__init__(TransformerLayer(config, causal=causal) for _ in range(config.layers))
        self.head_dim, self.causal = config.dim // config.heads, causal
        self.attention = config.attention

    def forward(
        self,
        x: JaggedTensor,
        *,
        longest: int | None = None,
        caches: Sequence[GrowingCache] | None = None,
    ) -> JaggedTensor:
        """[T, D] -> [T, D]; `caches` one a layer, see `TransformerLayer`."""
        schedule = None
        if x.values.is_cuda and self.attention == "jagged" and caches is None:
            # only the kernels read it
            schedule = attention_schedule(x, causal=self.causal, head_dim=self.head_dim)
        for layer, cache in zip(self, caches or [None] * len(self), strict=True):
            x = layer(x, longest=longest, schedule=schedule, cache=cache)
        return x
