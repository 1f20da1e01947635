"""The ranking models. They share embeddings, head, features and training, and differ in how a
target is answered from a history: `pooler(history JaggedTensor [T, D], target [B, D]) -> [B, D]`.
"""

from __future__ import annotations

from jagged_ranking.models.din import TargetAttention
from jagged_ranking.models.mean_pool import MeanPool
from jagged_ranking.models.transformer import Transformer

MODELS = {"mean_pool": MeanPool, "din": TargetAttention, "transformer": Transformer}

__all__ = ["MODELS", "MeanPool", "TargetAttention", "Transformer"]
