"""What a ranker reads of its data set, flat: all histories, and all items.

A user's whole history is stored once. What a request may see of it is a slice,
`[offsets[user] + max(0, prefix - cap), offsets[user] + prefix)`, so that a batch costs one gather,
and nothing is ever padded. `prefix` counts events strictly earlier than the request, or those that
the log says it saw: no slice can hold a candidate's own event.

Where the events lie is their place: for a training on a CPU the data set's own files, mapped into
memory. A GPU has a copy of a log that takes little of its memory; the events of a longer one stay
in the files, too, and those of each batch are brought to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from jagged_ranking.data.columns import Table, column, stacked, table

if TYPE_CHECKING:
    from click_data import ClickDataset


# Bytes of events and requests that a GPU has a copy of; of more, the rows of a batch are brought.
ON_THE_GPU = 2**30

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
            categories=stacked(dataset.item_categories, rows, torch.int32).to(device),
            dense=stacked(dataset.item_dense, rows, torch.float32).to(device),
        )


@dataclass(frozen=True)
class HistoryStore:
    """All events of all users, user by user and in order; T tokens, U users, in one place.

    offsets: int64 [U+1]; item: int32 [T], a row of `items`; time: int64 [T] in the data set's time
    unit, None where events have an order but no times; signals: float32 [T, S], in the order of
    the data set's names. items: on the device that batches are for.
    """

    offsets: Tensor
    item: Tensor
    time: Tensor | None
    signals: Table
    items: ItemTable

    @property
    def place(self) -> torch.device:
        """Where the events are, and the requests that go with them."""
        return self.item.device

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return self.items.categories.device

    @classmethod
    def from_dataset(
        cls,
        dataset: ClickDataset,
        device: torch.device | str = "cpu",
        *,
        from_disk: bool | None = None,
    ) -> HistoryStore:
        """Histories and items of a prepared data set, for batches on `device`; made once.

        `from_disk`: whether a GPU is to have no copy of the events; None, where they and the
        requests take more than `ON_THE_GPU`.
        """
        device = torch.empty(0, device=device).device
        if from_disk is None:
            from_disk = dataset.nbytes > ON_THE_GPU
        return cls._of(dataset, torch.device("cpu") if from_disk else device, device)

    @classmethod
    @once
    def _of(cls, dataset: ClickDataset, place: torch.device, device: torch.device) -> HistoryStore:
        columns = dataset.histories
        timed = dataset.info["timed"] == "all"
        return cls(
            offsets=column(columns.offsets, torch.int64, place),
            item=column(columns.item, torch.int32, place),
            time=column(columns.time, torch.int64, place) if timed else None,
            signals=table(columns.signals, len(columns.item), torch.float32, place),
            items=ItemTable.from_dataset(dataset, device),
        )

    def prefix_index(
        self, user: Tensor, prefix: Tensor, *, max_history: int, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Token positions of the most recent `max_history` events of each prefix.

        user, prefix: [R] integers in the store's place. Returns `(index int64 [T'], offsets
        int64 [R+1])`. `total` is T' where the caller knows it; otherwise reading it back is the
        one synchronisation with the host.
        """
        length = prefix.long().clamp(max=max_history)
        start = self.offsets[user.long()] + prefix.long() - length
        return ranges(start, length, total)

    def cut_off(
        self, user: Tensor, prefix: Tensor, now: Tensor, *, max_history: int
    ) -> tuple[Tensor, Tensor]:
        """What `prefix_index` leaves out: how many events of each prefix are older than its most
        recent `max_history`, and the age of the newest of them.

        user, prefix: [R] integers in the store's place; now: int64 [R], the times of requests.
        Returns int64 [R] and int64 [R], the latter 0 where nothing is left out or there are no
        times.
        """
        cut = (prefix.long() - max_history).clamp(min=0)
        if self.time is None or not len(self.time):
            return cut, torch.zeros_like(cut)
        # where nothing is left out any event will do
        newest = (self.offsets[user.long()] + cut - 1).clamp(min=0)
        return cut, (now - self.time[newest]).masked_fill(cut == 0, 0)


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
