"""Deep Interest Network (Zhou et al., KDD 2018, arXiv 1706.06978, section 4.3).

A small MLP looks at each pair of a past event and a candidate, at both, their difference and their
product, and says how much of the event belongs to the user as this candidate sees him. Weights are
not normalised: the size of the sum says how strong an interest is.

Every candidate has pairs with the whole history of its request, so that what is computed grows
with candidates times events; other models share a history among its candidates.
"""

from __future__ import annotations

from torch import Tensor, nn

from jagged_kernels import (
    JaggedTensor,
    jagged_index_select,
    jagged_weighted_sum,
    target_interaction,
)
from jagged_ranking.data.batch import JaggedBatch

HIDDEN = 36  # units of the MLP's first layer, as in figure 2 of the paper


class DIN(nn.Module):
    """`heads` and `layers` are accepted for the common signature and have no meaning here."""

    def __init__(self, dim: int, *, heads: int = 1, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        del heads, layers
        self.first = nn.Linear(4 * dim, HIDDEN)
        self.score = nn.Linear(HIDDEN, 1)
        self.out = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        seen = jagged_index_select(history, batch.request, total=batch.pairs)
        hidden = target_interaction(
            seen, candidates.values, self.first.weight, bias=self.first.bias, activation="silu"
        )
        weight = self.score(hidden.values).squeeze(1)
        return self.dropout(self.out(jagged_weighted_sum(seen, weight.to(seen.values.dtype))))
