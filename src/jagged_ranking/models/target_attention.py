"""Target attention: the target asks the history, by scaled dot products and a softmax.

That the weight of each past event depends on the target is the idea of DIN (Zhou et al., Deep
Interest Network, KDD 2018). This is not DIN, whose unit is `jagged_kernels.target_interaction`:
- the score is the scaled dot product of two projections; DIN's activation unit (section 4.3) is an
  MLP on [event, event x target, target]. Several heads give back some of what that loses;
- weights are normalised by a softmax. DIN leaves them unnormalised, so that the size of the sum
  says how strong an interest is. Here a learned sink takes part in the softmax, a key whose value
  is zero: where nothing in the history speaks about the target, little comes out. It needs no
  kernel of its own, since softmax over one more score s is the old result times sigmoid(lse - s);
- an empty history gives zeros, as DIN's empty sum does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged_kernels import JaggedTensor, jagged_attention

SINK = 2.0  # the sink's score at the start: as much as a handful of unrelated events


class TargetAttention(nn.Module):
    """One query per user, the target, over the user's history.

    `layers` is accepted for the common signature and has no meaning here.
    """

    def __init__(self, dim: int, *, heads: int = 1, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        del layers
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.sink = nn.Parameter(torch.full((heads,), SINK))
        self.out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)
        # the same rotation for queries and keys: attention starts as likeness to the target
        nn.init.orthogonal_(self.query.weight)
        nn.init.zeros_(self.query.bias)
        with torch.no_grad():
            self.key_value.weight[:dim] = self.query.weight

    def forward(self, history: JaggedTensor, target: Tensor) -> Tensor:
        """history [T, D], target [B, D] -> [B, D]."""
        query = self.query(target).view(len(target), 1, self.heads, -1)
        key, value = self.key_value(history.values).unflatten(1, (2, self.heads, -1)).unbind(1)
        pooled, lse = jagged_attention(
            query, history.with_values(key), history.with_values(value), return_lse=True
        )
        kept = (lse - self.sink).sigmoid()[..., None]  # 0 for an empty history, whose lse is -inf
        pooled = (pooled * kept.to(pooled.dtype)).flatten(1)
        return self.dropout(self.out(pooled))
