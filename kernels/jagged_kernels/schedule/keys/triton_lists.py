"""Lists in two launches and two sums: how many blocks each entry lists, and which.

A program takes one tile of queries or one key block; both directions are in the same launches, each
from formulas of its own: nothing is sorted. What an entry lists are runs of blocks: first, count,
and distance (`_runs`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import power_of_two
from jagged_kernels.device.search import search_steps, user_of_tile
from jagged_kernels.schedule.keys.blocks import tile_count
from jagged_kernels.schedule.keys.triton_token_rule import load_rule

# Blocks that a program writes at a time.
_WIDTH = tl.constexpr(128)
# Sizes vary from batch to batch and must not compile anything again.
_SIZES = [
    "users", "steps", "tiles", "most", "capacity", "stride", "local", "step", "offset", "left",
    "first",
]  # fmt: skip


def launch_lists(
    q_offsets: Tensor,
    k_offsets: Tensor,
    targets: Tensor | None,
    contexts: Tensor | None,
    *,
    q_tokens: int,
    k_tokens: int,
    block: int,
    groups: int,
    most: int,
    capacity: int,
    strided: tuple[int, int, int, int] | None,
    band: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `build.key_lists` returns."""
    users = q_offsets.shape[0] - 1
    tiles, blocks = (tile_count(tokens, users, block) for tokens in (q_tokens, k_tokens))
    device = q_offsets.device
    # What no entry lists is 0: twice the same is the same throughout.
    col = torch.zeros(capacity, dtype=torch.int32, device=device)
    col_t = torch.zeros_like(col)
    if users == 0:
        row_ptr = torch.zeros(tiles * groups + 1, dtype=torch.int32, device=device)
        return row_ptr, col, torch.zeros_like(row_ptr), col_t
    counts = torch.empty(tiles * groups + 1, dtype=torch.int32, device=device)
    counts_t = torch.empty(blocks * groups + 1, dtype=torch.int32, device=device)
    offsets = (q_offsets.contiguous(), k_offsets.contiguous())
    rule = tuple(None if x is None else x.contiguous() for x in (targets, contexts))
    numbers = (*(strided or (1, 1, 1, 0)), *band)
    constants = {"BLOCK": block, "GROUPS": groups, "STRIDED": strided is not None}
    sizes = (users, search_steps(users), tiles, most)
    launch(
        _count_kernel, tiles + blocks, (*offsets, *rule, counts, counts_t, *sizes, *numbers),
        {**constants, "PADDED": power_of_two(groups)}, num_warps=1,
    )  # fmt: skip
    row_ptr, row_ptr_t = (x.cumsum(0, dtype=torch.int32) for x in (counts, counts_t))
    tables = (row_ptr, row_ptr_t, col, col_t)
    launch(
        _fill_kernel, tiles + blocks,
        (*offsets, *rule, *tables, *sizes, capacity, *numbers), constants, num_warps=1,
    )  # fmt: skip
    return row_ptr, col, row_ptr_t, col_t


