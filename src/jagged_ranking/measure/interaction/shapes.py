"""Problems of operations that move tokens: cat, slice, select, pad; and of ids."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from jagged_kernels import (
    Jagged2Tensor,
    from_padded,
    jagged2_to_padded,
    jagged_cat,
    jagged_embedding,
    jagged_index_select,
    jagged_recent,
    jagged_slice,
    jagged_top_k,
    jagged_unique,
    lengths_to_offsets,
    to_padded,
)
from jagged_kernels.tensors.jagged2 import jagged2_offsets
from jagged_ranking.measure.interaction.catalogue import BEST, RECENT, SQUARE
from jagged_ranking.measure.interaction.layout import SAME, Form, Layout, masked, positions
from jagged_ranking.measure.interaction.problem import Outputs, Peer, Problem, fbgemm

ITEMS, CATEGORIES, HOURS = 100_000, 1000, 50  # sizes of embedding tables


def _cat(b: Layout) -> Problem:
    d = b.columns
    moved = (2 * b.tokens + b.users) * d * b.size

    def call(backend: Any, prefix: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return jagged_cat([prefix, b.jagged(x), b.jagged(y)], backend=backend).values

    def exist() -> Tensor:
        one = torch.ones(b.users, 1, dtype=torch.bool, device=b.device)
        return torch.cat([one, b.exists(), b.exists()], 1)

    return Problem(
        call=call,
        inputs=(b.random(b.users, 1, d), b.random(b.tokens, d), b.random(b.tokens, d)),
        bytes=(2 * moved, 2 * moved),
        peers={
            "padded": Peer(
                lambda *parts: torch.cat(parts, 1),
                (SAME, b.padded(), b.padded()),
                (masked(exist),),
            )
        },
    )


def _part(b: Layout, start: Tensor, length: Tensor, longest: int) -> Peer:
    """The same part of a padded batch: [B, longest, D], of which `length` positions count."""
    place = start[:, None] + torch.arange(longest, device=b.device)
    index = place.clamp(0, b.longest - 1)[..., None].expand(-1, -1, b.columns)
    form = masked(lambda: positions(length, longest))
    return Peer(lambda x: x.gather(1, index), (b.padded(),), (form,))


def _recent(b: Layout) -> Problem:
    row = b.columns * b.size
    length = b.lengths.clamp(max=RECENT)
    kept = int(length.sum())

    def call(backend: Any, x: Tensor) -> Tensor:
        return jagged_recent(b.jagged(x), RECENT, total=kept, backend=backend).values

    return Problem(
        call=call,
        inputs=(b.random(b.tokens, b.columns),),
        bytes=(2 * kept * row, (b.tokens + kept) * row),
        peers={"padded": _part(b, b.lengths - length, length, min(RECENT, b.longest))},
    )


def _slice(b: Layout) -> Problem:
    row = b.columns * b.size
    start, length = b.lengths // 4, b.lengths // 2
    kept = int(length.sum())

    def call(backend: Any, x: Tensor) -> Tensor:
        return jagged_slice(b.jagged(x), start, length, total=kept, backend=backend).values

    return Problem(
        call=call,
        inputs=(b.random(b.tokens, b.columns),),
        bytes=(2 * kept * row, (b.tokens + kept) * row),
        peers={"padded": _part(b, start, length, max(1, b.longest // 2))},
    )


def _index_select(b: Layout) -> Problem:
    row = b.columns * b.size
    users = b.integers(b.users, b.users)
    kept = int(b.lengths[users].sum())

    def call(backend: Any, x: Tensor) -> Tensor:
        return jagged_index_select(b.jagged(x), users, total=kept, backend=backend).values

    selected = masked(lambda: positions(b.lengths[users], b.longest))
    read = int(b.lengths[users.unique()].sum())
    return Problem(
        call=call,
        inputs=(b.random(b.tokens, b.columns),),
        bytes=((read + kept) * row, (b.tokens + kept) * row),
        peers={"padded": Peer(lambda x: x[users], (b.padded(),), (selected,))},
    )


def _top_k(b: Layout) -> Problem:
    k = min(BEST, b.longest)
    best, scores = b.users * k, b.tokens * b.size

    # What users with fewer scores have in their place, -inf, has no error.
    finite = Form(lambda x: x, lambda x: x.clamp(min=0))
    return Problem(
        call=lambda backend, x: jagged_top_k(b.jagged(x), k, backend=backend)[0],
        inputs=(b.distinct(1)[:, 0],),
        outputs=(finite,),
        bytes=(scores + best * (b.size + 8), best * (b.size + 8) + scores),
        peers={"padded": Peer(lambda x: x.topk(k, 1).values, (b.padded(-math.inf),), (finite,))},
    )


def _to_padded(b: Layout) -> Problem:
    token, dense = (n * b.columns * b.size for n in (b.tokens, b.users * b.longest))
    shape = (b.users, b.longest, b.columns)
    user = b.user_of_token()
    place = torch.arange(b.tokens, device=b.device) - b.offsets[user]
    return Problem(
        call=lambda backend, x: to_padded(b.jagged(x), b.longest, backend=backend),
        inputs=(b.random(b.tokens, b.columns),),
        bytes=(token + dense, 2 * token),
        peers={
            "njt": Peer(
                lambda x: torch.nested.to_padded_tensor(x, 0.0, output_size=shape), (b.nested(),)
            ),
            "flat": Peer(lambda x: x.new_zeros(shape).index_put((user, place), x)),
        },
    )


def _from_padded(b: Layout) -> Problem:
    token, dense = (n * b.columns * b.size for n in (b.tokens, b.users * b.longest))
    exists = b.exists()

    def call(backend: Any, x: Tensor) -> Tensor:
        return from_padded(x, offsets=b.offsets, total=b.tokens, backend=backend).values

    return Problem(
        call=call,
        inputs=(b.random(b.users, b.longest, b.columns),),
        bytes=(2 * token, token + dense),
        peers={"flat": Peer(lambda x: x[exists])},
    )


def _padded_scores(b: Layout) -> Problem:
    longest = min(SQUARE, b.longest)
    lengths = b.lengths.clamp(max=longest)
    offsets = lengths_to_offsets(lengths)
    begins = jagged2_offsets(offsets)
    numbers = int(lengths.square().sum())
    dense = b.users * longest**2

    def call(backend: Any, m: Tensor) -> Tensor:
        return jagged2_to_padded(Jagged2Tensor(m, offsets, begins), longest, backend=backend)

    def flat(m: Tensor) -> Tensor:
        return m.new_zeros(b.users, longest, longest).masked_scatter(inside, m)

    exists = positions(lengths, longest)
    inside = exists[:, :, None] & exists[:, None, :]
    return Problem(
        call=call,
        inputs=(b.random(numbers),),
        bytes=((numbers + dense) * b.size, 2 * numbers * b.size),
        peers={
            "flat": Peer(flat),
            "fbgemm_sll": fbgemm(
                b, "jagged2_to_padded_dense", lambda f: Peer(lambda m: f(m, begins, longest, 0.0))
            ),
        },
    )


def _unique(b: Layout) -> Problem:
    ids = b.integers(ITEMS, b.tokens)
    user = b.user_of_token()

    def call(backend: Any, ids: Tensor) -> Outputs:
        unique, counts, inverse = jagged_unique(b.jagged(ids), backend=backend)
        return unique.values, counts, inverse

    def flat(ids: Tensor) -> Outputs:
        keys, inverse, counts = torch.unique(
            user << 32 | ids, return_inverse=True, return_counts=True
        )
        return keys & (2**32 - 1), counts, inverse

    return Problem(
        call=call,
        inputs=(ids,),
        # ids in; at most as many ids and counts out, and where each token is.
        bytes=(4 * b.tokens * 8, 0),
        peers={"flat": Peer(flat)},
    )


def _embedding(b: Layout) -> Problem:
    row = b.columns * b.size
    sizes = (ITEMS, CATEGORIES, HOURS, b.longest)
    user = b.user_of_token()
    place = torch.arange(b.tokens, device=b.device) - b.offsets[user]
    ids = [b.integers(size, b.tokens) for size in sizes[:3]] + [place]
    first = torch.tensor((0, *sizes[:-1]), device=b.device).cumsum(0)
    stacked = torch.stack(ids, 1) + first
    looked_up = sum(int(one.unique().numel()) for one in ids)

    def call(backend: Any, *tables: Tensor) -> Tensor:
        features = [b.jagged(ids[0]), *ids[1:]]
        return jagged_embedding(features, tables, backend=backend).values

    def added(*tables: Tensor) -> Tensor:
        first, *others = (F.embedding(i, t) for i, t in zip(ids, tables, strict=True))
        for other in others:
            first = first + other
        return first

    def bag(table: Tensor) -> Tensor:
        return F.embedding_bag(stacked, table, mode="sum")

    return Problem(
        call=call,
        inputs=tuple(b.random(size, b.columns) for size in sizes),
        bytes=(
            b.tokens * (4 * 8 + row) + looked_up * row,
            b.tokens * (4 * 8 + row) + sum(sizes) * row,
        ),
        peers={"flat": Peer(added), "embedding_bag": Peer(bag, joined=True)},
    )


PROBLEMS = {
    "jagged_cat": _cat,
    "jagged_slice": _slice,
    "jagged_recent": _recent,
    "jagged_index_select": _index_select,
    "jagged_top_k": _top_k,
    "to_padded": _to_padded,
    "from_padded": _from_padded,
    "jagged2_to_padded": _padded_scores,
    "jagged_unique": _unique,
    "jagged_embedding": _embedding,
}
