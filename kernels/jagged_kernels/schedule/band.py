"""The band of a call, of `causal` and `window` or of what it takes for `keys`; and their lists."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.core.contents import checking
from jagged_kernels.schedule.keys.build import build_lists
from jagged_kernels.schedule.keys.check import check_entries, check_lists
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.pairs import Batch
from jagged_kernels.schedule.keys.rules import KeyRule, RequestKeys, SemiLocalKeys, StridedKeys
from jagged_kernels.schedule.offsets import compare_offsets
from jagged_kernels.schedule.row_layout import NO_LIMIT
from jagged_kernels.schedule.window import limit_of, resolve_window

_RULES = (StridedKeys, SemiLocalKeys, RequestKeys)


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
        return limit_of(rule.window - 1)
    if isinstance(rule, RequestKeys) and rule.window is not None:
        return limit_of(rule.window)
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
            their shapes and offsets say (with JAGGED_CHECK=1 their contents). A GPU compares other
            offsets than theirs for itself, once for each, and stops where they differ.
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
    batch = Batch(q_offsets, k_offsets, *tokens, lists.block, lists.groups)
    check_entries(lists, batch)
    if lists.row_ptr.device != q_offsets.device:
        raise ValueError(
            f"the lists are on {lists.row_ptr.device}, and offsets on {q_offsets.device}"
        )
    if torch.compiler.is_compiling():  # nothing in a trace has contents, nor a version
        return
    sides = (("q", lists.q_offsets, q_offsets), ("k", lists.k_offsets, k_offsets))
    for name, built, given in sides:
        if built is not None:
            compare_offsets(name, built, given, lists.compared, "the list of keys")
    if checking():
        check_lists(lists, q_offsets, k_offsets, q_tokens=tokens[0], k_tokens=tokens[1])


def check_groups(keys: KeyRule | KeyLists, lists: KeyLists, heads: int) -> None:
    """Whether lists made for `keys` are for so many heads."""
    if isinstance(keys, StridedKeys) and lists.groups != heads:
        raise ValueError(
            f"the schedule was built for q of {lists.groups} heads, each of which has keys of its "
            f"own, and q has {heads} heads"
        )
    if heads % lists.groups:
        raise ValueError(
            f"the lists are of {lists.groups} groups of heads, and q has {heads} heads"
        )
