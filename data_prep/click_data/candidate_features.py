"""What is known of each candidate before it is shown: clicks of all users, strictly earlier."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from click_data.arrays import gather, stable_order
from click_data.pieces import pieces_of

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
    def of(cls, item: NDArray[np.int32], time: NDArray[np.int64], items: int) -> "Clicks":
        order = stable_order(time)
        keys = gather(item, order).astype(np.int64)
        keys *= len(order) + 1
        keys += np.arange(len(order))
        keys.sort()
        starts = np.searchsorted(keys, np.arange(items + 1) * (len(order) + 1))
        return cls(gather(time, order), keys, starts)

    def features(
        self,
        item: NDArray[np.int32],
        as_of: NDArray[np.int64],
        offsets: NDArray[np.int64],
    ) -> dict[str, NDArray[np.float32]]:
        """Features [C] of the candidates of requests, as of a time each [R]; offsets: int64 [R+1].

        popularity: log1p of the clicks of an item at strictly earlier times. trend: log1p of those
        among the last W clicks of all items by then, W = max(1000, clicks / 100). age: log1p of
        the time since the item's first click, 0 if there is none.
        """
        found = {name: np.empty(len(item), np.float32) for name in MADE}
        for some in pieces_of(offsets):
            shown = slice(offsets[some.start], offsets[some.stop])
            lengths = np.diff(offsets[some.start : some.stop + 1])
            made = self._features(item[shown], as_of[some], lengths)
            for name in MADE:
                found[name][shown] = np.log1p(made[name])
        return found

    def _features(
        self, item: NDArray[np.int32], as_of: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> dict[str, NDArray[Any]]:
        """What `features` takes the logarithms of."""
        total = len(self.time)
        before = np.searchsorted(self.time, as_of)
        recent = np.maximum(before - max(_RECENT, total // _SHARE), 0)
        row = item.astype(np.int64) * (total + 1)
        until = _places(self.keys, row + np.repeat(before, lengths))
        since = _places(self.keys, row + np.repeat(recent, lengths))
        count = until - self.starts[item]
        age = np.zeros(len(item))
        some = count > 0
        first = self.time[self.keys[self.starts[item[some]]] - row[some]]
        age[some] = np.repeat(as_of, lengths)[some] - first
        return {"popularity": count, "trend": until - since, "age": age}


def _places(known: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    """`np.searchsorted`, which is fast where neighbours are looked for in turn."""
    order = stable_order(values)
    found = np.empty(len(values), np.int64)
    found[order] = np.searchsorted(known, values[order])
    return found
