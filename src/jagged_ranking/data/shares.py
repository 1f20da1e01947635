"""How the processes of a training share the requests of a batch."""

from __future__ import annotations

import heapq

import numpy as np


def share_out(cost: np.ndarray, *, ranks: int) -> np.ndarray:
    """Who gets each request, int64 [R] below `ranks`, so that all have about the same to do.

    The dearest first, each to whoever has least so far (longest processing time first: Graham,
    SIAM J. Appl. Math. 17, 1969, at most a third above the best there is). Of equals the earlier
    request and the lower rank come first, so that every process finds the same. Where there are
    fewer requests than ranks, some get none.
    """
    owner = np.zeros(len(cost), np.int64)
    load = [(0, rank) for rank in range(ranks)]
    for request in np.argsort(-cost, kind="stable").tolist():
        least, rank = load[0]
        owner[request] = rank
        # one more, so that requests that cost nothing are shared, too
        heapq.heapreplace(load, (least + int(cost[request]) + 1, rank))
    return owner
