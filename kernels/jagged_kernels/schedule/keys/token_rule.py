"""`TokenRule`: which token sees which, inside of the blocks of a list.

The specification in PyTorch; `triton_token_rule` is its twin in kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jagged_kernels.schedule.row_layout import NO_LIMIT


class TokenRule(NamedTuple):
    """A causal mask, as kernels get it.

    Attributes:
        left: tokens before a query that it sees, -1 for all.
        first: tokens of the user that every later one sees, whatever `left` says.
        targets: [B] int32, a user's last tokens that no other token sees; None for none.
        contexts: [B] int32, a user's first tokens that see all others but targets; None for none.
    """

    left: int
    first: int
    targets: Tensor | None
    contexts: Tensor | None

    def of_user(self, user: int) -> tuple[int, int, int, int]:
        """(left, first, targets, contexts) of one user, as `token_visible` takes them. Waits."""
        targets, contexts = (0 if x is None else int(x[user]) for x in self[2:])
        return self.left, self.first, targets, contexts


def token_visible(
    i: Tensor,
    j: Tensor,
    length: int | Tensor,
    left: int,
    first: int,
    targets: int | Tensor,
    contexts: int | Tensor,
) -> Tensor:
    """Whether the query at place i sees key j; any shapes that broadcast.

    Targets stand all at one place, behind the history, and contexts all at the place of the last
    of them: distances count from there. A token sees itself, and those before it that are no
    farther than `left`, or are among the `first`; a context also every token that is no target.
    HSTU's mask (arXiv 2402.17152, and `max_attn_len`, `num_targets` and `contextual_seq_len` of
    github.com/facebookresearch/generative-recommenders), ULTRA-HSTU's semi-local one.

    Args:
        i, j: places among the user's keys, from 0; the last query stands at the last key.
        length: the user's keys.
        left, first: of `TokenRule`; targets, contexts: the user's. They are cut to the tokens that
            there are, contexts to those that are no targets.
    """
    length, targets, contexts = map(torch.as_tensor, (length, targets, contexts))
    history = (length - targets.clamp(min=0)).clamp(min=0)
    contexts = torch.minimum(contexts.clamp(min=0), history)
    last_context = (contexts - 1).clamp(min=0)

    def place(token: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(token, last_context), history)

    distance = place(i) - place(j)
    near = (distance > 0) & ((distance <= left) | (j < first))
    if left == NO_LIMIT:
        near = distance > 0
    seen = (i == j) | near | ((i < contexts) & (j < history))
    return seen & (j >= 0) & (j < length) & (i >= 0)
