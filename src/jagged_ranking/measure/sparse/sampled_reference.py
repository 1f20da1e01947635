"""What attention to some of the keys is checked against: float32, the mask that papers say.

Of users whose scores are too many, a sample of queries is computed, each against all of its user's
keys. For the check the gradient of the output is zero at the other queries: so the gradients of
keys and values are exact and complete, whatever length they have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from jagged_kernels import KeyLists
from jagged_ranking.measure.providers.jagged import packed_bounds, packed_queries
from jagged_ranking.measure.reference import Errors, Reference, compare, tolerance_of
from jagged_ranking.measure.sparse.patterns import Pattern, Retrieved, blocks_listed
from jagged_ranking.measure.workloads import Batch

# Of one user: 0.5 GB in float32.
MOST_SCORES = 2**27


@dataclass(frozen=True)
class Sample:
    """Queries of which results are compared.

    rows: of each user, their places among the user's queries, ascending. places: [n] of all of
    them among the packed queries of the batch.
    """

    rows: Sequence[Tensor]
    places: Tensor


def sample_of(batch: Batch, *, most_scores: int = MOST_SCORES) -> Sample:
    """All queries of users with few enough scores; of others the first, the last, and so many drawn
    at random as there is room for."""
    generator = torch.Generator().manual_seed(batch.workload.seed)
    bounds = packed_bounds(batch)[0].tolist()
    rows, places = [], []
    for user, length in enumerate(batch.lengths.tolist()):
        queries = bounds[user + 1] - bounds[user]
        room = most_scores // max(1, length * batch.workload.heads)
        if queries <= max(room, 2):
            chosen = torch.arange(queries)
        else:
            drawn = torch.randperm(queries - 2, generator=generator)[: max(room - 2, 0)] + 1
            chosen = torch.cat([torch.tensor([0, queries - 1]), drawn]).sort().values
        rows.append(chosen.to(batch.device))
        places.append(rows[-1] + bounds[user])
    return Sample(rows, torch.cat(places))


def for_the_check(batch: Batch, sample: Sample) -> Batch:
    """The batch with a gradient of the output at the sample alone."""
    if len(sample.places) == len(packed_queries(batch, batch.dout)):
        return batch
    kept = torch.zeros_like(batch.dout)
    packed_queries(batch, kept)[sample.places] = packed_queries(batch, batch.dout)[sample.places]
    return replace(batch, dout=kept)


def reference(
    batch: Batch,
    sample: Sample,
    pattern: Pattern | None,
    lists: KeyLists | None = None,
) -> Reference:
    """softmax(q k^T / sqrt(D)) v over the keys that the sampled queries see, and gradients.

    Args:
        batch: with a gradient of the output at the sample alone.
        pattern: None for all keys (up to its own, of a causal batch).
        lists: of retrieval, whose blocks follow from the numbers.

    Returns:
        out and dq [queries, H, D] of packed queries, zero where there is no sample; dk, dv.
    """
    like = [packed_queries(batch, batch.q)] * 2 + [batch.k, batch.v]
    outputs = [torch.zeros_like(x, dtype=torch.float32) for x in like]
    for user in range(len(batch.lengths)):
        if len(sample.rows[user]) and int(batch.lengths[user]):
            found = _attend(batch, user, sample.rows[user], pattern, lists, torch.float32)
            for output, (where, values) in zip(outputs, found, strict=True):
                output[where] = values
    return Reference(*outputs)


def errors_of(got: Sequence[Tensor], expected: Reference, sample: Sample, *, width: int) -> Errors:
    """Of a provider's output (at the sample) and gradients; `width`: how many of them it has."""
    out, *gradients = got
    pairs = [(out.flatten(0, -3)[sample.places], expected.out[sample.places])]
    wanted = (expected.dq, expected.dk, expected.dv)
    pairs += [(x.flatten(0, -3), y) for x, y in zip(gradients, wanted, strict=False)]
    assert len(pairs) == width
    return compare(pairs)


