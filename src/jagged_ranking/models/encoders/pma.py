"""Learned queries pool the history, whatever the candidate (PMA: Set Transformer, arXiv
1810.00825, section 3.2). InterFormer (arXiv 2411.09852) summarises sequences by it.

As for the mean, the history is pooled once a request; unlike it, what matters is learned.
"""

from __future__ import annotations

from torch import Tensor, nn

from jagged_kernels import JaggedTensor
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.learned_pooling import LearnedPooling
from jagged_ranking.models.model_config import ModelConfig

QUERIES = 4


class PMA(nn.Module):
    """`QUERIES` answers of the history, side by side."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pool = LearnedPooling(config.dim, heads=config.heads, queries=QUERIES)
        self.out = nn.Linear(QUERIES * config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        del candidates
        answers = self.pool(history, history.offsets.new_zeros(len(history)))
        return self.dropout(self.out(answers.flatten(1)))[batch.request]


ENCODER = PMA
