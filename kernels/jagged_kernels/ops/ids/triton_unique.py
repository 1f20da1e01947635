"""The distinct ids of each user: one sort by user and id, then two passes over what it gives.

The first pass counts, in tiles of sorted keys, those that differ from the one before; the second
adds up the counts of the tiles before its own, so it knows how many distinct keys there are up to
every key. A third, over users, finds where the users' distinct ids begin.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import cdiv, integer_dtype
from jagged_kernels.device.search import search_steps, user_of, user_of_slot

# Sorted keys of a tile, and tiles that are added up at a time.
TILE, TILES = 1024, 1024
# Tokens a program that makes keys, ids that one looks at at a time, and such programs at most.
KEY_BLOCK, RANGE_BLOCK, _RANGE_PROGRAMS = 1024, 4096, 264
_USERS = 256


def launch_range(values: Tensor) -> tuple[int, int]:
    """The lowest and the highest of ids [T], T > 0. Waits for the device."""
    values, tokens = values.contiguous(), values.shape[0]
    programs = min(cdiv(tokens, RANGE_BLOCK), _RANGE_PROGRAMS)
    ends = values.new_empty(2 * programs)
    launch(
        _range_kernel, programs, (ends, values, tokens, programs), {"BLOCK": RANGE_BLOCK},
        num_warps=8,
    )  # fmt: skip
    found = ends.tolist()
    return min(found), max(found)


def launch_unique(
    values: Tensor, offsets: Tensor, lowest: int, bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(unique [U], its offsets [B + 1], counts [U], inverse [T]) of ids from `lowest` on that
    differ in the last `bits` bits. Waits for the device, once. T > 0."""
    tokens, users = values.shape[0], offsets.shape[0] - 1
    values = values.contiguous()
    keys = offsets.new_empty(tokens, dtype=integer_dtype(users << bits))
    launch(
        _unique_keys_kernel, cdiv(tokens, KEY_BLOCK),
        (keys, values, offsets, lowest, bits, tokens, users, search_steps(users)),
        {"BLOCK": KEY_BLOCK},
    )  # fmt: skip
    keys, order = keys.sort()
    tiles = cdiv(tokens, TILE)
    firsts = keys.new_empty((2, tiles), dtype=torch.int32)
    launch(_firsts_kernel, tiles, (keys, firsts, tokens, tiles), {"TILE": TILE}, num_warps=8)
    unique, inverse = values.new_empty(tokens), torch.empty_like(order)
    counts, begins = torch.empty_like(order), torch.empty_like(offsets)
    launch(
        _places_kernel, tiles,
        (keys, order, firsts, unique, counts, inverse, lowest, bits, tokens, tiles),
        {"TILE": TILE, "TILES": TILES}, num_warps=8,
    )  # fmt: skip
    launch(
        _begins_kernel, cdiv(users + 1, _USERS), (begins, order, inverse, offsets, users),
        {"USERS": _USERS},
    )  # fmt: skip
    distinct = int(begins[-1])  # waits
    return unique.resize_(distinct), begins, counts.resize_(distinct), inverse


