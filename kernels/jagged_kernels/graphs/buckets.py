"""Buckets: the few sizes that batches are brought to, so that one captured graph serves many.

A size is rounded up to a power of two or one of the even steps between two of them. What a batch
then has too much is made of *padding users*: the tokens behind its own are theirs. So a padded
batch is a batch like any other: offsets end at the number of tokens, every token has a user, every
kernel writes every row, and whatever can be checked of a batch holds. Had they no user, kernels
would leave their rows as the allocator gave them, and 0 * NaN would reach the weights.

Padding users have as many tokens as users of the bucket have on average, at the least. That costs
in attention no more than the same share of real users, it leaves the average as it was, by which
kernels are chosen, and no padding user is longer than the longest real one: what is indexed by the
place in a history has room for it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from jagged_kernels.core.sizes import cdiv, power_of_two

# No size is smaller: its steps are whole numbers, and no kernel is launched over nothing.
LEAST = 16
MOST_PER_OCTAVE = LEAST


class Bucket(NamedTuple):
    """The sizes of a padded batch.

    Fields:
        users: B, padding users among them.
        tokens: of each group of jagged tensors that share offsets.
        reach: likewise, tokens that a padding user has at most.
    """

    users: int
    tokens: tuple[int, ...]
    reach: tuple[int, ...]


@lru_cache(4096)
def bucket_of(users: int, tokens: tuple[int, ...], per_octave: int) -> Bucket:
    """The bucket of a batch.

    Args:
        users: of the batch.
        tokens: of each group.
        per_octave: sizes from one power of two to the next, itself a power of two up to
            `MOST_PER_OCTAVE`: a size has at most 1 / per_octave more than the batch, from `LEAST`
            on.
    """
    most_users = round_up(users, per_octave)
    sizes = tuple(round_up(size, per_octave) for size in tokens)
    reach, padding = [], 1
    for size in sizes:
        # A batch of this bucket has more tokens than `below` and no more users than `most_users`:
        # so its users have more than `below / most_users` on average.
        below = _next_below(size, per_octave)
        reach.append(max(1, below // most_users))
        padding = max(padding, cdiv(size - below, reach[-1]))
    return Bucket(most_users + padding, sizes, tuple(reach))


def round_up(size: int, per_octave: int) -> int:
    """The least of the sizes that there are which is not below `size`: with 4 an octave, of 17 it
    is 20, of 1025 it is 1280."""
    if size <= LEAST:
        return LEAST
    step = power_of_two(size) // 2 // per_octave
    return cdiv(size, step) * step


def _next_below(size: int, per_octave: int) -> int:
    """The largest of the sizes that there are below one of them; 0 below the least."""
    return 0 if size == LEAST else size - power_of_two(size) // 2 // per_octave
