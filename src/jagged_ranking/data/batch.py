"""Batches of requests: a request is a history and the candidates that are to be ranked for it.

A list of impressions, one event with its label, and the next item of a sequence are all requests.
A request's history is encoded once, however many candidates there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jagged_kernels import JaggedTensor
from jagged_ranking.data.store import HistoryStore, ItemTable, ranges, stacked, tensor

# Names of the features that come with every candidate: of its earlier events in the history.
MATCHES = ("matches", "matched", "match_recency")


@dataclass(frozen=True)
class JaggedBatch:
    """R requests with T events and C candidates in all.

    Histories, `JaggedTensor`s that share one `offsets` [R+1]: item int32 [T]; categories int32
    [T, K]; age int64 [T], the request's time minus the event's (0 where there are no times);
    recency int32 [T], 0 for the latest event; signals float32 [T, S].
    Candidates, likewise: candidate int32 [C]; candidate_categories int32 [C, K]; features float32
    [C, F + 3], the data set's and then `MATCHES`; label float32 [C, tasks].
    item_dense: float32 [T, E] and candidate_dense [C, E], dense features of the items.
    Of requests: user int32 [R]; context int32 [R, X] and context_dense float32 [R, Y]. request
    int64 [C] is a candidate's request, index int64 [C] its row among all candidates of its split.
    items: the features of all items.
    events, asked: numpy int64 [R], lengths of the histories and numbers of candidates, which stay
    on the host: what depends on them is sized without waiting for a GPU. So do pairs, of a
    candidate and an event of its request, in all; and longest, the most candidates, and the most
    events, of one request.
    """

    item: JaggedTensor
    categories: JaggedTensor
    item_dense: JaggedTensor
    age: JaggedTensor
    recency: JaggedTensor
    signals: JaggedTensor
    candidate: JaggedTensor
    candidate_categories: JaggedTensor
    candidate_dense: JaggedTensor
    features: JaggedTensor
    label: JaggedTensor
    user: Tensor
    context: Tensor
    context_dense: Tensor
    request: Tensor
    index: Tensor
    items: ItemTable
    events: np.ndarray
    asked: np.ndarray
    pairs: int = field(init=False)
    longest: tuple[int, int] = field(init=False)

    def __post_init__(self) -> None:
        # numbers, since arrays of NumPy cannot be read in a compiled graph
        longest = int(self.asked.max(initial=0)), int(self.events.max(initial=0))
        object.__setattr__(self, "pairs", int((self.events * self.asked).sum()))
        object.__setattr__(self, "longest", longest)

    def __len__(self) -> int:
        return len(self.user)

    def latest(self, k: int, *, each_candidate: bool = False) -> int:
        """Events among the k latest of each request, in all; or of each candidate's request."""
        events = np.minimum(self.events, k)
        return int((events * self.asked if each_candidate else events).sum())

    @property
    def offsets(self) -> Tensor:
        """int64 [R+1], shared by all history fields."""
        return self.item.offsets

    def to(self, device: torch.device | str) -> JaggedBatch:
        """The same batch on another device; what shares offsets goes on sharing them."""
        heads = {id(jagged.offsets): jagged.to(device) for jagged in (self.candidate, self.item)}
        moved: dict[str, Any] = {}
        for spec in (spec for spec in fields(self) if spec.init):
            value = getattr(self, spec.name)
            if isinstance(value, JaggedTensor):
                head = heads[id(value.offsets)]
                moved[spec.name] = head.with_values(value.values.to(device))
            else:
                moves = isinstance(value, (Tensor, ItemTable))
                moved[spec.name] = value.to(device) if moves else value
        return JaggedBatch(**moved)


@dataclass(frozen=True)
class RequestTable:
    """The requests of one split as tensors on the store's device: R requests, C candidates.

    user, prefix int32 [R]; time int64 [R]; offsets int64 [R+1], a request's candidates; item int32
    [C]; label float32 [C, tasks]; features float32 [C, F]; context int32 [R, X]; context_dense
    float32 [R, Y]. host_prefix and host_offsets are copies that are read without waiting.
    """

    user: Tensor
    prefix: Tensor
    time: Tensor
    offsets: Tensor
    item: Tensor
    label: Tensor
    features: Tensor
    context: Tensor
    context_dense: Tensor
    host_prefix: np.ndarray = field(repr=False)
    host_offsets: np.ndarray = field(repr=False)

    @classmethod
    def from_columns(cls, columns: Any, device: torch.device | str = "cpu") -> RequestTable:
        """From click_data's `RequestColumns` (or anything with those arrays)."""
        requests, candidates = len(columns.user), len(columns.item)
        codes = {n: c for n, c in columns.context.items() if c.dtype == np.int32}
        dense = {n: c for n, c in columns.context.items() if c.dtype != np.int32}
        return cls(
            user=tensor(columns.user, np.int32, device),
            prefix=tensor(columns.prefix, np.int32, device),
            time=tensor(columns.time, np.int64, device),
            offsets=tensor(columns.offsets, np.int64, device),
            item=tensor(columns.item, np.int32, device),
            label=stacked(columns.labels, candidates, np.float32, device),
            features=stacked(columns.features, candidates, np.float32, device),
            context=stacked(codes, requests, np.int32, device),
            context_dense=stacked(dense, requests, np.float32, device),
            host_prefix=np.array(columns.prefix, np.int64),
            host_offsets=np.array(columns.offsets, np.int64),
        )

    def __len__(self) -> int:
        return len(self.host_prefix)

    def last_of_users(self) -> np.ndarray:
        """Of each user the request that sees most, the later of equals; ascending, int64."""
        user = self.user.cpu().numpy()
        order = np.lexsort((np.arange(len(user)), self.host_prefix, user))
        last = np.diff(user[order], append=-1) != 0
        return np.sort(order[last])


