"""Jagged batches cut out of one flat store of histories.

A user's whole history is stored once. A sample is `(user, prefix)`: its history is the slice
`[offsets[user] + max(0, prefix - cap), offsets[user] + prefix)` of the flat token store, so a batch
costs one gather, and nothing is ever padded. `prefix` counts the events that are strictly earlier
than the sample, so that a slice cannot hold the target or its twins of the same second.

Each sample carries a slice of its own: impressions of one user do not yet share one history
inside a batch (that needs attention whose keys belong to a user and whose queries each see a
prefix of them; the store has everything that it takes).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from jagged_kernels import JaggedTensor

if TYPE_CHECKING:
    from click_data import ClickDataset


@dataclass(frozen=True)
class HistoryStore:
    """All events of all users, user by user and time-ordered; T tokens, U users, on one device.

    offsets: int64 [U+1]; item, category, label: int32 [T]; time: int64 [T] in the data set's
    time unit; signals: float32 [T, S], the extra signals in the order of `signal_names`.
    """

    offsets: Tensor
    item: Tensor
    category: Tensor
    label: Tensor
    time: Tensor
    signals: Tensor
    signal_names: tuple[str, ...] = ()

    @classmethod
    def from_dataset(
        cls, dataset: ClickDataset, device: torch.device | str = "cpu"
    ) -> HistoryStore:
        """Copies the histories of a prepared data set to `device`."""
        columns = dataset.histories
        names = tuple(sorted(columns.signals))
        signals = np.zeros((len(columns.item), len(names)), np.float32)
        for position, name in enumerate(names):
            signals[:, position] = columns.signals[name]
        return cls(
            offsets=_tensor(columns.offsets, np.int64, device),
            item=_tensor(columns.item, np.int32, device),
            category=_tensor(columns.category, np.int32, device),
            label=_tensor(columns.label, np.int32, device),
            time=_tensor(columns.time, np.int64, device),
            signals=torch.from_numpy(signals).to(device),
            signal_names=names,
        )

    def prefix_index(
        self, user: Tensor, prefix: Tensor, *, max_history: int, total: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Token positions of the most recent `max_history` events of each prefix.

        user, prefix: [B] integers on the store's device. Returns `(index int64 [T'], offsets
        int64 [B+1])`. `total` is T' where the caller knows it; otherwise reading it back is the
        one synchronisation with the host.
        """
        length = prefix.long().clamp(max=max_history)
        offsets = torch.zeros(len(length) + 1, dtype=torch.int64, device=length.device)
        torch.cumsum(length, 0, out=offsets[1:])
        if total is None:
            total = int(offsets[-1])
        start = self.offsets[user.long()] + prefix.long() - length
        shift = torch.repeat_interleave(start - offsets[:-1], length, output_size=total)
        return torch.arange(total, device=length.device) + shift, offsets


@dataclass(frozen=True)
class JaggedBatch:
    """B samples; the history fields share one `offsets` [B+1] and hold T tokens in all.

    Histories: item, category, label int32 [T]; age int64 [T], the sample's time minus the event's
    (> 0); recency int32 [T], 0 for the user's latest event; signals float32 [T, S].
    Samples: target_item, target_category, user int32 [B]; target float32 [B] (the label);
    index int64 [B], the sample's row in its split.
    """

    item: JaggedTensor
    category: JaggedTensor
    label: JaggedTensor
    age: JaggedTensor
    recency: JaggedTensor
    signals: JaggedTensor
    target_item: Tensor
    target_category: Tensor
    target: Tensor
    user: Tensor
    index: Tensor

    def __len__(self) -> int:
        return len(self.user)

    @property
    def offsets(self) -> Tensor:
        """int64 [B+1], shared by all history fields."""
        return self.item.offsets

    def to(self, device: torch.device | str) -> JaggedBatch:
        """The same batch on another device; the histories go on sharing one `offsets`."""
        item = self.item.to(device)
        moved: dict[str, Any] = {}
        for spec in fields(self):
            value = getattr(self, spec.name)
            shared = isinstance(value, JaggedTensor)
            moved[spec.name] = (
                item.with_values(value.values.to(device)) if shared else value.to(device)
            )
        return JaggedBatch(**moved)


