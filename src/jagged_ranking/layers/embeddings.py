"""From ids to vectors: what all models share before they differ.

A history token is `f(item, its features, signals, recency, age)` and a candidate is
`f(item, its features)`; both read the same tables. Row 0 is the unknown item and an ordinary row:
items that training has not seen read it, and in training a share of the ids is shown as unknown,
so that the row learns what an unseen item is worth.

Recency and age are told from the request: they change with every request, and the token with them.
Told from the event's arrival instead (`Arrivals`), they stay, and so does what is computed of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from jagged_kernels import JaggedTensor, jagged_embedding
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.store import ItemTable
from jagged_ranking.layers.id_table import IdTable
from jagged_ranking.layers.scaling import Standard

BUCKETS = 32  # of log2(1 + x): enough for a position, and for a century of seconds
INITIAL_STD = 0.05
# Categories are few and often seen. Theirs start far apart, so that "the same category" is what
# attention sees first; from near zero it took longer to find that than to overfit the items.
CATEGORY_STD = 0.7


def log_bucket(x: Tensor) -> Tensor:
    """floor(log2(1 + x)) of integers, at most `BUCKETS` - 1; negative ones go to 0."""
    # Compared with powers: a logarithm of 8 may be a little less than 3 on another device.
    least = 2 ** torch.arange(1, BUCKETS, device=x.device) - 1
    return torch.bucketize(x, least, right=True, out_int32=True)


class Arrivals(NamedTuple):
    """How events stood when they arrived, which nothing later changes.

    place: int64 [T], how many events of the user there were before; since: int64 [T], the time
    since the one before, 0 for the first.
    """

    place: Tensor
    since: Tensor

    @classmethod
    def of(
        cls, batch: JaggedBatch, *, seen: Tensor | None = None, elapsed: Tensor | None = None
    ) -> Arrivals:
        """Those of a batch, whose histories begin with the first event, or go on.

        Args:
            batch: of requests.
            seen: [R] integers, events of each user before those of the batch; None: as many as the
                batch says were cut off.
            elapsed: int64 [R], the time from the last of these to the request; None likewise.
        """
        if seen is None or elapsed is None:
            seen, elapsed = batch.cut, batch.cut_age
        age, length = batch.age.values, batch.offsets.diff()
        tokens = len(age)

        def of_events(x: Tensor) -> Tensor:
            return torch.repeat_interleave(x, length, output_size=tokens)

        place = torch.arange(tokens, device=age.device) - of_events(batch.offsets[:-1])
        first, since = place == 0, age.roll(1) - age
        if seen is None or elapsed is None:
            return cls(place, since.masked_fill(first, 0))
        before = of_events(seen).long()
        since = torch.where(first, of_events(elapsed) - age, since)
        place = place + before
        return cls(place, since.masked_fill(place == 0, 0))


class Rows(Protocol):
    """The rows of some tables, by their number, that a batch asked for."""

    def bring(self, ids: Sequence[Tensor], /) -> None:
        """Fetches them: of each table the ids, int64 [N]."""

    def look_up(self, table: int, ids: Tensor, /) -> Tensor:
        """int [N] -> [N, D]."""
        ...


class EventEmbedding(nn.Module):
    """History tokens [T, dim] and candidates [C, dim] of a batch.

    What an event says is what was met times how it was liked: a token is the content of the item,
    scaled feature by feature by a gate made of signals (labels are among them), plus what they,
    the event's position and its age say by themselves. A plain sum would leave mean-pooling no way
    to tell a liked comedy and a disliked drama from the reverse.

    Args:
        shape: vocabulary sizes, and the scales of signals and of dense features.
        dim: width of a token and of a candidate.
        id_dropout: share of the item ids shown as unknown in training.
        dropout: on the vectors.
        category_std: of the vectors of categories at the start.
        arrival: events have their `Arrivals` in place of recency and age.
    """

    def __init__(
        self,
        shape: DataShape,
        *,
        dim: int,
        id_dropout: float = 0.0,
        dropout: float = 0.0,
        category_std: float = CATEGORY_STD,
        arrival: bool = False,
    ) -> None:
        super().__init__()
        self.arrival = arrival
        self.num_items = shape.num_items
        self.item = IdTable(shape.num_items, dim)
        self.categories = nn.ModuleList(
            nn.utils.skip_init(IdTable, codes, dim) for codes in shape.categories.values()
        )
        self.recency = nn.Embedding(BUCKETS, dim)
        self.age = nn.Embedding(BUCKETS, dim)
        self.signals = Standard(shape.signals.values())
        self.reaction = nn.Linear(len(shape.signals), 2 * dim) if shape.signals else None
        self.item_dense = Standard(shape.item_dense.values())
        self.describe = nn.Linear(len(shape.item_dense), dim) if shape.item_dense else None
        self.id_dropout = id_dropout
        self.dropout = nn.Dropout(dropout)
        self._bring: Callable[[Sequence[Tensor]], None] | None = None
        for table in (self.item, self.recency, self.age):
            nn.init.normal_(table.weight, std=INITIAL_STD)
        for table in self._categories:
            nn.init.normal_(table.weight, std=category_std)

    @property
    def tables(self) -> list[Tensor]:
        """The tables of ids, most of whose rows are rare."""
        return [table.weight for table in self.id_tables.values()]

    @property
    def id_tables(self) -> dict[str, IdTable]:
        """The same as modules, by name: of items, then of categories."""
        return {name: m for name, m in self.named_modules() if isinstance(m, IdTable)}

    def move_rows(self, rows: Rows) -> None:
        """From here on `rows` has those of all tables, by their number, and `bring` fetches what a
        batch asks for, before it."""
        for number, table in enumerate(self.id_tables.values()):
            table.move_rows(partial(rows.look_up, number))
        self._bring = rows.bring

    def bring(self, batch: JaggedBatch, others: Tensor | None = None) -> None:
        """Fetches the rows of a batch, and of other items, int64 [N], where rows are elsewhere.

        All processes call it at once, also for a batch without requests.
        """
        if self._bring is None:
            return
        unknown = batch.user.new_zeros(1, dtype=torch.int64)  # which any item may be shown as
        others = unknown if others is None else torch.cat([unknown, others])
        ids = torch.cat([batch.item.values.long(), batch.candidate.values.long(), others])
        codes = [batch.categories.values, batch.candidate_categories.values]
        codes = torch.cat([*codes, batch.items.categories[others]])
        known = ids.masked_fill(ids >= self.num_items, 0)
        self._bring([known, *codes.long().unbind(1)])

    @property
    def _categories(self) -> list[IdTable]:
        return [table for table in self.categories if isinstance(table, IdTable)]

    def forward(self, batch: JaggedBatch) -> tuple[JaggedTensor, JaggedTensor]:
        """The batch's histories as tokens, and its candidates."""
        return self.history(batch), self.candidates(batch)

    def candidates(self, batch: JaggedBatch) -> JaggedTensor:
        """The batch's candidates [C, dim]."""
        content = self._content(batch.candidate, batch.candidate_categories, batch.candidate_dense)
        return content.with_values(self.dropout(content.values))

    def history(self, batch: JaggedBatch, arrivals: Arrivals | None = None) -> JaggedTensor:
        """The batch's histories as tokens [T, dim]; `arrivals` of those that go on."""
        token = self._content(batch.item, batch.categories, batch.item_dense).values
        if self.reaction is not None:
            standard = self.signals(batch.signals.values)
            gate, reaction = self.reaction(standard).chunk(2, dim=1)
            token = token * (1 + gate) + reaction
        # every pair of buckets, a small table, so that each token is one lookup instead of two
        places = (self.recency.weight[:, None] + self.age.weight).flatten(0, 1)
        near, old = batch.recency.values, batch.age.values
        if self.arrival:
            near, old = Arrivals.of(batch) if arrivals is None else arrivals
        place = log_bucket(near) * BUCKETS + log_bucket(old)
        token = token + nn.functional.embedding(place, places)
        return batch.item.with_values(self.dropout(token))

    def items(self, ids: Tensor, items: ItemTable) -> Tensor:
        """Items that training knows, int [N], as candidates [N, dim], none of them dropped."""
        alone = torch.arange(2, device=ids.device) * len(ids)  # without a copy to wait for
        item = JaggedTensor(ids, alone, validate=False)
        categories = item.with_values(items.categories[ids])
        dense = item.with_values(items.dense[ids])
        return self._content(item, categories, dense, drop=False).values

    def _content(
        self,
        item: JaggedTensor,
        categories: JaggedTensor,
        dense: JaggedTensor,
        *,
        drop: bool = True,
    ) -> JaggedTensor:
        ids = item.values
        unknown = ids >= self.num_items
        if drop and self.training and self.id_dropout:
            unknown = unknown | (torch.rand(ids.shape, device=ids.device) < self.id_dropout)
        known, codes = ids.masked_fill(unknown, 0), categories.values.unbind(1)
        if self.item.by_lookup:
            content = item.with_values(self.item(known))
            for table, code in zip(self._categories, codes, strict=True):
                content = content.with_values(content.values + table(code))
        else:
            content = jagged_embedding([item.with_values(known), *codes], self.tables)
        if self.describe is not None:
            described = self.describe(self.item_dense(dense.values))
            content = content.with_values(content.values + described)
        return content
