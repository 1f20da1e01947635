"""A transformer encoder over the history, pooled by target attention.

The layers see the history alone; a candidate, which is no part of the sequence, asks their output.
So what is computed for a history is shared by all candidates of its request.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from jagged_kernels import JaggedTensor
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.growing_cache import GrowingCache
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

    @property
    def cached_attentions(self) -> int:
        """Those over the history, whose keys and values can be kept."""
        return len(self.layers) + 1

    def forward(
        self,
        history: JaggedTensor,
        candidates: JaggedTensor,
        batch: JaggedBatch,
        caches: Sequence[GrowingCache] | None = None,
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]; with caches the history are new events."""
        of_layers, of_pool = (None, None) if caches is None else (caches[:-1], caches[-1])
        encoded = self.layers(history, longest=batch.longest[1], caches=of_layers)
        return self.pool(encoded, candidates, longest=batch.longest, cache=of_pool)


ENCODER = Transformer