def regret_of(batch: Batch, pattern: Retrieved, lists: KeyLists) -> float:
    """How much worse the blocks retrieved fit than the best, by mean keys and mean queries in
    float32: 0 is none, 1 is that of blocks taken at random."""
    bounds, block = packed_bounds(batch)[0].tolist(), pattern.block
    q = packed_queries(batch, batch.q).float()
    lost = spread = 0.0
    for user, (begin, end) in enumerate(pairwise(batch.offsets.tolist())):
        mine = q[bounds[user] : bounds[user + 1]].split(block)
        keys = batch.k[begin:end].float().split(block)
        older = len(keys) - pattern.newest
        if older <= pattern.top_k or not mine:
            continue
        queries, means = (torch.stack([x.mean(0).flatten() for x in of]) for of in (mine, keys))
        scores = (queries @ means.T)[:, :older]  # [tiles, blocks]
        first = bounds[user] // block + user
        listed = blocks_listed(lists, first, range(len(mine)), len(keys))[0, :, :older]
        best = scores.topk(pattern.top_k, dim=1).values.sum(1)
        lost += float((best - (scores * listed).sum(1)).sum())
        spread += float((best - pattern.top_k * scores.mean(1)).sum())
    return lost / spread if spread else 0.0


def tolerance(
    batch: Batch, sample: Sample, pattern: Pattern | None, lists: KeyLists | None = None
) -> float:
    """As `jagged_ranking.measure.reference.tolerance`, under the mask."""

    def attend(user: int, dtype: torch.dtype) -> list[Tensor]:
        parts = _attend(batch, user, sample.rows[user], pattern, lists, dtype)
        return [part for _, part in parts]

    return tolerance_of(batch, attend)


def _attend(
    batch: Batch,
    user: int,
    rows: Tensor,
    pattern: Pattern | None,
    lists: KeyLists | None,
    dtype: torch.dtype,
) -> list[tuple[Tensor | slice, Tensor]]:
    """(index into packed queries or keys, values) of out, dq, dk and dv of one user."""
    bounds = packed_bounds(batch)[0]
    begin, end = int(batch.offsets[user]), int(batch.offsets[user + 1])
    places, mine = rows + bounds[user], slice(begin, end)
    hidden = ~_visible(batch, user, rows, end - begin, pattern, lists)
    q = packed_queries(batch, batch.q)[places]
    dout = packed_queries(batch, batch.dout)[places].to(dtype).transpose(0, 1)
    with torch.enable_grad():
        q, k, v = (
            x.detach().to(dtype).transpose(0, 1).requires_grad_()
            for x in (q, batch.k[mine], batch.v[mine])
        )
        logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        nothing = hidden.all(-1, keepdim=True)
        logits = logits.masked_fill(hidden, -math.inf).masked_fill(nothing, 0.0)
        out = logits.softmax(-1).masked_fill(nothing, 0.0) @ v
        grads = torch.autograd.grad(out, (q, k, v), dout)
    found = (x.detach().transpose(0, 1) for x in (out, *grads))
    return list(zip((places, places, mine, mine), found, strict=True))


def _visible(
    batch: Batch,
    user: int,
    rows: Tensor,
    keys: int,
    pattern: Pattern | None,
    lists: KeyLists | None,
) -> Tensor:
    """[H or 1, rows, keys] bool."""
    w = batch.workload
    if isinstance(pattern, Retrieved):
        assert lists is not None
        block, begin, end = pattern.block, *packed_bounds(batch)[0][user : user + 2].tolist()
        tiles = range(-(-(end - begin) // block))
        seen = blocks_listed(lists, begin // block + user, tiles, -(-keys // block))
        seen = seen[:, rows // block].repeat_interleave(block, 2)[:, :, :keys]
        return seen.repeat_interleave(w.heads // lists.groups, 0)
    if pattern is not None:
        return pattern.visible(rows, keys, heads=w.heads, user=user, causal=w.causal)
    key = torch.arange(keys, device=rows.device)
    everything = key <= rows[:, None] if w.causal else torch.ones_like(rows[:, None] + key).bool()
    return everything[None]
