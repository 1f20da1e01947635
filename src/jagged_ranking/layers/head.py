"""From a pooled history and a target to a logit, with the features that all models share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged_kernels import jagged_sum
from jagged_ranking.data.batch import JaggedBatch

FEATURES = 2
PRIOR_EVENTS = 5.0


def history_features(batch: JaggedBatch, *, positive_rate: float) -> Tensor:
    """float32 [B, 2]: log(1 + history length), and the logit of the user's smoothed positive rate.

    Both look at the slice of history that the sample sees, no further. The rate counts
    `PRIOR_EVENTS` events at the train split's rate besides, which is all that a user without
    history has.
    """
    length = batch.item.lengths.float()
    positive = jagged_sum(batch.label.with_values(batch.label.values.float()))
    rate = (positive + PRIOR_EVENTS * positive_rate) / (length + PRIOR_EVENTS)
    return torch.stack([length.log1p(), torch.logit(rate)], dim=1)


class RankingHead(nn.Module):
    """An MLP on [pooled, target, pooled * target, features], plus the item's own bias.

    Args:
        num_items: for the bias.
        dim: width of `pooled` and of `target`.
        hidden: widths of the MLP's layers.
        dropout: behind each of them.
        positive_rate: of the train split, the prior of a user's rate.
    """

    def __init__(
        self,
        *,
        num_items: int,
        dim: int,
        hidden: tuple[int, ...],
        dropout: float,
        positive_rate: float,
    ) -> None:
        super().__init__()
        self.positive_rate = positive_rate
        self.item_bias = nn.Embedding(num_items, 1)
        self.linear = nn.Linear(FEATURES, 1)
        layers: list[nn.Module] = []
        width = 3 * dim + FEATURES
        for units in hidden:
            layers += [nn.Linear(width, units), nn.GELU(), nn.Dropout(dropout)]
            width = units
        self.mlp = nn.Sequential(*layers, nn.Linear(width, 1))
        nn.init.zeros_(self.item_bias.weight)

    def forward(self, pooled: Tensor, target: Tensor, batch: JaggedBatch) -> Tensor:
        """pooled, target [B, D] -> logits [B]."""
        features = history_features(batch, positive_rate=self.positive_rate)
        mixed = torch.cat([pooled, target, pooled * target, features], dim=1)
        logit = self.mlp(mixed) + self.linear(features) + self.item_bias(batch.target_item)
        return logit.squeeze(1)
