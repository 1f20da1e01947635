"""What a ranker reads of its data set, flat and on one device: all histories, and all items.

A user's whole history is stored once. What a request may see of it is a slice,
`[offsets[user] + max(0, prefix - cap), offsets[user] + prefix)`, so that a batch costs one gather,
and nothing is ever padded. `prefix` counts events strictly earlier than the request: no slice can
hold a candidate's own event.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from click_data import ClickDataset


Built = TypeVar("Built")


def once(build: Callable[..., Built]) -> Callable[..., Built]:
    """`build(cls, dataset, *others)` is done once for each open data set and others.

    What it built is kept as long as the data set: the shape, the floors, every training and every
    evaluation of a process read the same.
    """
    kept: WeakKeyDictionary[ClickDataset, dict[tuple[Any, ...], Built]] = WeakKeyDictionary()

    @wraps(build)
    def found(cls: type[Built], dataset: ClickDataset, *others: Any) -> Built:
        of_dataset = kept.setdefault(dataset, {})
        if others not in of_dataset:
            of_dataset[others] = build(cls, dataset, *others)
        return of_dataset[others]

    return found


@dataclass(frozen=True)
class ItemTable:
    """Features of all N items, row 0 the unknown one.

    categories: int32 [N, K], codes of the categorical features; dense: float32 [N, E].
    """

    categories: Tensor
    dense: Tensor

    def to(self, device: torch.device | str) -> ItemTable:
        """The same table on another device."""
        return ItemTable(self.categories.to(device), self.dense.to(device))

    @classmethod
    def from_dataset(cls, dataset: ClickDataset, device: torch.device | str = "cpu") -> ItemTable:
        """Copies the item table of a prepared data set to `device`."""
        rows = dataset.item_rows
        return cls(
            categories=stacked(dataset.item_categories, rows, np.int32, device),
            dense=stacked(dataset.item_dense, rows, np.float32, device),
        )


@dataclass(frozen=True)
class HistoryStore:
    """All events of all users, user by user and in order; T tokens, U users, on one device.

    offsets: int64 [U+1]; item: int32 [T], a row of `items`; time: int64 [T] in the data set's time
    unit, None where events have an order but no times; signals: float32 [T, S], in the order of
    the data set's names.
    """

    offsets: Tensor
    item: Tensor
    time: Tensor | None
    signals: Tensor
    items: ItemTable

    @classmethod
    def from_dataset(
        cls, dataset: ClickDataset, device: torch.device | str = "cpu"
    ) -> HistoryStore:
        """Histories and items of a prepared data set on `device`, copied there once."""
        return cls._copied(dataset, torch.empty(0, device=device).device)

    @classmethod
    @once
    def _copied(cls, dataset: ClickDataset, device: torch.device) -> HistoryStore:
        columns = dataset.histories
        timed = dataset.info["timed"] == "all"
        return cls(
            offsets=tensor(columns.offsets, np.int64, device),
            item=tensor(columns.item, np.int32, device),
            time=tensor(columns.time, np.int64, device) if timed else None,
            signals=stacked(columns.signals, len(columns.item), np.float32, device),
            items=ItemTable.from_dataset(dataset, device),
        )

    def prefix_index(
        self, user: Tensor, prefix: Tensor, *, max_history: int, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Token positions of the most recent `max_history` events of each prefix.

        user, prefix: [R] integers on the store's device. Returns `(index int64 [T'], offsets
        int64 [R+1])`. `total` is T' where the caller knows it; otherwise reading it back is the
        one synchronisation with the host.
        """
        length = prefix.long().clamp(max=max_history)
        start = self.offsets[user.long()] + prefix.long() - length
        return ranges(start, length, total)

    def matches(
        self, user: Tensor, item: Tensor, start: Tensor, end: Tensor
    ) -> tuple[Tensor, Tensor]:
        """How often a user's events in [start, end) are of an item, and how long ago the last was.

        user, item: [C] integers; start, end: int64 [C], positions among all tokens. Returns int32
        [C] each: the count, and how many events came after the last of them (-1: there is none).
        """
        pairs, places = self._by_pair
        tokens = len(self.item)
        if tokens == 0:
            nothing = torch.zeros_like(item, dtype=torch.int32)
            return nothing, nothing - 1
        asked = user.long() * len(self.items.categories) + item.long()
        pair = torch.searchsorted(pairs, asked).clamp(max=len(pairs) - 1)
        known = pairs[pair] == asked
        first = torch.searchsorted(places, pair * tokens + start)
        last = torch.searchsorted(places, pair * tokens + end)
        count = torch.where(known, last - first, 0)
        latest = places[(last - 1).clamp(min=0)] - pair * tokens
        since = torch.where(count > 0, end - 1 - latest, -1)
        return count.int(), since.int()

    @cached_property
    def _by_pair(self) -> tuple[Tensor, Tensor]:
        """The distinct pairs of user and item [P], ascending, and, ascending as well, for each
        token the number of its pair times T plus its position [T]."""
        length = self.offsets.diff()
        user = torch.repeat_interleave(torch.arange(len(length), device=length.device), length)
        pairs, pair = torch.unique(
            user * len(self.items.categories) + self.item.long(), return_inverse=True
        )
        position = torch.arange(len(self.item), device=length.device)
        return pairs, (pair * len(self.item) + position).sort().values


def ranges(start: Tensor, length: Tensor, total: int | None = None) -> tuple[Tensor, Tensor]:
    """start[i], start[i] + 1, ... of `length[i]` numbers, one range behind the other.

    start, length: int64 [R]. Returns the numbers int64 [total] and their offsets int64 [R+1].
    """
    offsets = torch.zeros(len(length) + 1, dtype=torch.int64, device=length.device)
    torch.cumsum(length, 0, out=offsets[1:])
    if total is None:
        total = int(offsets[-1])
    shift = torch.repeat_interleave(start - offsets[:-1], length, output_size=total)
    return torch.arange(total, device=length.device) + shift, offsets


def tensor(array: Any, dtype: Any, device: torch.device | str) -> Tensor:
    """A column as a tensor of its own: those that are mapped into memory cannot be written."""
    return torch.from_numpy(np.array(array, dtype=dtype)).to(device)


def stacked(columns: dict[str, Any], rows: int, dtype: Any, device: torch.device | str) -> Tensor:
    """Columns of `rows` numbers side by side, [rows, len(columns)], in their order."""
    table = np.zeros((rows, len(columns)), dtype)
    for position, column in enumerate(columns.values()):
        table[:, position] = column
    return torch.from_numpy(table).to(device)
