"""What is known of each candidate before it is shown: clicks of all users, strictly earlier."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MADE = ("popularity", "trend", "age")
SHOWN = "shown"  # of what a log shows, how often it did
_RECENT = 1000  # clicks at least
_SHARE = 100


@dataclass(frozen=True)
class Clicks:
    """All clicks of a log.

    time: int64 [T], ascending. keys: int64 [T], ascending, the item and the place in time order of
    each click as one number; starts: int64 [items + 1], where each item's begin.
    """

    time: NDArray[np.int64]
    keys: NDArray[np.int64]
    starts: NDArray[np.int64]

    @classmethod
    def of(cls, item: NDArray[np.int64], time: NDArray[np.int64], items: int) -> "Clicks":
        order = np.argsort(time, kind="stable")
        keys = np.sort(item[order] * (len(order) + 1) + np.arange(len(order)))
        starts = np.searchsorted(keys, np.arange(items + 1) * (len(order) + 1))
        return cls(time[order], keys, starts)

    def earlier(
        self, item: NDArray[np.int64], as_of: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """log1p of the clicks of each candidate at strictly earlier times, float32 [C]."""
        return self.features(item, as_of, lengths)["popularity"]

    def features(
        self, item: NDArray[np.int64], as_of: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> dict[str, NDArray[np.float32]]:
        """Features [C] of candidates of requests with so many each, as of a time each [R].

        popularity: log1p of the clicks of an item at strictly earlier times. trend: log1p of those
        among the last W clicks of all items by then, W = max(1000, clicks / 100). age: log1p of
        the time since the item's first click, 0 if there is none.
        """
        total = len(self.time)
        before = np.searchsorted(self.time, as_of)
        recent = np.maximum(before - max(_RECENT, total // _SHARE), 0)
        row = item * (total + 1)
        until = np.searchsorted(self.keys, row + np.repeat(before, lengths))
        since = np.searchsorted(self.keys, row + np.repeat(recent, lengths))
        count = until - self.starts[item]
        age = np.zeros(len(item))
        some = count > 0
        first = self.time[self.keys[self.starts[item[some]]] - row[some]]
        age[some] = np.repeat(as_of, lengths)[some] - first
        logs = {"popularity": count, "trend": until - since, "age": age}
        return {name: np.log1p(logs[name]).astype(np.float32) for name in MADE}
