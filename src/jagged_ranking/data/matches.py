"""What a history says of an item: whether it is there, how often, how long ago.

Found by sorting the events of the histories at hand: those of a batch, or, for statistics of a
whole split, those of some users after others, so that no index of all events is held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from click_data.pieces import pieces, pieces_of
from jagged_ranking.data.columns import PIECE

if TYPE_CHECKING:
    from click_data import ClickDataset

# Names of the features that come with every candidate: of its earlier events in the history.
MATCHES = ("matches", "matched", "match_recency")


def earlier_matches(
    owner: Tensor, item: Tensor, asked_owner: Tensor, asked_item: Tensor, end: Tensor, *, rows: int
) -> tuple[Tensor, Tensor]:
    """How many events before `end` are of an owner and item, and how long ago the last was.

    Args:
        owner: of each event, int64 [T]; whatever tells histories apart.
        item: of each event, int [T] below `rows`.
        asked_owner: int64 [C].
        asked_item: int [C] below `rows`.
        end: a position among all events, int64 [C].
        rows: items that there are.

    Returns:
        int32 [C] each: the count, and how many events of [0, end) came after the last of them (-1:
        there is none).
    """
    tokens = len(item)
    if tokens == 0:
        nothing = torch.zeros_like(asked_item, dtype=torch.int32)
        return nothing, nothing - 1
    pairs, position = (owner * rows + item.long()).sort(stable=True)
    # Of each event the number of its pair of owner and item times T plus its position: ascending.
    number = (pairs.diff(prepend=pairs[:1]) != 0).cumsum(0)
    places = number * tokens + position
    asked = asked_owner * rows + asked_item.long()
    first = torch.searchsorted(pairs, asked)
    at = first.clamp(max=tokens - 1)
    last = torch.searchsorted(places, number[at] * tokens + end)
    count = torch.where(pairs[at] == asked, last - first, 0)
    latest = position[(last - 1).clamp(min=0)]
    since = torch.where(count > 0, end - 1 - latest, -1)
    return count.int(), since.int()


def match_features(count: Tensor, since: Tensor) -> Tensor:
    """`MATCHES` [C, 3]: log(1 + how often), whether at all, 1 / (1 + events since the last)."""
    recency = torch.where(since < 0, 0.0, 1 / (1 + since.clamp(min=0).float()))
    return torch.stack([count.float().log1p(), (count > 0).float(), recency], dim=1)


def whole_matches(dataset: ClickDataset, columns: Any) -> dict[str, np.ndarray]:
    """`MATCHES` of the candidates of click_data's `RequestColumns`, float32 [C] by name, in all of
    the history that each request may see.

    The arrays lie in files (`ClickDataset.scratch`). Some users after others, whose events are
    sorted; what is held at once are those, and what is asked of them.
    """
    found = {name: dataset.scratch(len(columns.item), np.float32) for name in MATCHES}
    offsets, events = dataset.histories.offsets, dataset.histories.item
    for some in pieces_of(offsets, PIECE):
        begin = int(offsets[some.start])
        lengths = np.diff(offsets[some.start : some.stop + 1])
        owner = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        item = torch.from_numpy(events[begin : int(offsets[some.stop])].copy())
        request = _requests_of(columns.user, some)
        whose = columns.user[request].astype(np.int64) - some.start
        first = columns.offsets[request]
        asked = columns.offsets[request + 1] - first
        rows = np.repeat(first - np.cumsum(asked) + asked, asked) + np.arange(asked.sum())
        ends = offsets[whose + some.start] - begin + columns.prefix[request]
        counted = earlier_matches(
            owner,
            item,
            torch.from_numpy(np.repeat(whose, asked)),
            torch.from_numpy(columns.item[rows]),
            torch.from_numpy(np.repeat(ends, asked)),
            rows=dataset.item_rows,
        )
        for name, values in zip(MATCHES, match_features(*counted).T, strict=True):
            found[name][rows] = values.numpy()
    return found


def _requests_of(user: np.ndarray, some: slice) -> np.ndarray:
    """The requests of users some.start to some.stop, by user and then in their order."""
    parts = []
    for piece in pieces(len(user), PIECE):
        whose = user[piece]
        mine = np.flatnonzero((whose >= some.start) & (whose < some.stop))
        parts.append(mine + piece.start)
    request = np.concatenate(parts) if parts else np.empty(0, np.int64)
    return request[np.argsort(user[request], kind="stable")]
