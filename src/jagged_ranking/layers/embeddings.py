"""From ids to vectors: what all models share before they differ.

A history token is `f(item, category, label, signals, recency, age)` and a target is
`f(item, category)`; both read the same item and category rows. Row 0 is the unknown bucket and
an ordinary row: in training a share of the ids is shown as unknown, so that the row learns
what an unseen item is worth.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged_kernels import JaggedTensor
from jagged_ranking.data.batch import JaggedBatch

BUCKETS = 32  # of log2(1 + x): enough for a position, and for a century of seconds
INITIAL_STD = 0.05
# Categories are few and often seen. Theirs start far apart, so that "the same category" is what
# attention sees first; from near zero it took longer to find that than to overfit the items.
CATEGORY_STD = 0.7


def log_bucket(x: Tensor) -> Tensor:
    """floor(log2(1 + x)) of integers, at most `BUCKETS` - 1; negative ones go to 0."""
    # The binary exponent: a logarithm of 8 may be a little less than 3 on another device.
    exponent = torch.frexp(x.clamp(min=0).double() + 1).exponent - 1
    return exponent.clamp(max=BUCKETS - 1)


class EventEmbedding(nn.Module):
    """History tokens [T, dim] and targets [B, dim] of a batch.

    What an event says is what was met times how it was liked: a token is the content of the item,
    scaled feature by feature by a gate made of label and signals, plus what they, the event's
    position and its age say by themselves. A plain sum would leave mean-pooling no way to tell
    a liked comedy and a disliked drama from the reverse.

    Args:
        num_items, num_categories: vocabulary sizes, with the unknown bucket 0.
        dim: width of a token and of a target.
        signal_mean, signal_std: of each extra signal in the train period; signals enter
            standardised. As many as there are signals, perhaps none.
        id_dropout: share of the item ids shown as unknown in training.
        dropout: on the vectors.
    """

    signal_mean: Tensor
    signal_std: Tensor

    def __init__(
        self,
        *,
        num_items: int,
        num_categories: int,
        dim: int,
        signal_mean: tuple[float, ...] = (),
        signal_std: tuple[float, ...] = (),
        id_dropout: float = 0.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.item = nn.Embedding(num_items, dim)
        self.category = nn.Embedding(num_categories, dim)
        self.recency = nn.Embedding(BUCKETS, dim)
        self.age = nn.Embedding(BUCKETS, dim)
        self.reaction = nn.Linear(1 + len(signal_mean), 2 * dim)  # a gate, and a vector
        self.register_buffer("signal_mean", torch.tensor(signal_mean))
        self.register_buffer("signal_std", torch.tensor(signal_std))
        self.id_dropout = id_dropout
        self.dropout = nn.Dropout(dropout)
        for table in (self.item, self.recency, self.age):
            nn.init.normal_(table.weight, std=INITIAL_STD)
        nn.init.normal_(self.category.weight, std=CATEGORY_STD)

    def forward(self, batch: JaggedBatch) -> tuple[JaggedTensor, Tensor]:
        """The batch's histories as one JaggedTensor of tokens, and its targets."""
        standard = (batch.signals.values - self.signal_mean) / self.signal_std
        label = batch.label.values.to(standard.dtype)[:, None]
        gate, reaction = self.reaction(torch.cat([label, standard], dim=1)).chunk(2, dim=1)
        # every pair of buckets, a small table, so that each token is one lookup instead of two
        places = (self.recency.weight[:, None] + self.age.weight).flatten(0, 1)
        place = log_bucket(batch.recency.values) * BUCKETS + log_bucket(batch.age.values)
        content = self._content(batch.item.values, batch.category.values)
        token = content * (1 + gate) + reaction + nn.functional.embedding(place, places)
        target = self._content(batch.target_item, batch.target_category)
        return batch.item.with_values(self.dropout(token)), self.dropout(target)

    def _content(self, item: Tensor, category: Tensor) -> Tensor:
        if self.training and self.id_dropout:
            hidden = torch.rand(item.shape, device=item.device) < self.id_dropout
            item = item.masked_fill(hidden, 0)
        return self.item(item) + self.category(category)
