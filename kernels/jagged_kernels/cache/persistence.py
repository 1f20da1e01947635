"""`persistence_ratio`: are the keys that matter later those that mattered before?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jagged_kernels.cache.statistics import check_inputs, key_statistics
from jagged_kernels.core.backends import Backend
from jagged_kernels.core.contents import known_to_differ
from jagged_kernels.ops.layout.slice import jagged_recent, jagged_slice
from jagged_kernels.ops.pooling.pooling import jagged_sum
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested


@dataclass(frozen=True, eq=False)
class Persistence:
    """What `persistence_ratio` returns, [B, Hk] float32; NaN where there is nothing to divide by.

    Attributes:
        ratio: of the first half's keys that are pivotal to the second half's queries, the share
            that was pivotal in the first half: the persistence ratio.
        kept: of those that were pivotal in the first half, the share that still is.
        pivotal: the share of the first half's keys that were pivotal in it.

    >>> Persistence(torch.ones(1, 1), torch.ones(1, 1), torch.full((1, 1), 0.25)).pivotal.item()
    0.25
    """

    ratio: Tensor
    kept: Tensor
    pivotal: Tensor


@takes_nested
def persistence_ratio(
    q: JaggedTensor,
    k: JaggedTensor,
    lse: Tensor,
    *,
    scale: float | None = None,
    backend: Backend = "auto",
) -> Persistence:
    """The persistence of importance in causal self-attention, as Scissorhands measures it (arXiv
    2305.17118, section 3): a user's history of n events is cut at t = n // 2, and a key is pivotal
    in a half if some query of it gives the key its share 1/n or more (of any head that shares it).

    Args:
        q, k: [T, H, D] and [T, Hk, D] of the same users.
        lse: [T, H], of `jagged_attention(q, k, v, causal=True)` with this scale.
        backend: of `key_statistics`.

    Raises:
        TypeError, ValueError: as `key_statistics`, or q and k of other lengths.

    Waits for the device, and is not one graph of `torch.compile`.

    >>> x = JaggedTensor(torch.tensor([3.0, -3.0, 2.0, 2.0]).view(4, 1, 1), torch.tensor([0, 4]))
    >>> _, lse = jagged_attention(x, x, x, causal=True, return_lse=True)
    >>> found = persistence_ratio(x, x, lse)
    >>> found.ratio.item(), found.kept.item(), found.pivotal.item()
    (1.0, 0.5, 1.0)
    """
    check_inputs(q, k, lse)
    if q.values.shape[:1] != k.values.shape[:1] or known_to_differ(q.offsets, k.offsets):
        raise ValueError("q and k must have the same offsets")
    lengths = k.lengths
    before = lengths // 2
    of_queries = q.with_values(lse)
    early = [jagged_slice(x, 0, before) for x in (q, k, of_queries)]
    late = [jagged_recent(x, lengths - before) for x in (q, of_queries)]
    options = {"scale": scale, "recent": None, "backend": backend}
    first = key_statistics(early[0], early[1], early[2].values, **options).unimportant
    second = key_statistics(late[0], k, late[1].values, **options).unimportant
    second = jagged_slice(second, 0, before)
    # How many queries see a key: those that follow it in its half, and all of the second.
    group = q.values.shape[1] // k.values.shape[1]
    user = torch.arange(len(k), device=k.device).repeat_interleave(before)
    place = torch.arange(user.shape[0], device=k.device) - first.offsets[user]
    was = first.values < ((before[user] - place) * group)[:, None]
    stays = second.values < ((lengths - before)[user] * group)[:, None]
    counts = [jagged_sum(first.with_values(x.float())) for x in (was & stays, stays, was)]
    both, later, earlier = counts
    return Persistence(both / later, both / earlier, earlier / before[:, None])
