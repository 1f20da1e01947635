"""`build_lists`: lists of blocks from a rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.backends import triton_runs
from jagged_kernels.core.contents import can_be_read, demand_equal, readable
from jagged_kernels.core.operators import call, define_op
from jagged_kernels.core.sizes import as_int, cdiv
from jagged_kernels.schedule.keys.blocks import tile_count
from jagged_kernels.schedule.keys.capacity import most_entries
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.native import native_lists
from jagged_kernels.schedule.keys.rules import KeyRule, RequestKeys, SemiLocalKeys, StridedKeys


def build_lists(
    rule: KeyRule,
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    q_tokens: int,
    k_tokens: int,
    heads: int,
    longest: int | None = None,
) -> KeyLists:
    """The blocks that a rule shows each user, in a few launches.

    Args:
        q_offsets, k_offsets: [B + 1], int32 or int64. For rules of self-attention (all but
            `SemiLocalKeys`) both are the same.
        q_tokens, k_tokens: what they end at.
        heads: of queries.
        longest: tokens of the longest user or more, from which follows how many blocks are made
            room for; of a longer user only the blocks that hold the first so many are listed.
            None: read from the offsets, which waits once for a GPU.

    Raises:
        TypeError: `rule` is none.
        ValueError: queries with other offsets than keys, counts of other users or on another
            device; what a CPU (or JAGGED_CHECK=1) shows: a user longer than `longest`, or shorter
            than its targets and contexts (unless it is empty; elsewhere both are cut); `longest`
            is None where offsets cannot be read; more than 2^31 blocks.
    """
    if not isinstance(rule, KeyRule):
        raise TypeError(f"keys must be a rule (StridedKeys and others), got {type(rule).__name__}")
    heads, users, given = as_int("heads", heads), q_offsets.shape[0] - 1, (q_offsets, k_offsets)
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    aligned = q_offsets is k_offsets
    if not (aligned or isinstance(rule, SemiLocalKeys)):
        _demand_self(rule, q_offsets, k_offsets, q_tokens, k_tokens)
        q_offsets, aligned = k_offsets, True
    if isinstance(rule, RequestKeys):
        _check_counts(rule, k_offsets)
    longest = longest_user(q_offsets, k_offsets, longest)
    block, most = rule.block, cdiv(longest, rule.block)
    if isinstance(rule, StridedKeys):
        groups, token_rule, band = heads, None, (-1, 0)
        numbers = (*rule.numbers(heads), *band)
        counts = (None, None)
    else:
        groups, token_rule = 1, rule.token_rule(users, k_offsets.device)
        numbers, band = (0, 0, 0, 0, *token_rule[:2]), (-1, -1)
        counts = token_rule[2:]
    tiles, blocks = (tile_count(tokens, users, block) for tokens in (q_tokens, k_tokens))
    capacity = most_entries(
        rule, tiles=tiles, blocks=blocks, groups=groups, most=most, aligned=aligned
    )
    tables = call(
        key_lists, q_offsets, k_offsets, *counts, q_tokens, k_tokens,
        block, groups, most, capacity, *numbers,
    )  # fmt: skip
    return KeyLists(
        *tables, block=block, groups=groups, rule=token_rule, window=band,
        q_offsets=given[0], k_offsets=given[1],
    )  # fmt: skip


def _demand_self(
    rule: KeyRule, q_offsets: Tensor, k_offsets: Tensor, q_tokens: int, k_tokens: int
) -> None:
    what = f"{type(rule).__name__} is for self-attention, and q has other offsets than k"
    if q_offsets.shape != k_offsets.shape or q_tokens != k_tokens:
        raise ValueError(what)
    demand_equal(q_offsets, k_offsets, what, ("q", "k"))


def _check_counts(rule: RequestKeys, offsets: Tensor) -> None:
    """Whether targets and contexts are of these users, and fit them as far as is known."""
    users = offsets.shape[0] - 1
    for name, count in (("targets", rule.targets), ("contexts", rule.contexts)):
        if isinstance(count, Tensor):
            if count.shape[0] != users:
                raise ValueError(f"{name} must be of {users} users, got {count.shape[0]}")
            if count.device != offsets.device:
                raise ValueError(f"{name} must be on {offsets.device}, got {count.device}")
            if readable(count) and users and int(count.min()) < 0:
                raise ValueError(f"{name} must be at least 0, got {int(count.min())}")
    if not readable(offsets):  # nor are they added up: that would be launches for nothing
        return
    needed = sum(count for count in (rule.targets, rule.contexts) if count is not None)
    if isinstance(needed, Tensor) and not readable(needed):
        return
    lengths = offsets.diff()
    short = ((lengths > 0) & (lengths < needed)).nonzero()
    if len(short):
        user = int(short[0])
        wanted = int(needed[user]) if isinstance(needed, Tensor) else needed
        raise ValueError(
            f"user {user} has {int(lengths[user])} tokens, fewer than its {wanted} targets and "
            "contexts"
        )


def longest_user(q_offsets: Tensor, k_offsets: Tensor, told: int | None) -> int:
    """Tokens of the longest user, or what the caller said."""
    sides = [k_offsets] if q_offsets is k_offsets else [q_offsets, k_offsets]
    if told is not None:
        told = as_int("longest", told)
        if told < 0:
            raise ValueError(f"longest must be at least 0, got {told}")
        if not all(map(readable, sides)):
            return told
    elif not all(map(can_be_read, sides)):
        raise ValueError(
            "without longest, offsets are read for the longest user, and here (in a trace, or on "
            "meta) they cannot be: pass longest=; for keys= of attention, build "
            "attention_schedule(q, k, keys=..., longest=...) and pass it as schedule="
        )
    if q_offsets.shape[0] == 1:
        return 0
    longest = int(torch.stack([x.diff().max() for x in sides]).max())
    if told is not None and longest > told:
        raise ValueError(f"longest is {told}, but a user has {longest} tokens")
    return longest if told is None else told


def _key_lists(
    q_offsets: Tensor,
    k_offsets: Tensor,
    targets: Tensor | None,
    contexts: Tensor | None,
    q_tokens: int,
    k_tokens: int,
    block: int,
    groups: int,
    most: int,
    capacity: int,
    stride: int,
    local: int,
    step: int,
    offset: int,
    left: int,
    first: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row_ptr, col, row_ptr_t, col_t) of `KeyLists`.

    Args:
        targets, contexts, left, first: of a `TokenRule`.
        most: blocks of a user; what is beyond is not listed.
        capacity: of `col` and `col_t`.
        stride, local, step, offset: of `StridedKeys`; a stride of 0 for a `TokenRule`.
    """
    if triton_runs(q_offsets):
        from jagged_kernels.schedule.keys.triton_lists import launch_lists

        make = launch_lists
    else:
        make = native_lists
    return make(
        q_offsets,
        k_offsets,
        targets,
        contexts,
        q_tokens=q_tokens,
        k_tokens=k_tokens,
        block=block,
        groups=groups,
        most=most,
        capacity=capacity,
        strided=(stride, local, step, offset) if stride else None,
        band=(left, first),
    )


def _empty_lists(
    q_offsets: Tensor, k_offsets: Tensor, targets: Tensor | None, contexts: Tensor | None,
    q_tokens: int, k_tokens: int, block: int, groups: int, most: int, capacity: int, *numbers: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def empty(count: int) -> Tensor:
        return q_offsets.new_empty(count, dtype=torch.int32)

    users = q_offsets.shape[0] - 1
    entries, entries_t = (
        tile_count(tokens, users, block) * groups + 1 for tokens in (q_tokens, k_tokens)
    )
    return empty(entries), empty(capacity), empty(entries_t), empty(capacity)


key_lists = define_op(_key_lists, fake=_empty_lists)
