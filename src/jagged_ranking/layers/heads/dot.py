"""The dot product of answer and candidate, plus the item's own bias: what a model of next items
has in common with retrieval. No feature enters, so that scores of other items are as good."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.layers.id_table import IdTable


class DotHead(nn.Module):
    """One score. Raises ValueError for a data set of several tasks."""

    def __init__(self, shape: DataShape) -> None:
        super().__init__()
        if len(shape.tasks) != 1:
            raise ValueError(
                f"head dot has one score and the data several tasks: {', '.join(shape.tasks)}"
            )
        self.num_items = shape.num_items
        self.item_bias = IdTable(shape.num_items, 1)
        nn.init.zeros_(self.item_bias.weight)

    @property
    def tables(self) -> list[Tensor]:
        """The tables of ids, most of whose rows are rare."""
        return [self.item_bias.weight]

    def forward(self, pooled: Tensor, candidate: Tensor, batch: JaggedBatch) -> Tensor:
        """pooled, candidate [C, D] -> logits [C, 1]."""
        item = batch.candidate.values
        known = item.masked_fill(item >= self.num_items, 0)
        return torch.linalg.vecdot(pooled.float(), candidate.float())[:, None] + self.item_bias(
            known
        )
