"""The whole model: batch -> embeddings -> history as each candidate sees it -> head -> logits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
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
        self.config, self.max_history = config, config.max_history
        self.num_items, self.positive_rate = shape.num_items, shape.positive_rate
        self.lower_precision = config.precision == "bfloat16"
        self.embedding = EventEmbedding(
            shape,
            dim=config.dim,
            id_dropout=config.id_dropout,
            dropout=config.embedding_dropout,
            # far apart, they would be the whole of a plain dot product
            category_std=INITIAL_STD if config.head == "dot" else CATEGORY_STD,
            arrival=config.event_time == "arrival",
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
        with self.precision(batch.user.device):
            history, candidates = self.embedding(batch)
            answer = self.checked(self.encoder(history, candidates, batch), candidates)
        with full_precision(batch.user.device):
            return self.head(answer.float(), candidates.values.float(), batch)

    def checked(self, answer: Tensor, candidates: JaggedTensor) -> Tensor:
        """What an encoder answers, if it is what `docs/models.md` asks for."""
        expected = candidates.values.shape
        if not isinstance(answer, Tensor) or answer.shape != expected:
            got = list(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
            raise ValueError(
                f"model {self.config.model}: its encoder must answer with a tensor [C, dim], here "
                f"{list(expected)}, got {got}"
            )
        return answer

    def bring(self, batch: JaggedBatch, others: Tensor | None = None) -> None:
        """Before a batch: fetches its rows of the tables, and those of other items, int64 [N],
        where several processes share the rows out. All of them call it, also without a request."""
        self.embedding.bring(batch, others)

    @property
    def follows_sequences(self) -> bool:
        """Whether it can say after every event which item is next: `states`, `answers`, `items`."""
        return hasattr(self.encoder, "states") and isinstance(self.head, DotHead)

    def states(self, batch: JaggedBatch) -> JaggedTensor:
        """What is known of a user after each event of the history, float32 [T, D]."""
        encoder: Any = self.encoder
        with self.precision(batch.user.device):
            states = encoder.states(self.embedding.history(batch), batch)
        return states.with_values(states.values.float())

    def answers(self, batch: JaggedBatch) -> Tensor:
        """What each request is answered, float32 [R, D]; for encoders to whom all candidates are
        alike, and requests that have some."""
        with self.precision(batch.user.device):
            history, candidates = self.embedding(batch)
            answer = self.checked(self.encoder(history, candidates, batch), candidates)
        return answer[batch.candidate.offsets[:-1]].float()

    def items(self, ids: Tensor, items: ItemTable) -> tuple[Tensor, Tensor]:
        """Vectors [N, D] and biases [N] of items that training knows, int [N], 0 the unknown.

        Item i scores answer @ vectors[i] + biases[i], as it would as a candidate.
        """
        return self.embedding.items(ids, items), self.head.item_bias(ids)[:, 0]

    def precision(self, device: torch.device) -> AbstractContextManager[Any]:
        """That of all but the head; on a CPU a lower one would be slower."""
        if self.lower_precision and device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()

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


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Whatever is around it."""
    if device.type == "meta":  # which has no precision
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
