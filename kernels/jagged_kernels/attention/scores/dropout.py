"""A dropout mask that is a function of where a probability stands, not of how users are packed."""

from __future__ import annotations

from torch import Tensor

_MASK32 = 0xFFFFFFFF
# So many bits are compared: whole numbers of 24 bits are exact in float32.
_BITS = 24


def keep_mask(
    seed: Tensor,
    user: Tensor | int,
    head: Tensor | int,
    query: Tensor | int,
    key: Tensor | int,
    p: float,
) -> Tensor:
    """True where a probability is kept, with chance 1 - p to within 2^-24; arguments broadcast.

    `seed` is an int64 scalar tensor, `query` and `key` are positions within the user. The same
    (seed, user, head, query, key) gives the same answer on every device and in every backend:
    32-bit hashing, done in int64 because PyTorch has few unsigned operations.
    """
    state = _mix(seed.view(()) & _MASK32)
    for coordinate in (user, head, query, key):
        state = _mix(state ^ coordinate)
    return state >> (32 - _BITS) >= drop_below(p)


def drop_below(p: float) -> int:
    """A probability is dropped where the first 24 bits of its hash are below this number."""
    return round(p * 2**_BITS)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 (Appleby), after a step so that 0 does not stay 0."""
    x = (x + 0x9E3779B9) & _MASK32
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)
