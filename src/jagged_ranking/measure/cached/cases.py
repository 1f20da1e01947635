"""The batches that cached and shared keys are measured on, as lists of cases."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jagged_ranking.measure import length_distributions as draw
from jagged_ranking.measure.cached.cached_ops import APPEND, DECODE, PREFIX, SCORING


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation on one batch of users.

    Args:
        op: what is measured: DECODE, APPEND, PREFIX or SCORING.
        name: what tables and figures call the batch.
        group: along which sweep it lies: "history", "users", "prefix" or "scoring".
        users: B.
        history: events of the user with most; the others lognormal around a quarter of that.
        queries: new events of the user with most, each of which asks; the others have 1 or more.
            Of PREFIX and SCORING every event asks.
        prefix: of PREFIX: keys that all users share.
        kept: of SCORING: events of a user that are to be kept.
        recent: of SCORING: queries of a user that count, the last ones.
        heads, head_dim: of queries, keys and values.
        page_size: events that lie together in the cache.
        seed: of all lengths and values.
    """

    op: str
    name: str
    group: str
    users: int
    history: int
    queries: int = 1
    prefix: int = 0
    kept: int = 0
    recent: int = 400
    heads: int
    head_dim: int
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    def lengths(self) -> Tensor:
        """[B] int64 on the CPU: events of each user, the new ones among them. Of SCORING all have
        as many."""
        if self.op == SCORING:
            return torch.full((self.users,), self.history, dtype=torch.int64)
        generator = torch.Generator().manual_seed(self.seed)
        return draw.lognormal(self.users, self.history, self.history / 4, generator)

    def new(self) -> Tensor:
        """[B] int64 on the CPU: new events of each user, no more than it has."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        count = torch.randint(1, self.queries + 1, (self.users,), generator=generator)
        count[0] = self.queries
        return count.minimum(self.lengths())

    def facts(self) -> dict[str, Any]:
        """What a results row says of the batch."""
        tokens = int(self.lengths().sum())
        asked = int(self.new().sum()) if self.op in (DECODE, APPEND) else tokens
        return {
            "B": self.users,
            "H": self.heads,
            "D": self.head_dim,
            "queries": asked,
            "most_queries": self.queries,
            "max_len": self.history,
            "tokens": tokens,
            "waste": 1.0 - tokens / (self.users * self.history),
            "prefix": self.prefix,
            "kept": self.kept,
            "recent": self.recent,
            "page_size": self.page_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "seed": self.seed,
            "group": self.group,
        }


def decoding_sweeps(
    histories: Sequence[int], users: Sequence[int], *, at_users: int, at_history: int, **shape: Any
) -> list[Case]:
    """Queries of a cache and its growth: over the longest history with `at_users`, and over users
    with histories of up to `at_history`."""
    points = [("history", at_users, history) for history in histories]
    points += [("users", count, at_history) for count in users]
    return [
        Case(
            op=op,
            name=f"{count} x {history}, by {group}",
            group=group,
            users=count,
            history=history,
            **shape,
        )
        for op in (DECODE, APPEND)
        for group, count, history in points
    ]


def prefix_sweep(prefixes: Sequence[int], *, users: int, history: int, **shape: Any) -> list[Case]:
    """Longer and longer prefixes in front of the same histories."""
    return [
        Case(
            op=PREFIX,
            name=f"prefix {prefix}",
            group="prefix",
            users=users,
            history=history,
            prefix=prefix,
            **shape,
        )
        for prefix in prefixes
    ]


def scoring_sweep(
    histories: Sequence[int], *, users: int, kept: float, recent: int, **shape: Any
) -> list[Case]:
    """Histories of which a share is to be kept: which events, by what the last queries say?"""
    return [
        Case(
            op=SCORING,
            name=f"{round(kept * history)} of {history}",
            group="scoring",
            users=users,
            history=history,
            kept=round(kept * history),
            recent=recent,
            **shape,
        )
        for history in histories
    ]