@triton.jit(do_not_specialize=["tokens", "programs"])
def _range_kernel(ends_ptr, values_ptr, tokens, programs, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    some = tl.load(values_ptr)
    lowest = tl.zeros([BLOCK], values_ptr.dtype.element_ty) + some
    highest = lowest
    for block in range(program, tl.cdiv(tokens, BLOCK), programs):
        at = block * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(values_ptr + at, mask=at < tokens, other=some)
        lowest = tl.minimum(lowest, value)
        highest = tl.maximum(highest, value)
    tl.store(ends_ptr + 2 * program, tl.min(lowest, 0))
    tl.store(ends_ptr + 2 * program + 1, tl.max(highest, 0))


@triton.jit(do_not_specialize=["lowest", "bits", "tokens", "users", "steps"])
def _unique_keys_kernel(
    keys_ptr, values_ptr, offsets_ptr, lowest, bits, tokens, users, steps, BLOCK: tl.constexpr
):
    """The user in front of the id."""
    start = tl.program_id(0) * BLOCK
    token = start + tl.arange(0, BLOCK)
    inside = token < tokens
    shifted = tl.load(values_ptr + token, mask=inside, other=0).to(tl.int64) - lowest
    end = tl.minimum(start + BLOCK, tokens) - 1
    first = user_of_slot(offsets_ptr, users, steps, start, 1)
    last = user_of_slot(offsets_ptr, users, steps, end, 1)
    user = user_of(offsets_ptr + first, last - first + 1, tl.minimum(token, end)) + first
    key = (user.to(tl.int64) << bits) | shifted
    tl.store(keys_ptr + token, key.to(keys_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _firsts_kernel(keys_ptr, firsts_ptr, tokens, tiles, TILE: tl.constexpr):
    """How many keys of a tile differ from the one before, and the place of the last such; -1."""
    tile = tl.program_id(0)
    place = tile * TILE + tl.arange(0, TILE)
    _, first = _is_first(keys_ptr, place, tokens)
    tl.store(firsts_ptr + tile, tl.sum(first.to(tl.int32), 0))
    tl.store(firsts_ptr + tiles + tile, tl.max(tl.where(first, place, -1), 0))


@triton.jit
def _is_first(keys_ptr, place, tokens):
    """(keys, which of them differ from the one before)"""
    inside = place < tokens
    key = tl.load(keys_ptr + place, mask=inside, other=0)
    before = tl.load(keys_ptr + place - 1, mask=inside & (place > 0), other=0)
    return key, inside & ((place == 0) | (key != before))


@triton.jit(do_not_specialize=["lowest", "bits", "tokens", "tiles"])
def _places_kernel(
    keys_ptr, order_ptr, firsts_ptr, unique_ptr, counts_ptr, inverse_ptr,
    lowest, bits, tokens, tiles, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    earlier = tl.zeros([TILES], tl.int32)
    begin = tl.full([TILES], -1, tl.int32)
    for start in range(0, tile, TILES):
        other = start + tl.arange(0, TILES)
        earlier += tl.load(firsts_ptr + other, mask=other < tile, other=0)
        last = tl.load(firsts_ptr + tiles + other, mask=other < tile, other=-1)
        begin = tl.maximum(begin, last)
    place = tile * TILE + tl.arange(0, TILE)
    inside = place < tokens
    key, first = _is_first(keys_ptr, place, tokens)
    after = tl.load(keys_ptr + place + 1, mask=place + 1 < tokens, other=0)
    token = tl.load(order_ptr + place, mask=inside, other=0)
    rank = tl.sum(earlier, 0) + tl.cumsum(first.to(tl.int32), 0) - 1
    # Where those that are equal begin, which may be in an earlier tile.
    begins = tl.associative_scan(tl.where(first, place, -1), 0, _larger)
    begins = tl.maximum(begins, tl.max(begin, 0))
    last = inside & ((place == tokens - 1) | (key != after))
    tl.store(inverse_ptr + token, rank.to(tl.int64), mask=inside)
    shifted = key.to(tl.int64)
    shifted -= (shifted >> bits) << bits
    value = (shifted + lowest).to(unique_ptr.dtype.element_ty)
    tl.store(unique_ptr + rank, value, mask=last)
    tl.store(counts_ptr + rank, (place - begins + 1).to(tl.int64), mask=last)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["users"])
def _begins_kernel(begins_ptr, order_ptr, inverse_ptr, offsets_ptr, users, USERS: tl.constexpr):
    """Of how many distinct ids those of each user come after; at the end how many there are."""
    user = tl.program_id(0) * USERS + tl.arange(0, USERS)
    place = tl.load(offsets_ptr + user, mask=user <= users, other=0).to(tl.int64) - 1
    token = tl.load(order_ptr + place, mask=place >= 0, other=0)
    begin = tl.load(inverse_ptr + token, mask=place >= 0, other=-1) + 1
    tl.store(begins_ptr + user, begin.to(begins_ptr.dtype.element_ty), mask=user <= users)
