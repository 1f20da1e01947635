"""Target attention: a candidate asks the history, by scaled dot products and a softmax.

That the weight of each past event depends on the candidate is the idea of DIN (Zhou et al., Deep
Interest Network, KDD 2018). This is not DIN (`models/encoders/din.py`):
- the score is the scaled dot product of two projections; DIN's activation unit (section 4.3) is an
  MLP on event, candidate and what they have in common. Several heads give back some of that;
- weights are normalised by a softmax. DIN leaves them unnormalised, so that the size of the sum
  says how strong an interest is. Here a learned sink takes part in the softmax, a key whose value
  is zero: where nothing in the history speaks about the candidate, little comes out;
- an empty history gives zeros, as DIN's empty sum does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged_kernels import JaggedTensor
from jagged_ranking.layers.attention import Attention
from jagged_ranking.layers.growing_cache import GrowingCache
from jagged_ranking.layers.layer_options import LayerOptions

SINK = 2.0  # the sink's score at the start: as much as a handful of unrelated events


class TargetPooling(nn.Module):
    """A query for each candidate over the history of its request."""

    def __init__(self, config: LayerOptions) -> None:
        super().__init__()
        dim, self.heads = config.dim, config.heads
        self.query = nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * dim)
        self.sink = nn.Parameter(torch.full((config.heads,), SINK))
        self.attention = Attention(config.attention)
        self.out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(config.dropout)
        # the same rotation for queries and keys: attention starts as likeness to the candidate
        nn.init.orthogonal_(self.query.weight)
        nn.init.zeros_(self.query.bias)
        with torch.no_grad():
            self.key_value.weight[:dim] = self.query.weight

    def forward(
        self,
        history: JaggedTensor,
        candidates: JaggedTensor,
        *,
        longest: tuple[int, int] | None = None,
        cache: GrowingCache | None = None,
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]; `longest` as in `attend`. With a cache the
        history are new events, which are appended to it."""
        query = self.query(candidates.values).unflatten(1, (self.heads, -1))
        key, value = self.key_value(history.values).unflatten(1, (2, self.heads, -1)).unbind(1)
        asked = candidates.with_values(query)
        k, v = history.with_values(key), history.with_values(value)
        if cache is not None:
            answer = cache.attend(asked, k, v, sink=self.sink)
        else:
            answer = self.attention(asked, k, v, sink=self.sink, longest=longest)
        return self.dropout(self.out(answer.values.flatten(1)))
