"""Sums over the tokens of a user or group: x^T y, and with it the backward of `jagged_linear`.

Programs take equal spans of tile numbers (`device.search`) and walk the segments (users, or groups
of users) that lie in them with one accumulator. A segment that a span holds whole is finished at
once; of one that is cut, each program leaves a partial sum, and a second launch adds them up in
order. While a tile is there, the backward takes everything it can from it: tokens are read once.

Where each user is better off with a program of its own: `triton_user_products`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.backends import multiprocessors
from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import LaunchConfig, block_size, cdiv
from jagged_kernels.device.arithmetic import product_precision
from jagged_kernels.device.search import first_tile, search_steps, tile_count, user_of_tile
from jagged_kernels.ops.products.blocks import load_row, load_weight, weight_in_place
from jagged_kernels.ops.products.triton_accumulate import (
    MERGE_BLOCK,
    add_tiles,
    merge_partials,
    store_sums,
)
from jagged_kernels.ops.products.triton_groups import segments_of
from jagged_kernels.ops.products.triton_user_products import launch_user_products

# Up to so many tokens, a program a segment needs no second launch and is as fast.
ONE_LAUNCH_TOKENS = 2048
# Below so many tokens a user on average, or for sums alone of half types, each user has a program
# of its own (`triton_user_products`). One of the second number of tokens or more may be cut.
SHORT_USER, LEAST_SHARE = 64, 256
# Spans a multiprocessor, as many as run at a time: for sums alone, and for sums and dx together.
SUM_PROGRAMS, FUSED_PROGRAMS = 3, {2: 3, 4: 2}
# By bytes of a number: for sums alone, and for sums and dx together.
SUM_CONFIGS = {2: LaunchConfig(64, 4, 3, 128), 4: LaunchConfig(32, 4, 2)}
FUSED_CONFIGS = {2: LaunchConfig(64, 4, 2, 168), 4: LaunchConfig(32, 4, 2)}
# By bytes of a number: D and K up to which the backward is one launch over the tokens, and the most
# rows and columns of a matrix that a program sums.
FUSED_UP_TO = {2: 128, 4: 64}
_WIDEST = {2: 128, 4: 64}


def launch_products(
    x: Tensor,
    y: Tensor,
    offsets: Tensor,
    count: int,
    *,
    groups: Tensor | None = None,
    sum_y: torch.dtype | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    activation: str = "none",
    want_d_x: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(x^T y [S, D, K], sums of y [S, K] of dtype `sum_y`, dx [T, D] if `want_d_x`) of S segments.

    There are `count`: each user, or with `groups` [B] each group. What is not asked for is None.

    With an activation, y is the gradient of activation(x weight + bias), and what is multiplied and
    summed is the gradient before the activation. dx is that times weight^T. Both need `weight`
    [S, D, K], D and K up to `FUSED_UP_TO`.
    """
    x, y = rows_of_dims(x), rows_of_dims(y)
    (tokens, dim), columns, users = x.shape, y.shape[1], offsets.shape[0] - 1
    new = torch.empty if tokens else torch.zeros
    out = new((count, dim, columns), dtype=x.dtype, device=x.device)
    sums = None
    if sum_y is not None:
        sums = new((count, columns), dtype=sum_y, device=x.device)
    d_x = torch.empty_like(x, memory_format=torch.contiguous_format) if want_d_x else None
    if tokens == 0 or out.numel() == 0:
        return out, sums, d_x
    widest = _WIDEST[x.element_size()]
    block_d, block_k = block_size(dim, widest), block_size(columns, widest)
    config = (SUM_CONFIGS if weight is None else FUSED_CONFIGS)[x.element_size()]
    if block_d * block_k > 64 * 64:
        config = replace(config, num_warps=8, registers=None)
    blocks = cdiv(dim, block_d) * cdiv(columns, block_k)
    size = dim * columns + (0 if sums is None else columns)
    if weight is not None:
        weight = weight_in_place(weight)
    if bias is not None:
        bias = bias.contiguous()
    constants = {
        "X_STRIDE": x.stride(0), "Y_STRIDE": y.stride(0),
        "WEIGHT_STRIDES": (0, 0, 0) if weight is None else weight.stride(),
        "ACTIVATION": activation, "D": dim, "K": columns, "BLOCK_D": block_d, "BLOCK_K": block_k,
        "SIZE": size, "TILE": config.block, "PRECISION": product_precision(x),
    }  # fmt: skip
    one_launch = tokens <= ONE_LAUNCH_TOKENS
    spans = SUM_PROGRAMS if weight is None else FUSED_PROGRAMS[x.element_size()]
    most = multiprocessors(x.device) * spans
    half_sums = weight is None and x.element_size() == 2
    if groups is None and (half_sums or tokens < users * SHORT_USER):
        share = tokens + 1 if one_launch else max(LEAST_SHARE, cdiv(tokens, most))
        launch_user_products(
            x, y, weight, bias, out, sums, d_x, offsets, share=share, blocks=blocks,
            constants=constants, options=config.options(),
        )  # fmt: skip
        return out, sums, d_x
    units = tile_count(tokens, users, config.block)
    span = units if one_launch else cdiv(units, most)
    programs = count if one_launch else cdiv(units, span)
    partials = None
    if not one_launch:
        # Of the segment that a program goes on with, and of the one that it begins.
        partials = torch.empty((programs, 2, size), dtype=torch.float32, device=x.device)
    places, starts, group, bounds = segments_of(offsets, groups, count)
    walk = (places, group, bounds, users, search_steps(users), units, span)
    launch(
        _products_kernel, (programs, blocks),
        (x, y, weight, bias, out, sums, d_x, partials, starts, count, *walk),
        {**constants, "ONE_LAUNCH": one_launch}, **config.options(),
    )  # fmt: skip
    if partials is not None and programs > 1:
        launch(
            merge_kernel, (programs - 1, cdiv(size, MERGE_BLOCK.value)),
            (partials, out, sums, *walk),
            {"MATRIX": dim * columns, "K": columns, "SIZE": size, "TILE": config.block},
            num_warps=8,
        )  # fmt: skip
    return out, sums, d_x


