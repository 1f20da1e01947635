"""Users in the order of their groups: what sums over a group of users walk along."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import cdiv, integer_dtype

# Users, and groups, that a program takes; it sums up the users before them, too.
_USERS = 2048
# Up to so many, a program a group finds its users among all: one launch in place of a sort's ten.
FEW_USERS, FEW_GROUPS = 2**14, 256


class Segments(NamedTuple):
    """Users in an order in which those of a group are neighbours. Without groups, as they are."""

    offsets: Tensor  # [B + 1], of the tokens in this order
    starts: Tensor  # [B] or more, the first token of the user at each place
    group: Tensor | None = None  # [B], the group of the user at each place
    bounds: Tensor | None = None  # [groups + 1], the places of each group


def segments_of(offsets: Tensor, groups: Tensor | None, count: int) -> Segments:
    """Of contiguous `offsets` of one user or more.

    Args:
        groups: [B] integers from 0 to `count` - 1; None where each user is a segment.
    """
    if groups is None:
        return Segments(offsets, offsets)
    users = groups.shape[0]
    places, starts = offsets.new_empty(users + 1), offsets.new_empty(users)
    bounds = offsets.new_empty(count + 1)
    if users <= FEW_USERS and count <= FEW_GROUPS:
        group = groups.new_empty(users)
        launch(
            _few_groups_kernel, count,
            (places, starts, group, bounds, offsets, groups.contiguous(), users),
            {"USERS": _USERS}, num_warps=8,
        )  # fmt: skip
        return Segments(places, starts, group, bounds)
    group, order = groups.to(integer_dtype(count)).sort(stable=True)
    launch(
        _segments_kernel, cdiv(max(users, count + 1), _USERS),
        (places, starts, bounds, offsets, order, group, users, count), {"USERS": _USERS},
        num_warps=8,
    )  # fmt: skip
    return Segments(places, starts, group, bounds)


@triton.jit(do_not_specialize=["users"])
def _few_groups_kernel(
    places_ptr, starts_ptr, group_ptr, bounds_ptr, offsets_ptr, groups_ptr, users,
    USERS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    users_below = tl.zeros([USERS], tl.int32)
    tokens_below = tl.zeros([USERS], tl.int32)
    for first in range(0, users, USERS):
        user = first + tl.arange(0, USERS)
        _, length = _users_at(offsets_ptr, None, user, users)
        is_below = tl.load(groups_ptr + user, mask=user < users, other=0) < group
        is_below &= user < users
        users_below += is_below.to(tl.int32)
        tokens_below += tl.where(is_below, length, 0)
    place, token = tl.sum(users_below, 0), tl.sum(tokens_below, 0)
    tl.store(bounds_ptr + group, place)
    tl.store(bounds_ptr + group + 1, users, mask=group == tl.num_programs(0) - 1)
    tl.store(places_ptr, 0, mask=group == 0)
    for first in range(0, users, USERS):
        user = first + tl.arange(0, USERS)
        start, length = _users_at(offsets_ptr, None, user, users)
        is_mine = tl.load(groups_ptr + user, mask=user < users, other=0) == group
        is_mine &= user < users
        count, length = is_mine.to(tl.int32), tl.where(is_mine, length, 0)
        behind = place + tl.cumsum(count, 0)
        tl.store(starts_ptr + behind - 1, start, mask=is_mine)
        tl.store(group_ptr + behind - 1, group, mask=is_mine)
        tl.store(places_ptr + behind, token + tl.cumsum(length, 0), mask=is_mine)
        place += tl.sum(count, 0)
        token += tl.sum(length, 0)


@triton.jit(do_not_specialize=["users", "count"])
def _segments_kernel(
    places_ptr, starts_ptr, bounds_ptr, offsets_ptr, order_ptr, group_ptr, users, count,
    USERS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * USERS
    before = tl.zeros([USERS], tl.int32)
    for other in range(0, tl.minimum(first, users), USERS):
        _, length = _users_at(offsets_ptr, order_ptr, other + tl.arange(0, USERS), users)
        before += length
    place = first + tl.arange(0, USERS)
    start, length = _users_at(offsets_ptr, order_ptr, place, users)
    end = tl.sum(before, 0) + tl.cumsum(length, 0)
    tl.store(starts_ptr + place, start, mask=place < users)
    tl.store(places_ptr + place, end - length, mask=place < users)
    tl.store(places_ptr + place + 1, end, mask=place == users - 1)
    # A group begins behind those below it.
    below, left = place * 0, users
    while left > 1:
        half = left // 2
        is_below = tl.load(group_ptr + below + half - 1) < place
        below += tl.where(is_below, half, 0)
        left -= half
    below += (tl.load(group_ptr + below) < place).to(tl.int32)
    tl.store(bounds_ptr + place, below, mask=place <= count)


@triton.jit
def _users_at(offsets_ptr, order_ptr, place, users):
    """(first token, number of tokens as int32) of the users at some places; 0 where nobody is.
    Without an order, places are users."""
    inside = place < users
    user = place
    if order_ptr is not None:
        user = tl.load(order_ptr + place, mask=inside, other=0)
    start = tl.load(offsets_ptr + user, mask=inside, other=0)
    end = tl.load(offsets_ptr + user + 1, mask=inside, other=0)
    return start, (end - start).to(tl.int32)
