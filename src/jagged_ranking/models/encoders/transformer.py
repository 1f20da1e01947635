"""A transformer encoder over the history, pooled by target attention.

The layers see the history alone; a candidate, which is no part of the sequence, asks their output.
So what is computed for a history is shared by all candidates of its request.
"""

from __future__ import annotations

from torch import Tensor, nn

from jagged_kernels import JaggedTensor
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.self_attention import TransformerLayers
from jagged_ranking.layers.target_pooling import TargetPooling
from jagged_ranking.models.model_config import ModelConfig


class Transformer(nn.Module):
    """`layers` causal layers over the history, then target attention."""

    self_attention = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = TransformerLayers(config, causal=True)
        self.pool = TargetPooling(config)

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        encoded = self.layers(history, longest=batch.longest[1])
        return self.pool(encoded, candidates, longest=batch.longest)


ENCODER = Transformer
