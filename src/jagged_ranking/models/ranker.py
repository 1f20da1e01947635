"""The whole model: batch -> embeddings -> history as each candidate sees it -> head -> logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.layers.embeddings import EventEmbedding
from jagged_ranking.layers.head import RankingHead
from jagged_ranking.models.din import DIN
from jagged_ranking.models.mean_pool import MeanPool
from jagged_ranking.models.model_config import ModelConfig
from jagged_ranking.models.target_attention import TargetAttention
from jagged_ranking.models.transformer import Transformer

MODELS = {
    "mean_pool": MeanPool,
    "din": DIN,
    "target_attention": TargetAttention,
    "transformer": Transformer,
}


class Ranker(nn.Module):
    """One of MODELS between the shared embeddings and the shared head."""

    def __init__(self, config: ModelConfig, shape: DataShape) -> None:
        super().__init__()
        self.max_history = config.max_history
        self.embedding = EventEmbedding(
            shape, dim=config.dim, id_dropout=config.id_dropout, dropout=config.embedding_dropout
        )
        self.encoder = MODELS[config.model](
            config.dim, heads=config.heads, layers=config.layers, dropout=config.dropout
        )
        self.head = RankingHead(shape, dim=config.dim, hidden=config.hidden, dropout=config.dropout)

    def forward(self, batch: JaggedBatch) -> Tensor:
        """Logits float32 [C, tasks]."""
        history, candidates = self.embedding(batch)
        answer = self.encoder(history, candidates, batch)
        return self.head(answer, candidates.values, batch).float()

    def parameter_groups(
        self, *, weight_decay: float, embedding_weight_decay: float
    ) -> list[dict[str, Any]]:
        """AdamW groups: the tables of ids decay at a rate of their own.

        Most ids are rare, and a rare id's row is little but noise unless something holds it back.
        """
        tables = [*self.embedding.tables, *self.head.tables]
        of_ids = {id(table) for table in tables}
        others = [p for p in self.parameters() if id(p) not in of_ids]
        return [
            {"params": others, "weight_decay": weight_decay},
            {"params": tables, "weight_decay": embedding_weight_decay},
        ]
