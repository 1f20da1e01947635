"""The whole model: batch -> embeddings -> pooled history -> head -> logit."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from jagged_ranking.batch import JaggedBatch
from jagged_ranking.config import TrainConfig
from jagged_ranking.embeddings import EventEmbedding
from jagged_ranking.head import RankingHead
from jagged_ranking.models import MODELS

if TYPE_CHECKING:
    from click_data import ClickDataset


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """What a model must know of its data set; all of it from the train period."""

    num_items: int
    num_categories: int
    positive_rate: float
    signal_mean: tuple[float, ...] = ()
    signal_std: tuple[float, ...] = ()

    @classmethod
    def of(cls, dataset: ClickDataset) -> DataShape:
        """Vocabulary sizes, CTR of the train samples, and each signal's mean and deviation.

        Signals are measured over the events of the train period: those before the last train
        sample's time or at it.
        """
        train = dataset.samples("train")
        if len(train.label) == 0:
            raise ValueError(f"{dataset.name}: there are no train samples")
        rate = float(np.mean(train.label))
        if not 0 < rate < 1:
            raise ValueError(f"{dataset.name}: train samples all have the label {rate:.0f}")
        columns = dataset.histories
        past = np.asarray(columns.time) <= np.max(train.time)
        signals = [np.asarray(columns.signals[name])[past] for name in sorted(columns.signals)]
        return cls(
            num_items=dataset.num_items,
            num_categories=dataset.num_categories,
            positive_rate=rate,
            signal_mean=tuple(float(s.mean(dtype=np.float64)) for s in signals),
            signal_std=tuple(max(float(s.std(dtype=np.float64)), 1e-6) for s in signals),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return asdict(self)


class Ranker(nn.Module):
    """One of MODELS between the shared embeddings and the shared head."""

    def __init__(self, config: TrainConfig, shape: DataShape) -> None:
        super().__init__()
        self.embedding = EventEmbedding(
            num_items=shape.num_items,
            num_categories=shape.num_categories,
            dim=config.dim,
            signal_mean=shape.signal_mean,
            signal_std=shape.signal_std,
            id_dropout=config.id_dropout,
            dropout=config.embedding_dropout,
        )
        self.pooler = MODELS[config.model](
            config.dim, heads=config.heads, layers=config.layers, dropout=config.dropout
        )
        self.head = RankingHead(
            num_items=shape.num_items,
            dim=config.dim,
            hidden=config.hidden,
            dropout=config.dropout,
            positive_rate=shape.positive_rate,
        )

    def forward(self, batch: JaggedBatch) -> Tensor:
        """Logits float32 [B]."""
        history, target = self.embedding(batch)
        return self.head(self.pooler(history, target), target, batch).float()

    def parameter_groups(self, config: TrainConfig) -> list[dict[str, Any]]:
        """AdamW groups: the tables of ids decay at a rate of their own.

        Most ids are rare, and a rare id's row is little but noise unless something holds it back.
        """
        tables = [self.embedding.item.weight, self.embedding.category.weight]
        tables.append(self.head.item_bias.weight)
        of_ids = {id(table) for table in tables}
        others = [p for p in self.parameters() if id(p) not in of_ids]
        return [
            {"params": others, "weight_decay": config.weight_decay},
            {"params": tables, "weight_decay": config.embedding_weight_decay},
        ]