@triton.jit(do_not_specialize=["segments", "users", "steps", "units", "span"])
def _products_kernel(
    x_ptr, y_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, dx_ptr, partial_ptr,
    starts_ptr, segments, places_ptr, group_ptr, bounds_ptr, users, steps, units, span,
    X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, WEIGHT_STRIDES: tl.constexpr,
    ACTIVATION: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
    ONE_LAUNCH: tl.constexpr,
):  # fmt: skip
    K_BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    program = tl.program_id(0)
    row, column = tl.program_id(1) // K_BLOCKS * BLOCK_D, tl.program_id(1) % K_BLOCKS * BLOCK_K
    if ONE_LAUNCH:
        low, high = units * 0, units
        first_place, last_place = users * 0, users - 1
        first_segment, last_segment = program, program
    else:
        low = program * span
        high = tl.minimum(low + span, units)
        first_place = user_of_tile(places_ptr, users, steps, low, TILE)
        last_place = user_of_tile(places_ptr, users, steps, high - 1, TILE)
        first_segment = segment_at(group_ptr, first_place)
        last_segment = segment_at(group_ptr, last_place)
        if group_ptr is not None:
            # No tile is of a group without users: the program before it passes it, too.
            first_segment = tl.where(program == 0, 0, first_segment)
            tile = tl.minimum(high, units - 1)
            later = segment_at(group_ptr, user_of_tile(places_ptr, users, steps, tile, TILE))
            later = tl.where(high == units, segments, later)
            last_segment = tl.maximum(last_segment, later - 1)

    for index in range(0, last_segment + 1 - first_segment):
        segment = first_segment + index
        first, last, begin, end = load_segment(places_ptr, bounds_ptr, segment, TILE)
        weight, bias = None, None
        if weight_ptr is not None:
            weight = load_weight(
                weight_ptr + segment.to(tl.int64) * WEIGHT_STRIDES[0],
                WEIGHT_STRIDES[1], WEIGHT_STRIDES[2], 0, 0, D, K, BLOCK_D, BLOCK_K,
            )  # fmt: skip
        if bias_ptr is not None:
            bias = load_row(bias_ptr, segment.to(tl.int64), column, K, BLOCK_K)
        acc = tl.zeros([BLOCK_D, BLOCK_K], tl.float32)
        total = tl.zeros([16, BLOCK_K], tl.float32)
        # A large group has users whom other programs take.
        for place in range(tl.maximum(first, first_place), tl.minimum(last, last_place + 1)):
            tiles_before = first_tile(places_ptr, place, TILE)
            user_start = tl.load(starts_ptr + place)
            user_end = user_start + tl.load(places_ptr + place + 1) - tl.load(places_ptr + place)
            from_token = user_start + tl.maximum(low - tiles_before, 0) * TILE
            to_token = user_start + tl.maximum(high - tiles_before, 0) * TILE
            acc, total = add_tiles(
                acc, total, from_token, tl.minimum(to_token, user_end),
                x_ptr, y_ptr, dx_ptr, X_STRIDE, Y_STRIDE, weight, bias, row, column,
                ACTIVATION, D, K, BLOCK_D, BLOCK_K, TILE, PRECISION,
            )  # fmt: skip
        total = tl.max(total, 0)
        if ONE_LAUNCH or ((begin >= low) & (end <= high)):
            store_sums(
                out_ptr + segment.to(tl.int64) * (D * K), sum_ptr, segment.to(tl.int64) * K,
                acc, total, row, column, D, K, BLOCK_D, BLOCK_K,
            )  # fmt: skip
        elif partial_ptr is not None:
            slot = (program * 2 + (begin >= low).to(tl.int32)).to(tl.int64)
            store_sums(
                partial_ptr + slot * SIZE, partial_ptr if SIZE > D * K else None,
                slot * SIZE + D * K, acc, total, row, column, D, K, BLOCK_D, BLOCK_K,
            )  # fmt: skip


@triton.jit
def segment_at(group_ptr, place):
    return place if group_ptr is None else tl.load(group_ptr + place).to(tl.int32)


@triton.jit
def load_segment(places_ptr, bounds_ptr, segment, TILE: tl.constexpr):
    """The places of its users, from and to, and the numbers of its tiles, from and to."""
    if bounds_ptr is None:
        first, last = segment, segment + 1
    else:
        first = tl.load(bounds_ptr + segment).to(tl.int32)
        last = tl.load(bounds_ptr + segment + 1).to(tl.int32)
    return first, last, first_tile(places_ptr, first, TILE), first_tile(places_ptr, last, TILE)


@triton.jit(do_not_specialize=["users", "steps", "units", "span"])
def merge_kernel(
    partial_ptr, out_ptr, sum_ptr, places_ptr, group_ptr, bounds_ptr, users, steps, units, span,
    MATRIX: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds up the segment that a program begins and does not end."""
    program = tl.program_id(0)
    low = program * span
    high = low + span
    segment = segment_at(group_ptr, user_of_tile(places_ptr, users, steps, high - 1, TILE))
    _, _, begin, end = load_segment(places_ptr, bounds_ptr, segment, TILE)
    if (begin < low) | (end <= high):
        return
    last = (end - 1) // span
    merge_partials(
        partial_ptr, program * 2 + 1, program * 2 + 2, 2, last - program, out_ptr, sum_ptr, segment,
        MATRIX, K, SIZE,
    )  # fmt: skip