@dataclass(frozen=True)
class SampleTable:
    """The samples of one split as tensors on the store's device, [N] each."""

    user: Tensor
    prefix: Tensor
    item: Tensor
    category: Tensor
    label: Tensor
    time: Tensor
    host_prefix: np.ndarray = field(repr=False)

    @classmethod
    def from_columns(cls, columns: Any, device: torch.device | str = "cpu") -> SampleTable:
        """From click_data's `SampleColumns` (or anything with those arrays)."""
        return cls(
            user=_tensor(columns.user, np.int32, device),
            prefix=_tensor(columns.prefix, np.int32, device),
            item=_tensor(columns.item, np.int32, device),
            category=_tensor(columns.category, np.int32, device),
            label=_tensor(columns.label, np.float32, device),
            time=_tensor(columns.time, np.int64, device),
            host_prefix=np.array(columns.prefix, np.int64),
        )

    def __len__(self) -> int:
        return len(self.host_prefix)


def make_batch(
    store: HistoryStore, samples: SampleTable, index: np.ndarray, *, max_history: int
) -> JaggedBatch:
    """The samples `index` (int64 [B], on the host) with their histories; no synchronisation.

    The lengths are known on the host too, so that the number of tokens need not be read back.
    """
    total = int(np.minimum(samples.host_prefix[index], max_history).sum())
    rows = torch.from_numpy(index).to(store.item.device, non_blocking=True)
    user = samples.user[rows]
    token, offsets = store.prefix_index(
        user, samples.prefix[rows], max_history=max_history, total=total
    )
    # offsets just computed need no check, which on a GPU would wait for them
    item = JaggedTensor(store.item[token], offsets, validate=False)
    length = offsets.diff()
    end, now = (
        torch.repeat_interleave(x, length, output_size=total)
        for x in (offsets[1:], samples.time[rows])
    )
    recency = (end - 1 - torch.arange(total, device=end.device)).int()
    return JaggedBatch(
        item=item,
        category=item.with_values(store.category[token]),
        label=item.with_values(store.label[token]),
        age=item.with_values(now - store.time[token]),
        recency=item.with_values(recency),
        signals=item.with_values(store.signals[token]),
        target_item=samples.item[rows],
        target_category=samples.category[rows],
        target=samples.label[rows],
        user=user,
        index=rows,
    )


class SampleLoader:
    """Batches of one split, in an order that depends on `(seed, epoch)` alone.

    There is no state to save: `batches(epoch, start=k)` goes on exactly where an interrupted
    epoch stopped. Batch size is in samples; the last batch may be smaller.
    """

    def __init__(
        self,
        store: HistoryStore,
        samples: SampleTable,
        *,
        batch_size: int,
        max_history: int,
        shuffle: bool = False,
        seed: int = 0,
    ) -> None:
        if batch_size < 1 or max_history < 1:
            raise ValueError(
                f"batch_size and max_history must be at least 1, got {batch_size}, {max_history}"
            )
        self.store, self.samples = store, samples
        self.batch_size, self.max_history = batch_size, max_history
        self.shuffle, self.seed = shuffle, seed

    def __len__(self) -> int:
        return math.ceil(len(self.samples) / self.batch_size)

    def order(self, epoch: int) -> np.ndarray:
        """Sample rows in the order of `epoch`, int64 [N]."""
        if not self.shuffle:
            return np.arange(len(self.samples))
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.samples))

    def batches(self, epoch: int = 0, *, start: int = 0) -> Iterator[JaggedBatch]:
        """Batches `start`, `start + 1`, ... of `epoch`."""
        order = self.order(epoch)
        for first in range(start * self.batch_size, len(order), self.batch_size):
            index = order[first : first + self.batch_size]
            yield make_batch(self.store, self.samples, index, max_history=self.max_history)


def _tensor(array: np.ndarray, dtype: Any, device: torch.device | str) -> Tensor:
    # np.array copies: memory-mapped columns are read-only, and torch wants writable memory
    return torch.from_numpy(np.array(array, dtype=dtype)).to(device)
