"""From a pooled history and a candidate to logits, with the features that all models share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from jagged_kernels import jagged_sum
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.data_shape import DataShape, Scale
from jagged_ranking.layers.heads.dcn_v2 import DCNv2
from jagged_ranking.layers.heads.dhen import DHEN
from jagged_ranking.layers.heads.mlp import MLP
from jagged_ranking.layers.heads.mmoe import MMoE
from jagged_ranking.layers.id_table import IdTable
from jagged_ranking.layers.scaling import Standard, StandardWithLog

MIXERS = {"mlp": MLP, "dcn_v2": DCNv2, "dhen": DHEN}
PRIOR_EVENTS = 5.0


def history_features(batch: JaggedBatch, *, positive_rate: float, signal: int | None) -> Tensor:
    """float32 [R, 2]: log(1 + history length), and the logit of the user's smoothed positive rate.

    signal: which one is the label of past events; without one the second column is not there.
    Both look at the slice of history that the request sees, no further. The rate counts
    `PRIOR_EVENTS` events at the train split's rate besides, which is all that a user without
    history has.
    """
    positive = None if signal is None else positives(batch, signal)
    return features_of(batch.item.lengths, positive, positive_rate=positive_rate)


def positives(batch: JaggedBatch, signal: int) -> Tensor:
    """float32 [R]: the sum of a signal over each history."""
    return jagged_sum(batch.signals.with_values(batch.signals.values[:, signal].float()))


def features_of(length: Tensor, positive: Tensor | None, *, positive_rate: float) -> Tensor:
    """`history_features` of lengths [R] and `positives` [R]."""
    length = length.float()
    if positive is None:
        return length.log1p()[:, None]
    rate = (positive + PRIOR_EVENTS * positive_rate) / (length + PRIOR_EVENTS)
    return torch.stack([length.log1p(), torch.logit(rate)], dim=1)


class RankingHead(nn.Module):
    """A mixer of the fields [pooled, candidate, pooled * candidate, features], one of `MIXERS` or
    `MMoE`, plus a linear layer on the features and the item's own bias.

    Features: of the history (`history_features`), of the candidate (the data set's and `MATCHES`),
    of the request (embedded codes, standardised numbers).

    Args:
        shape: what features there are, vocabulary sizes, and positive rates by task.
        dim: width of `pooled` and of a candidate.
        hidden: widths of the layers of MLPs.
        dropout: behind each of them.
        mixer: its name.
        experts: MLPs that a gate of each task mixes; 0 for `mixer` itself.
    """

    def __init__(
        self,
        shape: DataShape,
        *,
        dim: int,
        hidden: tuple[int, ...],
        dropout: float,
        mixer: str = "mlp",
        experts: int = 0,
    ) -> None:
        super().__init__()
        self.num_items, self.positive_rate = shape.num_items, shape.positive_rate
        names = list(shape.signals)
        self.label_signal = names.index(shape.tasks[0]) if shape.tasks[0] in names else None
        self.features = StandardWithLog(shape.features.values())
        numbers = [scale for scale in shape.context.values() if isinstance(scale, Scale)]
        self.context_dense = Standard(numbers)
        self.context = nn.ModuleList(
            nn.Embedding(codes, dim) for codes in shape.context.values() if isinstance(codes, int)
        )
        self.item_bias = IdTable(shape.num_items, len(shape.tasks))
        linear = (1 if self.label_signal is None else 2) + len(numbers) + 2 * len(shape.features)
        self.linear = nn.Linear(linear, len(shape.tasks))
        widths = [dim, dim, dim, linear] + ([dim] if self.context else [])
        options: Any = {"hidden": hidden, "tasks": len(shape.tasks), "dropout": dropout}
        self.mixer = (
            MMoE(widths, experts=experts, **options)
            if experts
            else MIXERS[mixer](widths, **options)
        )
        nn.init.zeros_(self.item_bias.weight)

    @property
    def tables(self) -> list[Tensor]:
        """The tables of ids, most of whose rows are rare."""
        return [self.item_bias.weight]

    def forward(
        self,
        pooled: Tensor,
        candidate: Tensor,
        batch: JaggedBatch,
        of_history: Tensor | None = None,
    ) -> Tensor:
        """pooled, candidate [C, D] -> logits [C, tasks]; `of_history` are the `history_features` of
        requests whose histories are not in the batch."""
        if of_history is None:
            of_history = history_features(
                batch, positive_rate=self.positive_rate, signal=self.label_signal
            )
        request = torch.cat([of_history, self.context_dense(batch.context_dense)], dim=1)
        numbers = [request[batch.request], self.features(batch.features.values)]
        linear = torch.cat(numbers, dim=1)
        mixed = [pooled, candidate, pooled * candidate, linear]
        if self.context:
            codes = batch.context.unbind(1)
            embedded = [table(code) for table, code in zip(self.context, codes, strict=True)]
            mixed.append(torch.stack(embedded).sum(0)[batch.request])
        item = batch.candidate.values
        known = item.masked_fill(item >= self.num_items, 0)
        return self.mixer(mixed) + self.linear(linear) + self.item_bias(known)
