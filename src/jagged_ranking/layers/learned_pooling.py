"""Pooling by multihead attention with learned queries (Set Transformer, Lee et al., ICML 2019,
arXiv 1810.00825, section 3.2), for one set or for several kinds of sets at once.

A learned query times the projection of a key is one learned vector times the key, and a projection
of weighted values is the projection of their weighted sum: so tokens are neither projected to keys
nor to values, and what is computed for each are its scores and its share of the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged_kernels import JaggedTensor, jagged_linear, jagged_softmax, jagged_weighted_sum


class LearnedPooling(nn.Module):
    """`queries` answers of each set, from queries that all sets of one kind share.

    PMA(Z) = LayerNorm(H + feed(H)), H = LayerNorm(S + Multihead(S, Z, Z)), of seeds S. A set
    without tokens answers as its seeds say.

    Args:
        dim: D, width of a token and of an answer.
        kinds: K, each with seeds of its own; the projections are shared.
    """

    def __init__(self, dim: int, *, heads: int, queries: int, kinds: int = 1) -> None:
        super().__init__()
        self.heads = heads
        self.seeds = nn.Parameter(torch.randn(kinds, queries, dim))
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim)
        self.attention_norm = nn.LayerNorm(dim)
        self.feed = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))
        self.forward_norm = nn.LayerNorm(dim)

    def forward(self, x: JaggedTensor, kind: Tensor) -> Tensor:
        """Sets x [T, D] of B users, their kinds [B] -> [B, queries, D]."""
        seeds = self.seeds.unflatten(2, (self.heads, -1))
        key, value = (of.weight.unflatten(0, (self.heads, -1)) for of in (self.key, self.value))
        # [K, D, queries * heads]: what scores a token by each query and head
        asks = torch.einsum("kqhe,hed->kdqh", seeds, key).flatten(2) / seeds.shape[3] ** 0.5
        weight = jagged_softmax(jagged_linear(x, asks, groups=kind))
        pooled = jagged_weighted_sum(x, weight.values.to(x.values.dtype))
        pooled = pooled.unflatten(1, (-1, self.heads))
        attended = torch.einsum("bqhd,hed->bqhe", pooled, value.to(pooled.dtype)).flatten(2)
        hidden = self.attention_norm(self.seeds[kind] + self.out(attended))
        return self.forward_norm(hidden + self.feed(hidden))
