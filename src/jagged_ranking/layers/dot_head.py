"""The plainest head: a candidate's score is its dot product with the answer, plus a bias.

It sees no features. Its worth is that all items can be scored by one product, so that a model can
be trained on, and judged by, which of all items is next.
"""

from __future__ import annotations

from torch import Tensor, nn

from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.data_shape import DataShape


class DotHead(nn.Module):
    """answer . candidate + the item's own bias; for one task."""

    def __init__(self, shape: DataShape) -> None:
        super().__init__()
        if len(shape.tasks) > 1:
            raise ValueError(f"head dot is for one task, the data has {', '.join(shape.tasks)}")
        self.num_items, self.positive_rate = shape.num_items, shape.positive_rate
        self.item_bias = nn.Embedding(shape.num_items, 1)
        nn.init.zeros_(self.item_bias.weight)

    @property
    def tables(self) -> list[Tensor]:
        """The tables of ids, most of whose rows are rare."""
        return [self.item_bias.weight]

    def forward(self, pooled: Tensor, candidate: Tensor, batch: JaggedBatch) -> Tensor:
        """pooled, candidate [C, D] -> logits [C, 1]."""
        item = batch.candidate.values
        known = item.masked_fill(item >= self.num_items, 0)
        return (pooled * candidate).sum(1, keepdim=True) + self.item_bias(known)
