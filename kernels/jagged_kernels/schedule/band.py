"""The band of a call, of `causal` and `window` or of what it takes for `keys`; and their lists."""

from __future__ import annotations

from operator import index

from torch import Tensor

from jagged_kernels.core.contents import checking
from jagged_kernels.schedule.keys.blocks import tile_count
from jagged_kernels.schedule.keys.build import build_lists
from jagged_kernels.schedule.keys.check import check_lists
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.rules import KeyRule, RequestKeys, SemiLocalKeys, StridedKeys
from jagged_kernels.schedule.row_layout import NO_LIMIT

# No history is so long. A window's side from here on is no limit: kernels add the sides to token
# numbers, and to each other, in int32.
WIDEST_SIDE = 2**29
NO_BAND = (NO_LIMIT, NO_LIMIT)
_RULES = (StridedKeys, SemiLocalKeys, RequestKeys)


def resolve_window(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    """`causal` and `window` as one (left, right) band, -1 for no limit.

    Raises:
        TypeError: `window` is not two integers.
        ValueError: a side below -1.
    """
    left, right = (NO_LIMIT, NO_LIMIT) if window is None else _two_integers(window)
    if left < NO_LIMIT or right < NO_LIMIT:
        raise ValueError(f"window must be (left, right) of -1 or more, got {window}")
    return _limit(left), (0 if causal else _limit(right))


def _two_integers(window: tuple[int, int]) -> tuple[int, int]:
    try:
        left, right = window
        return index(left), index(right)
    except (TypeError, ValueError):
        pass
    raise TypeError(f"window must be (left, right), two integers, got {window!r}")


def _limit(side: int) -> int:
    return NO_LIMIT if side >= WIDEST_SIDE else side


def band_of(
    keys: KeyRule | KeyLists | None, causal: bool, window: tuple[int, int] | None
) -> tuple[int, int]:
    """The (left, right) band of a call; where `keys` is a rule, what its tokens' mask takes so.

    Raises:
        TypeError: as `resolve_window`, or `keys` is neither.
        ValueError: as `resolve_window`, or `keys` says another band than the call.
    """
    band = resolve_window(causal, window)
    if keys is None:
        return band
    if isinstance(keys, KeyLists):
        if keys.rule is None:
            if (causal or window is not None) and band != keys.window:
                raise ValueError(
                    f"the lists were made for the window {keys.window}, and the call has {band}"
                )
            return keys.window
        left = keys.rule.left
    elif isinstance(keys, _RULES):
        left = _left_of(keys)
    else:
        raise TypeError(f"keys must be a rule or KeyLists, got {type(keys).__name__}")
    if window is not None:
        raise ValueError("keys say which tokens are visible: leave out window")
    return left, 0


def _left_of(rule: KeyRule) -> int:
    if isinstance(rule, SemiLocalKeys):
        return _limit(rule.window - 1)
    if isinstance(rule, RequestKeys) and rule.window is not None:
        return _limit(rule.window)
    return NO_LIMIT


def lists_of(
    keys: KeyRule | KeyLists | None,
    q_offsets: Tensor,
    k_offsets: Tensor,
    tokens: tuple[int, int],
    heads: int,
    longest: int | None = None,
) -> KeyLists | None:
    """The lists that `keys` are or give; tokens of (queries, keys).

    Raises:
        TypeError, ValueError: as `build_lists`, or given lists are of another batch, as far as
            their shapes say (with JAGGED_CHECK=1 their contents).
    """
    if keys is None:
        return None
    if isinstance(keys, KeyLists):
        _check_given(keys, q_offsets, k_offsets, tokens)
        return keys
    if not isinstance(keys, _RULES):
        raise TypeError(f"keys must be a rule or KeyLists, got {type(keys).__name__}")
    return build_lists(
        keys, q_offsets, k_offsets,
        q_tokens=tokens[0], k_tokens=tokens[1], heads=heads, longest=longest,
    )  # fmt: skip


def _check_given(
    lists: KeyLists, q_offsets: Tensor, k_offsets: Tensor, tokens: tuple[int, int]
) -> None:
    sides = ((lists.row_ptr, q_offsets, tokens[0]), (lists.row_ptr_t, k_offsets, tokens[1]))
    for row_ptr, offsets, count in sides:
        entries = tile_count(count, offsets.shape[0] - 1, lists.block) * lists.groups
        if row_ptr.shape[0] != entries + 1:
            raise ValueError(
                f"lists of another batch: they are of {row_ptr.shape[0] - 1} entries, and these "
                f"offsets have {entries}"
            )
        if row_ptr.device != offsets.device:
            raise ValueError(f"the lists are on {row_ptr.device}, and offsets on {offsets.device}")
    if checking():
        check_lists(lists, q_offsets, k_offsets, q_tokens=tokens[0], k_tokens=tokens[1])


def check_groups(lists: KeyLists, heads: int) -> None:
    if heads % lists.groups:
        raise ValueError(
            f"the lists are of {lists.groups} groups of heads, and q has {heads} heads"
        )


def tile_of_lists(lists: KeyLists, tiles: tuple[int | None, int | None], split: str) -> int:
    """Tokens of a tile, of queries and keys alike.

    Raises:
        ValueError: others are asked for, or that rows are cut.
    """
    if any(tile not in (None, lists.block) for tile in tiles):
        raise ValueError(f"with keys a tile is a block of {lists.block} tokens, got {tiles}")
    if split not in ("auto", "rows"):
        raise ValueError(f"with keys split must be auto or rows, got {split!r}")
    return lists.block
