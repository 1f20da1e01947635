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
from jagged_ranking.models.model_config import ModelConfig

HIDDEN = 36  # units of the MLP's first layer, as in figure 2 of the paper


class DIN(nn.Module):
    """A weight for each pair of a candidate and an event, and the sum that they weigh."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.first = nn.Linear(4 * config.dim, HIDDEN)
        self.score = nn.Linear(HIDDEN, 1)
        self.out = nn.Linear(config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

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


ENCODER = DIN