def make_batch(
    store: HistoryStore, requests: RequestTable, index: np.ndarray, *, max_history: int
) -> JaggedBatch:
    """The requests `index` (int64 [R], on the host) with their histories; no synchronisation.

    All lengths are known on the host too, so that none need be read back.
    """
    device = store.item.device
    seen = np.minimum(requests.host_prefix[index], max_history)
    asked = requests.host_offsets[index + 1] - requests.host_offsets[index]
    tokens, candidates = int(seen.sum()), int(asked.sum())
    rows = torch.from_numpy(index)
    if device.type == "cuda":  # from other memory a copy would wait
        rows = rows.pin_memory()
    rows = rows.to(device, non_blocking=True)
    user, prefix, now = requests.user[rows], requests.prefix[rows], requests.time[rows]

    token, offsets = store.prefix_index(user, prefix, max_history=max_history, total=tokens)
    # offsets just computed need no check, which on a GPU would wait for them
    item = JaggedTensor(store.item[token], offsets, validate=False)
    length = offsets.diff()
    end, at = (torch.repeat_interleave(x, length, output_size=tokens) for x in (offsets[1:], now))
    position = torch.arange(tokens, device=device)
    age = torch.zeros_like(at) if store.time is None else at - store.time[token]

    first = requests.offsets[rows]
    shown, shown_offsets = ranges(first, requests.offsets[rows + 1] - first, candidates)
    candidate = JaggedTensor(requests.item[shown], shown_offsets, validate=False)
    request = torch.repeat_interleave(
        torch.arange(len(index), device=device), shown_offsets.diff(), output_size=candidates
    )
    stop = store.offsets[user.long()] + prefix
    matches = store.matches(
        user[request], candidate.values, (stop - length)[request], stop[request]
    )
    features = torch.cat([requests.features[shown], match_features(*matches)], dim=1)
    items = store.items
    return JaggedBatch(
        item=item,
        categories=item.with_values(items.categories[item.values.long()]),
        item_dense=item.with_values(items.dense[item.values.long()]),
        age=item.with_values(age),
        recency=item.with_values((end - 1 - position).int()),
        signals=item.with_values(store.signals[token]),
        candidate=candidate,
        candidate_categories=candidate.with_values(items.categories[candidate.values.long()]),
        candidate_dense=candidate.with_values(items.dense[candidate.values.long()]),
        features=candidate.with_values(features),
        label=candidate.with_values(requests.label[shown]),
        user=user,
        context=requests.context[rows],
        context_dense=requests.context_dense[rows],
        request=request,
        index=shown,
        items=items,
        events=seen,
        asked=asked,
    )


def match_features(count: Tensor, since: Tensor) -> Tensor:
    """`MATCHES` [C, 3]: log(1 + how often), whether at all, 1 / (1 + events since the last)."""
    recency = torch.where(since < 0, 0.0, 1 / (1 + since.clamp(min=0).float()))
    return torch.stack([count.float().log1p(), (count > 0).float(), recency], dim=1)


def whole_matches(store: HistoryStore, columns: Any) -> Tensor:
    """`MATCHES` [C, 3] of the candidates of click_data's `RequestColumns`, in all of the history
    that each request may see; on the store's device."""
    device = store.item.device
    user, prefix = (tensor(of, np.int64, device) for of in (columns.user, columns.prefix))
    asked = tensor(np.diff(columns.offsets), np.int64, device)
    request = torch.repeat_interleave(torch.arange(len(user), device=device), asked)
    start = store.offsets[user]
    item = tensor(columns.item, np.int64, device)
    found = store.matches(user[request], item, start[request], (start + prefix)[request])
    return match_features(*found)
