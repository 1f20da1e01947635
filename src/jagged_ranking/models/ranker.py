"""The whole model: batch -> embeddings -> history as each candidate sees it -> head -> logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from jagged_kernels import JaggedTensor
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.store import ItemTable
from jagged_ranking.layers.embeddings import CATEGORY_STD, INITIAL_STD, EventEmbedding
from jagged_ranking.layers.head import RankingHead
from jagged_ranking.layers.heads.dot import DotHead
from jagged_ranking.models.model_config import ModelConfig, encoder_of


class Ranker(nn.Module):
    """An encoder between the shared embeddings and the shared head."""

    def __init__(self, config: ModelConfig, shape: DataShape) -> None:
        super().__init__()
        self.max_history, self.positive_rate = config.max_history, shape.positive_rate
        self.embedding = EventEmbedding(
            shape,
            dim=config.dim,
            id_dropout=config.id_dropout,
            dropout=config.embedding_dropout,
            # far apart, they would be the whole of a plain dot product
            category_std=INITIAL_STD if config.head == "dot" else CATEGORY_STD,
        )
        self.encoder = encoder_of(config.model)(config)
        self.head: RankingHead | DotHead = (
            DotHead(shape)
            if config.head == "dot"
            else RankingHead(
                shape,
                dim=config.dim,
                hidden=config.hidden,
                dropout=config.dropout,
                mixer=config.head,
                experts=config.experts,
            )
        )

    def forward(self, batch: JaggedBatch) -> Tensor:
        """Logits float32 [C, tasks]."""
        history, candidates = self.embedding(batch)
        answer = self.encoder(history, candidates, batch)
        return self.head(answer, candidates.values, batch).float()

    @property
    def follows_sequences(self) -> bool:
        """Whether it can say after every event which item is next: `states`, `all_items`."""
        return hasattr(self.encoder, "states") and isinstance(self.head, DotHead)

    def states(self, batch: JaggedBatch) -> JaggedTensor:
        """What is known of a user after each event of the history [T, D]."""
        encoder: Any = self.encoder
        return encoder.states(self.embedding.history(batch), batch)

    def answers(self, batch: JaggedBatch) -> Tensor:
        """What each request is answered [R, D], of encoders to whom all candidates are alike."""
        history, candidates = self.embedding(batch)
        answer = self.encoder(history, candidates, batch)
        return answer[candidates.offsets[:-1]]

    def all_items(self, items: ItemTable) -> tuple[Tensor, Tensor]:
        """Vectors [V, D] and biases [V] of the items that training knows; row 0 is the unknown.

        Item i scores state @ vectors[i] + biases[i], as it would as a candidate.
        """
        return self.embedding.all_items(items), self.head.item_bias.weight[:, 0]

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
