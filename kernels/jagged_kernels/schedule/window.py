"""`causal` and `window` of a call as one band."""

from __future__ import annotations

from operator import index
from typing import Literal

from jagged_kernels.schedule.row_layout import NO_LIMIT

# No history is so long. A window's side from here on is no limit: kernels add the sides to token
# numbers, and to each other, in int32.
WIDEST_SIDE = 2**29
NO_BAND = (NO_LIMIT, NO_LIMIT)
# No limit to a query's keys, one on one side, or one on both.
Mask = Literal["none", "causal", "window"]
MASKS: tuple[Mask, ...] = ("none", "causal", "window")


def resolve_window(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    """`causal` and `window` as one (left, right) band, -1 for no limit.

    Raises:
        TypeError: `window` is not two integers.
        ValueError: a side below -1.
    """
    left, right = (NO_LIMIT, NO_LIMIT) if window is None else _two_integers(window)
    if left < NO_LIMIT or right < NO_LIMIT:
        raise ValueError(f"window must be (left, right) of -1 or more, got {window}")
    return limit_of(left), (0 if causal else limit_of(right))


def mask_of(left: int, right: int) -> Mask:
    """Of a call with these limits."""
    return MASKS[(left != NO_LIMIT) + (right != NO_LIMIT)]


def _two_integers(window: tuple[int, int]) -> tuple[int, int]:
    try:
        left, right = window
        return index(left), index(right)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"window must be (left, right), two integers, got {window!r}")


def limit_of(side: int) -> int:
    return NO_LIMIT if side >= WIDEST_SIDE else side
