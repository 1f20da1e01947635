"""The gradient of users that were selected, with repeats: sums over the copies of each.

A program takes a piece of a user, as in `device.pieces`, in all of its copies. These are summed
in their order, which comes from a stable sort of all copies by user: of few of them, each copy's
place is the number of others before it, counted one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import cdiv
from jagged_kernels.device.memory import as_rows
from jagged_kernels.device.pieces import Cut, cut_users, load_piece, tile_addresses

# Short pieces, and so many programs, which wait for one number after the other: where the copies of
# their user are, and then for those.
SELECT_CUT = Cut(4, 64, 8, 128)
# Comparisons up to which counting takes less time than the ten launches of a sort.
FEW_COMPARISONS = 2**28
# Copies (or users) a program, one a thread, and copies that it compares them with at a time.
_ITEMS, _OTHERS = 128, 256


def launch_select_rows_backward(
    d_out: Tensor, offsets: Tensor, select: Tensor, out_offsets: Tensor, tokens: int
) -> Tensor:
    """[tokens, ...]: each token's gradients summed over the copies of its user in d_out.

    Args:
        select: [N], the user that each user of d_out is a copy of; of others than 0 to B - 1 there
            are none.
    """
    d_values = d_out.new_empty((tokens, *d_out.shape[1:]))
    if d_values.numel() == 0:
        return d_values
    if d_out.shape[0] == 0:
        return d_values.zero_()
    users = offsets.shape[0] - 1
    order, first = _order_copies(select.contiguous(), users)
    source, target = as_rows(d_out), as_rows(d_values)
    columns, pieces = target.shape[1], cut_users(target, offsets, SELECT_CUT)
    shape = pieces.shape
    launch(
        _sum_copies_kernel, (pieces.slots + users) * pieces.blocks,
        (source, target, offsets, out_offsets, order, first, *pieces.numbers()),
        {**pieces.constants(columns), "STRIDE": source.stride(0), "TILE": shape.tile},
        num_warps=shape.warps, maxnreg=shape.registers,
    )  # fmt: skip
    return d_values


def _order_copies(select: Tensor, users: int) -> tuple[Tensor, Tensor]:
    """(copies [N] sorted by their user, where those of each user begin [users + 1])."""
    copies = select.shape[0]
    items = copies + users + 1
    if copies * items > FEW_COMPARISONS:
        ordered, order = select.sort(stable=True)
        numbers = torch.arange(users + 1, device=select.device, dtype=select.dtype)
        return order, torch.searchsorted(ordered, numbers, out_int32=True)
    order = torch.empty(copies, dtype=torch.int32, device=select.device)
    first = torch.empty(users + 1, dtype=torch.int32, device=select.device)
    launch(
        _order_copies_kernel, cdiv(items, _ITEMS), (order, first, select, copies, users),
        {"ITEMS": _ITEMS, "OTHERS": _OTHERS}, num_warps=4,
    )  # fmt: skip
    return order, first


@triton.jit(do_not_specialize=["copies", "users"])
def _order_copies_kernel(
    order_ptr, first_ptr, select_ptr, copies, users, ITEMS: tl.constexpr, OTHERS: tl.constexpr
):  # fmt: skip
    """Of each copy, and then of each user, the number of copies before it."""
    item = tl.program_id(0) * ITEMS + tl.arange(0, ITEMS)
    user = item - copies
    key = tl.where(user < 0, _key(select_ptr, item, copies, users), user * copies)
    before = tl.zeros([ITEMS], tl.int32)
    others = _key(select_ptr, tl.arange(0, OTHERS), copies, users)
    for done in range(0, copies, OTHERS):
        other = others
        others = _key(select_ptr, done + OTHERS + tl.arange(0, OTHERS), copies, users)
        before += tl.sum((other[:, None] < key[None, :]).to(tl.int32), 0)
    tl.store(order_ptr + before, item, mask=user < 0)
    tl.store(first_ptr + user, before, mask=(user >= 0) & (user <= users))


@triton.jit
def _key(select_ptr, copy, copies, users):
    """Numbers that sort copies by user, those of a user as they are; int32, for there are few.
    Copies that do not exist come last."""
    user = tl.load(select_ptr + copy, mask=copy < copies, other=0)
    # Users that do not exist are before or behind all others.
    user = tl.minimum(tl.maximum(user, -1), users).to(tl.int32)
    return tl.where(copy < copies, user * copies + copy, 2**31 - 1)


@triton.jit(do_not_specialize=["users", "slots", "steps"])
def _sum_copies_kernel(
    d_out_ptr, d_values_ptr, offsets_ptr, out_offsets_ptr, order_ptr, first_ptr,
    users, slots, steps,
    COLUMNS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
    STRIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0) // BLOCKS
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    user, first, _, begin, count, _ = load_piece(
        offsets_ptr, number, users, slots, steps, PIECE, False
    )
    if count == 0:
        return
    start = tl.load(first_ptr + user)
    end = tl.load(first_ptr + user + 1)
    d_values_ptr += begin.to(tl.int64) * COLUMNS
    for done in range(0, count, TILE):
        left = count - done
        total = tl.zeros([TILE, BLOCK], tl.float32)
        for copy in range(start, end):
            out_first = tl.load(out_offsets_ptr + tl.load(order_ptr + copy)).to(tl.int64)
            tile_ptr = d_out_ptr + (out_first + (begin - first + done)) * STRIDE
            address, inside = tile_addresses(left, column, STRIDE, COLUMNS, TILE, BLOCK)
            total += tl.load(tile_ptr + address, mask=inside, other=0.0).to(tl.float32)
        address, inside = tile_addresses(left, column, COLUMNS, COLUMNS, TILE, BLOCK)
        tl.store(d_values_ptr + address, total.to(d_values_ptr.dtype.element_ty), mask=inside)
        d_values_ptr += TILE * COLUMNS
