"""Target attention over the history as it is (`layers/target_pooling.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from jagged_kernels import JaggedTensor
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.growing_cache import GrowingCache
from jagged_ranking.layers.target_pooling import TargetPooling
from jagged_ranking.models.model_config import ModelConfig


class TargetAttention(nn.Module):
    """A query for each candidate over the events of its request."""

    cached_attentions = 1  # over the history, whose keys and values can be kept

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pool = TargetPooling(config)

    def forward(
        self,
        history: JaggedTensor,
        candidates: JaggedTensor,
        batch: JaggedBatch,
        caches: Sequence[GrowingCache] | None = None,
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]; with caches the history are new events."""
        cache = None if caches is None else caches[0]
        return self.pool(history, candidates, longest=batch.longest, cache=cache)


ENCODER = TargetAttention
