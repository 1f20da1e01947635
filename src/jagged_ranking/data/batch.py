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

from click_data.pieces import pieces
from jagged_kernels import JaggedTensor
from jagged_ranking.data.columns import PIECE, Table, column, table
from jagged_ranking.data.matches import earlier_matches, match_features
from jagged_ranking.data.store import HistoryStore, ItemTable, ranges


@dataclass(frozen=True)
class JaggedBatch:
    """R requests with T events and C candidates in all.

    Histories, `JaggedTensor`s that share one `offsets` [R+1]: item int32 [T]; categories int32
    [T, K]; age int64 [T], the request's time minus the event's (0 where there are no times);
    recency int32 [T], 0 for the latest event; signals float32 [T, S].
    Candidates, likewise: candidate int32 [C]; candidate_categories int32 [C, K]; features float32
    [C, F + 3], the data set's and then `matches.MATCHES`; label float32 [C, tasks].
    item_dense: float32 [T, E] and candidate_dense [C, E], dense features of the items.
    Of requests: user int32 [R]; context int32 [R, X] and context_dense float32 [R, Y]. request
    int64 [C] is a candidate's request, index int64 [C] its row among all candidates of its split.
    items: the features of all items.
    cut, cut_age: int64 [R], of events told from their arrival: how many events of the user are
    older than the history, which is cut, and the age of the newest of them (0 where there is none,
    or there are no times). None: nobody asked, or histories begin with the first event.
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
    cut: Tensor | None = None
    cut_age: Tensor | None = None
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
    """The requests of one split, in one place: R requests, C candidates.

    user, prefix int32 [R]; time int64 [R]; offsets int64 [R+1], a request's candidates; item int32
    [C]; label float32 [C, tasks]; features float32 [C, F]; context int32 [R, X]; context_dense
    float32 [R, Y]. host_prefix [R] and host_offsets [R+1], integers, are read without waiting.
    """

    user: Tensor
    prefix: Tensor
    time: Tensor
    offsets: Tensor
    item: Tensor
    label: Table
    features: Table
    context: Table
    context_dense: Table
    host_prefix: np.ndarray = field(repr=False)
    host_offsets: np.ndarray = field(repr=False)

    @classmethod
    def from_columns(cls, columns: Any, place: torch.device | str = "cpu") -> RequestTable:
        """From click_data's `RequestColumns` (or anything with those arrays), for a store with
        events in this place: on the CPU they stay where they are."""
        place = torch.device(place)
        requests, candidates = len(columns.user), len(columns.item)
        codes = {n: c for n, c in columns.context.items() if c.dtype == np.int32}
        dense = {n: c for n, c in columns.context.items() if c.dtype != np.int32}
        return cls(
            user=column(columns.user, torch.int32, place),
            prefix=column(columns.prefix, torch.int32, place),
            time=column(columns.time, torch.int64, place),
            offsets=column(columns.offsets, torch.int64, place),
            item=column(columns.item, torch.int32, place),
            label=table(columns.labels, candidates, torch.float32, place),
            features=table(columns.features, candidates, torch.float32, place),
            context=table(codes, requests, torch.int32, place),
            context_dense=table(dense, requests, torch.float32, place),
            host_prefix=np.asarray(columns.prefix),
            host_offsets=np.asarray(columns.offsets),
        )

    def __len__(self) -> int:
        return len(self.host_prefix)

    def last_of_users(self) -> np.ndarray:
        """Of each user the request that sees most, the later of equals; ascending, int64."""
        best: dict[str, np.ndarray] = {}
        for some in pieces(len(self), PIECE):
            here = self.user[some].cpu().numpy()
            seen, row = self.host_prefix[some], np.arange(some.start, some.stop)
            found = {"user": here, "seen": seen, "row": row}
            if best:
                found = {name: np.concatenate([best[name], found[name]]) for name in found}
            order = np.lexsort((found["row"], found["seen"], found["user"]))
            last = order[np.diff(found["user"][order], append=-1) != 0]
            best = {name: values[last] for name, values in found.items()}
        return np.sort(best["row"]) if best else np.empty(0, np.int64)


def make_batch(
    store: HistoryStore,
    requests: RequestTable,
    index: np.ndarray,
    *,
    max_history: int,
    arrivals: bool = False,
) -> JaggedBatch:
    """The requests `index` (int64 [R], on the host) with their histories; no synchronisation.
    `arrivals`: with `cut` and `cut_age`, for rankers that tell events from their arrival.

    Rows are taken where the store and the requests are, in the store's place, and brought to its
    device, where all else is made of them: whichever place that is, the batch is the same to the
    bit. All lengths are known on the host too, so that none need be read back.
    """
    seen = np.minimum(requests.host_prefix[index], max_history).astype(np.int64)
    asked = requests.host_offsets[index + 1] - requests.host_offsets[index]
    tokens, candidates = int(seen.sum()), int(asked.sum())
    rows = _brought(torch.from_numpy(index), store.place)
    user, prefix = requests.user[rows], requests.prefix[rows]
    token, begins = store.prefix_index(user, prefix, max_history=max_history, total=tokens)
    first = requests.offsets[rows]
    now = requests.time[rows]
    shown, shown_begins = ranges(first, requests.offsets[rows + 1] - first, candidates)
    found = {
        "offsets": begins,
        "item": store.item[token],
        "signals": store.signals[token],
        **({} if store.time is None else {"time": store.time[token]}),
        "user": user,
        "now": now,
        "context": requests.context[rows],
        "context_dense": requests.context_dense[rows],
        "index": shown,
        "asked_offsets": shown_begins,
        "candidate": requests.item[shown],
        "features": requests.features[shown],
        "label": requests.label[shown],
    }
    if arrivals:
        cut, cut_age = store.cut_off(user, prefix, now, max_history=max_history)
        found |= {"cut": cut, "cut_age": cut_age}
    here = {name: _brought(values, store.device) for name, values in found.items()}
    # offsets just computed need no check, which on a GPU would wait for them
    item = JaggedTensor(here["item"], here["offsets"], validate=False)
    candidate = JaggedTensor(here["candidate"], here["asked_offsets"], validate=False)
    number = torch.arange(len(index), device=store.device)
    owner, request = (
        torch.repeat_interleave(number, of.offsets.diff(), output_size=total)
        for of, total in ((item, tokens), (candidate, candidates))
    )
    end = item.offsets[1:]
    position = torch.arange(tokens, device=store.device)
    time, now = here.get("time"), here["now"]
    items = store.items
    matches = earlier_matches(
        owner, item.values, request, candidate.values, end[request], rows=len(items.categories)
    )
    features = torch.cat([here["features"], match_features(*matches)], dim=1)
    return JaggedBatch(
        item=item,
        categories=item.with_values(items.categories[item.values.long()]),
        item_dense=item.with_values(items.dense[item.values.long()]),
        age=item.with_values(torch.zeros_like(owner) if time is None else now[owner] - time),
        recency=item.with_values((end[owner] - 1 - position).int()),
        signals=item.with_values(here["signals"]),
        candidate=candidate,
        candidate_categories=candidate.with_values(items.categories[candidate.values.long()]),
        candidate_dense=candidate.with_values(items.dense[candidate.values.long()]),
        features=candidate.with_values(features),
        label=candidate.with_values(here["label"]),
        user=here["user"],
        context=here["context"],
        context_dense=here["context_dense"],
        request=request,
        index=here["index"],
        items=items,
        events=seen,
        asked=asked,
        cut=here.get("cut"),
        cut_age=here.get("cut_age"),
    )


def _brought(values: Tensor, device: torch.device) -> Tensor:
    """The same on a device, without waiting for a GPU."""
    # from other memory a copy would wait
    if device.type == "cuda" and values.device.type == "cpu" and values.numel():
        values = values.pin_memory()
    return values.to(device, non_blocking=True)
