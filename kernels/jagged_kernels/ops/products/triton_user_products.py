"""`triton_products` where segments are users, and each has a program.

A span of tiles is a walk over users, each of which waits for memory; programs of their own wait
beside each other. A user of a fair share of the tokens or more is cut, by programs numbered without
a table: its parts are the shares of the batch that end in it, less than two shares' tokens each.
Where it has more than one, a second launch adds them up in order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import cdiv
from jagged_kernels.device.search import search_steps, user_of_slot
from jagged_kernels.ops.products.blocks import load_row, load_weight
from jagged_kernels.ops.products.triton_accumulate import (
    MERGE_BLOCK,
    add_tiles,
    merge_partials,
    store_sums,
)


def launch_user_products(
    x: Tensor,
    y: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    sums: Tensor | None,
    d_x: Tensor | None,
    offsets: Tensor,
    *,
    share: int,
    blocks: int,
    constants: dict[str, Any],
    options: dict[str, int],
) -> None:
    """Fills out, sums and d_x as `launch_products` makes them of these, its own constants.

    A user of `share` tokens or more is cut; of a matrix there are so many `blocks`.
    """
    users, size = offsets.shape[0] - 1, constants["SIZE"]
    shares = x.shape[0] // share
    partials = None
    if shares > 1:
        partials = torch.empty((shares, size), dtype=torch.float32, device=x.device)
    walk = (offsets, users, search_steps(users), shares, share)
    launch(
        _user_products_kernel, (shares + users, blocks),
        (x, y, weight, bias, out, sums, d_x, partials, *walk), constants, **options,
    )  # fmt: skip
    if partials is not None:
        launch(
            _merge_shares_kernel, (shares, cdiv(size, MERGE_BLOCK.value)),
            (partials, out, sums, *walk),
            {"MATRIX": constants["D"] * constants["K"], "K": constants["K"], "SIZE": size},
            num_warps=8,
        )  # fmt: skip


@triton.jit(do_not_specialize=["users", "steps", "shares", "share"])
def _user_products_kernel(
    x_ptr, y_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, dx_ptr, partial_ptr,
    offsets_ptr, users, steps, shares, share,
    X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, WEIGHT_STRIDES: tl.constexpr,
    ACTIVATION: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    K_BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    program = tl.program_id(0)
    row, column = tl.program_id(1) // K_BLOCKS * BLOCK_D, tl.program_id(1) % K_BLOCKS * BLOCK_K
    # Shares first: they take longest.
    user = program - shares
    if program < shares:
        user = _user_of_share(offsets_ptr, users, steps, program, share)
    start, end, first_share, parts = _load_user(offsets_ptr, user, share)
    if (program < shares) != (end - start >= share):
        return
    part = tl.where(program < shares, program - first_share, 0)
    parts = tl.where(program < shares, parts, 1)
    tiles = tl.cdiv(end - start, TILE)
    from_token = start + (part * tiles // parts) * TILE
    to_token = tl.minimum(start + ((part + 1) * tiles // parts) * TILE, end)

    weight, bias = None, None
    if weight_ptr is not None:
        weight = load_weight(
            weight_ptr + user.to(tl.int64) * WEIGHT_STRIDES[0],
            WEIGHT_STRIDES[1], WEIGHT_STRIDES[2], 0, 0, D, K, BLOCK_D, BLOCK_K,
        )  # fmt: skip
    if bias_ptr is not None:
        bias = load_row(bias_ptr, user.to(tl.int64), column, K, BLOCK_K)
    acc, total = add_tiles(
        tl.zeros([BLOCK_D, BLOCK_K], tl.float32), tl.zeros([16, BLOCK_K], tl.float32),
        from_token, to_token, x_ptr, y_ptr, dx_ptr, X_STRIDE, Y_STRIDE, weight, bias, row, column,
        ACTIVATION, D, K, BLOCK_D, BLOCK_K, TILE, PRECISION,
    )  # fmt: skip
    total = tl.max(total, 0)
    if parts == 1:
        store_sums(
            out_ptr + user.to(tl.int64) * (D * K), sum_ptr, user.to(tl.int64) * K,
            acc, total, row, column, D, K, BLOCK_D, BLOCK_K,
        )  # fmt: skip
    elif partial_ptr is not None:
        place = program.to(tl.int64) * SIZE
        store_sums(
            partial_ptr + place, partial_ptr if SIZE > D * K else None,
            place + D * K, acc, total, row, column, D, K, BLOCK_D, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _user_of_share(offsets_ptr, users, steps, number, share):
    """Whose token is the last of this share of the batch."""
    return user_of_slot(offsets_ptr, users, steps, (number + 1) * share - 1, 1)


@triton.jit
def _load_user(offsets_ptr, user, share):
    """(its first token, the token behind its last, the first share that ends in it or behind it,
    how many shares end in it): one or more, if it has as many tokens as a share."""
    start = tl.load(offsets_ptr + user).to(tl.int32)
    end = tl.load(offsets_ptr + user + 1).to(tl.int32)
    return start, end, start // share, end // share - start // share


@triton.jit(do_not_specialize=["users", "steps", "shares", "share"])
def _merge_shares_kernel(
    partial_ptr, out_ptr, sum_ptr, offsets_ptr, users, steps, shares, share,
    MATRIX: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Adds up a user of several shares, the first of which is this program's."""
    program = tl.program_id(0)
    user = _user_of_share(offsets_ptr, users, steps, program, share)
    _, _, first, parts = _load_user(offsets_ptr, user, share)
    if (program > first) | (parts < 2):
        return
    merge_partials(
        partial_ptr, program, program + 1, 1, parts - 1, out_ptr, sum_ptr, user, MATRIX, K, SIZE
    )
