"""Where the next item stands among all items.

The protocol of sequences: an item that the user has met is none of those it is ranked among, since
the published sets hold no item twice in a sequence. Items that training has not seen are ranked by
the unknown one, all alike.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from jagged_ranking.data.loader import RequestLoader
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.evaluation.metrics import TOP
from jagged_ranking.models.ranker import Ranker

ALL_ITEM_METRICS = ("all_hr@10", "all_ndcg@10")


def ranks_among_all(model: Ranker, loader: RequestLoader) -> np.ndarray:
    """The rank of each request's first candidate among all items, float64 [R] in the loader's
    order; of equal scores the mean."""
    return ranks_and_rows(model, loader)[0]


@torch.no_grad()
def ranks_and_rows(model: Ranker, loader: RequestLoader) -> tuple[np.ndarray, np.ndarray]:
    """What `ranks_among_all` returns, and which of the split's requests each is, int64 [R]."""
    model.eval()
    store, requests = loader.store, loader.requests
    every = torch.arange(model.num_items, device=store.device)
    vectors, bias = model.items(every, store.items)
    ranks, places = [], []
    for batch in loader.batches():
        if not len(batch):  # of a batch that is shared there may be nothing here
            continue
        first = batch.candidate.offsets[:-1]
        begin = batch.index[first].to(requests.offsets.device)
        rows = torch.searchsorted(requests.offsets, begin, right=True) - 1
        places.append(rows)
        target = batch.candidate.values[first].long()
        target = target.masked_fill(target >= len(vectors), 0)
        score = model.answers(batch) @ vectors.T + bias
        own = score.gather(1, target[:, None])
        met = _met(store, requests.user[rows], requests.prefix[rows], len(vectors))
        met = met.scatter(1, target[:, None], False)
        score = score.masked_fill(met, -torch.inf)
        better, equal = (score > own).sum(1), (score == own).sum(1)
        ranks.append(better.double() + (equal.double() + 1) / 2)
    if not ranks:
        return np.zeros(0), np.zeros(0, np.int64)
    return torch.cat(ranks).cpu().numpy(), torch.cat(places).cpu().numpy()


def _met(store: HistoryStore, user: Tensor, prefix: Tensor, num_items: int) -> Tensor:
    """Which items are in the whole of these prefixes, bool [R, num_items], and the unknown one."""
    token, offsets = store.prefix_index(user, prefix, max_history=len(store.item))
    row = torch.repeat_interleave(offsets.diff(), output_size=len(token)).to(store.device)
    item = store.item[token].long().to(store.device)
    met = torch.zeros(len(user), num_items, dtype=torch.bool, device=store.device)
    met[:, 0] = True
    met[row, item.masked_fill(item >= num_items, 0)] = True
    return met


def all_item_metrics(rank: np.ndarray) -> dict[str, float]:
    """`ALL_ITEM_METRICS` of the ranks of the one positive item of each request."""
    hit = rank <= TOP
    return {
        "all_hr@10": float(hit.mean()),
        "all_ndcg@10": float((hit / np.log2(1 + rank)).mean()),
    }