@triton.jit(do_not_specialize=_SIZES)
def _count_kernel(
    q_offsets_ptr, k_offsets_ptr, targets_ptr, contexts_ptr, counts_ptr, counts_t_ptr,
    users, steps, tiles, most, stride, local, step, offset, left, first,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, STRIDED: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    if number < tiles:
        _count_side(
            q_offsets_ptr, k_offsets_ptr, targets_ptr, contexts_ptr, counts_ptr, number,
            users, steps, most, stride, local, step, offset, left, first,
            BLOCK, GROUPS, STRIDED, PADDED, False,
        )  # fmt: skip
    else:
        _count_side(
            k_offsets_ptr, q_offsets_ptr, targets_ptr, contexts_ptr, counts_t_ptr, number - tiles,
            users, steps, most, stride, local, step, offset, left, first,
            BLOCK, GROUPS, STRIDED, PADDED, True,
        )  # fmt: skip


@triton.jit
def _count_side(
    own_ptr, other_ptr, targets_ptr, contexts_ptr, counts_ptr, number,
    users, steps, most, stride, local, step, offset, left, first,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, STRIDED: tl.constexpr, PADDED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    user, tile, own, other = _find_tile(own_ptr, other_ptr, number, users, steps, BLOCK)
    history, contexts = _load_rule(targets_ptr, contexts_ptr, user, own, other, TRANSPOSED)
    group = tl.arange(0, PADDED)
    _, count, _, count_near, _, count_last = _runs(
        tile, own, other, history, contexts, group, most,
        stride, local, step, offset, left, first, BLOCK, STRIDED, TRANSPOSED,
    )  # fmt: skip
    # The sum over all before an entry is where it begins: counts stand one behind.
    address = counts_ptr + 1 + number.to(tl.int64) * GROUPS + group
    tl.store(address, count + count_near + count_last, mask=group < GROUPS)
    tl.store(counts_ptr + group, tl.zeros_like(group), mask=(group == 0) & (number == 0))


@triton.jit(do_not_specialize=_SIZES)
def _fill_kernel(
    q_offsets_ptr, k_offsets_ptr, targets_ptr, contexts_ptr, row_ptr, row_ptr_t, col_ptr, col_t_ptr,
    users, steps, tiles, most, capacity, stride, local, step, offset, left, first,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    if number < tiles:
        _fill_side(
            q_offsets_ptr, k_offsets_ptr, targets_ptr, contexts_ptr, row_ptr, col_ptr, number,
            users, steps, most, capacity, stride, local, step, offset, left, first,
            BLOCK, GROUPS, STRIDED, False,
        )  # fmt: skip
    else:
        _fill_side(
            k_offsets_ptr, q_offsets_ptr, targets_ptr, contexts_ptr, row_ptr_t, col_t_ptr,
            number - tiles,
            users, steps, most, capacity, stride, local, step, offset, left, first,
            BLOCK, GROUPS, STRIDED, True,
        )  # fmt: skip


@triton.jit
def _fill_side(
    own_ptr, other_ptr, targets_ptr, contexts_ptr, row_ptr, col_ptr, number,
    users, steps, most, capacity, stride, local, step, offset, left, first,
    BLOCK: tl.constexpr, GROUPS: tl.constexpr, STRIDED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    user, tile, own, other = _find_tile(own_ptr, other_ptr, number, users, steps, BLOCK)
    history, contexts = _load_rule(targets_ptr, contexts_ptr, user, own, other, TRANSPOSED)
    for group in range(0, GROUPS):
        start, count, start_near, count_near, start_last, count_last = _runs(
            tile, own, other, history, contexts, group, most,
            stride, local, step, offset, left, first, BLOCK, STRIDED, TRANSPOSED,
        )  # fmt: skip
        begin = tl.load(row_ptr + number.to(tl.int64) * GROUPS + group).to(tl.int64)
        total = count + count_near + count_last
        for done in range(0, total, _WIDTH):
            place = done + tl.arange(0, _WIDTH)
            found = start_last + (place - count - count_near)
            found = tl.where(place < count + count_near, start_near + (place - count), found)
            distance = 1
            if STRIDED:
                distance = stride
            found = tl.where(place < count, start + place * distance, found)
            partial = (found + 1) * BLOCK > other
            if STRIDED:
                partial = partial | (found == tile)
            else:
                partial = partial | _hides(
                    tile, found, own, other, history, contexts, left, first, BLOCK, TRANSPOSED
                )  # fmt: skip
            inside = (place < total) & (begin + place < capacity)
            tl.store(col_ptr + begin + place, found * 2 + partial.to(tl.int32), mask=inside)


@triton.jit
def _find_tile(own_ptr, other_ptr, number, users, steps, BLOCK: tl.constexpr):
    """(user, which of its tiles, its tokens on this side and on the other one) of a number."""
    user = user_of_tile(own_ptr, users, steps, number, BLOCK)
    begin = tl.load(own_ptr + user)
    own = (tl.load(own_ptr + user + 1) - begin).to(tl.int32)
    other = (tl.load(other_ptr + user + 1) - tl.load(other_ptr + user)).to(tl.int32)
    return user, number - (begin // BLOCK).to(tl.int32) - user, own, other


@triton.jit
def _load_rule(targets_ptr, contexts_ptr, user, own, other, TRANSPOSED: tl.constexpr):
    keys = own if TRANSPOSED else other
    return load_rule(targets_ptr, contexts_ptr, user, keys)


@triton.jit
def _runs(
    tile, own, other, history, contexts, group, most,
    stride, local, step, offset, left, first,
    BLOCK: tl.constexpr, STRIDED: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Three times (first block, how many) of what an entry lists, ascending; blocks of the first
    run are `stride` apart if STRIDED. int32 of the shape of `group`."""
    none = group * 0
    if STRIDED:
        phase = (group * step + offset) % stride
        if TRANSPOSED:
            end = tl.where((tile + phase) % stride == 0, most, tile + local)
            start, count = none, none
            start_near = none + tile
            end_near = tl.minimum(end, tl.cdiv(other, BLOCK))
        else:
            start_near = none + tl.maximum(tile - local + 1, 0)
            end_near = none + tile + 1
            start = (stride - phase) % stride
            count = tl.maximum(start_near - start + stride - 1, 0) // stride
        start_last, end_last = none, none
    else:
        if TRANSPOSED:
            start_near, end_near, start_last, end_last, count = _tiles_of_block(
                tile, other, own, history, contexts, left, first, BLOCK
            )
        else:
            start_near, end_near, start_last, end_last, count = _blocks_of_tile(
                tile, own, other, history, contexts, left, first, BLOCK
            )
        start, count = none, none + tl.minimum(count, most)
        start_near = none + tl.maximum(start_near, count)
        start_last = none + tl.maximum(start_last, tl.maximum(end_near, count))
    exists = (tile * BLOCK < own) & (tile < most)
    count_near = tl.maximum(tl.minimum(end_near, most) - start_near, 0)
    count_last = tl.maximum(tl.minimum(end_last, most) - start_last, 0)
    return (
        start, tl.where(exists, count, 0),
        start_near, tl.where(exists, count_near, 0),
        start_last, tl.where(exists, count_last, 0),
    )  # fmt: skip


@triton.jit
def _blocks_of_tile(
    tile, queries, keys, history, contexts, left, first, BLOCK: tl.constexpr
):  # fmt: skip
    """([first, end) of blocks that a tile of queries sees for being near, the same of its own
    targets, how many from the user's first on it sees besides). Ranges may be empty."""
    begin = tile * BLOCK + keys - queries
    end = tl.minimum(begin + BLOCK, keys)
    oldest = tl.minimum(tl.maximum(begin, contexts), history)
    seen_from = _lowest(oldest, contexts, left)
    seen_to = tl.minimum(end, history)
    near_end = tl.where(seen_from < seen_to, tl.cdiv(seen_to, BLOCK), 0)
    target = tl.maximum(begin, history)
    last_end = tl.where(target < end, tl.cdiv(end, BLOCK), 0)
    seen = tl.maximum(tl.minimum(seen_to, first), 0)
    seen = tl.where((begin < contexts) & (contexts > 0), history, seen)
    return seen_from // BLOCK, near_end, target // BLOCK, last_end, tl.cdiv(seen, BLOCK)


@triton.jit
def _tiles_of_block(
    block, queries, keys, history, contexts, left, first, BLOCK: tl.constexpr
):  # fmt: skip
    """([first, end) of tiles whose history sees a key block, the same for targets, how many from
    the first on hold contexts that do)."""
    shift = keys - queries
    begin = block * BLOCK
    end = tl.minimum(begin + BLOCK, keys)
    # Else all its keys are targets: each sees itself.
    seen_by_many = begin < history
    newest = tl.maximum(tl.minimum(end, history) - 1, tl.maximum(contexts - 1, 0))
    always = (left < 0) | (begin < first)
    since = tl.maximum(tl.maximum(begin, contexts), shift)
    to = tl.where(always, history, tl.minimum(history, newest + left + 1))
    seen = seen_by_many & (since < to)
    near_end = tl.where(seen, tl.cdiv(to - shift, BLOCK), 0)
    by_targets = seen_by_many & (always | (history - newest <= left))
    target = tl.where(by_targets, history, tl.maximum(begin, history))
    last = tl.where(by_targets, keys, end)
    last_end = tl.where(target < last, tl.cdiv(last - shift, BLOCK), 0)
    count = tl.where(seen_by_many, tl.cdiv(contexts, BLOCK), 0)
    return (since - shift) // BLOCK, near_end, (target - shift) // BLOCK, last_end, count


@triton.jit
def _hides(
    tile, found, own, other, history, contexts, left, first,
    BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Whether a query of a tile does not see a key of a block; `found` are those of the other side,
    any shape."""
    if TRANSPOSED:
        query_tile, key_block, queries, keys = found, tile + found * 0, other, own
    else:
        query_tile, key_block, queries, keys = tile + found * 0, found, own, other
    begin = query_tile * BLOCK + keys - queries
    end = tl.minimum(begin + BLOCK, keys)
    key = key_block * BLOCK
    keys_end = tl.minimum(key + BLOCK, keys)
    behind = keys_end > history
    hidden = (begin < contexts) & behind
    # Not 0 for queries before the first key, which see nothing.
    oldest = tl.where(begin < 0, begin, tl.maximum(begin, contexts))
    newest = tl.minimum(end, history) - 1
    far = tl.maximum(key, first) < tl.minimum(_lowest(newest, contexts, left), keys_end)
    hidden = hidden | ((oldest <= newest) & ((keys_end - 1 > oldest) | far))
    far = tl.maximum(key, first) < tl.minimum(_lowest(history, contexts, left), keys_end)
    return hidden | ((end > history) & (behind | far))


@triton.jit
def _lowest(place, contexts, left):
    """The first key that a token at a place of the history sees for being near."""
    lowest = place - left
    seen = (left >= 0) & (lowest > tl.maximum(contexts - 1, 0))
    return tl.where(seen, lowest, 0)
