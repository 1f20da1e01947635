"""Target attention over the history as it is (`layers/target_pooling.py`)."""

from __future__ import annotations

from torch import Tensor, nn

from jagged_kernels import JaggedTensor
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.target_pooling import TargetPooling
from jagged_ranking.models.model_config import ModelConfig


class TargetAttention(nn.Module):
    """A query for each candidate over the events of its request."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pool = TargetPooling(config)

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        return self.pool(history, candidates, longest=batch.longest)


ENCODER = TargetAttention
