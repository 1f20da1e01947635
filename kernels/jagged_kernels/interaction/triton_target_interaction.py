"""The backward of `target_interaction`: one pass over the tokens where matrices fit a program.

As `triton_products`, with the user's matrix put together when its tokens come, and its gradient
taken apart when they are done: what belongs to the user is stored, what all users share is added up
by each program, and then over programs.
"""

# Triton's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.triton_blocks import dot_precision
from jagged_kernels.interaction.triton_linear import (
    block_size,
    fold,
    load_row,
    load_weight,
    unit_stride,
)
from jagged_kernels.interaction.triton_linear_backward import launch_linear_backward
from jagged_kernels.interaction.triton_products import (
    MERGE_BLOCK,
    add_tiles,
    merge_kernel,
    span_programs,
)
from jagged_kernels.interaction.triton_tiles import (
    first_tile,
    search_steps,
    tile_count,
    user_of_tile,
)

# D and K up to which one program holds the gradient of a user's matrix and those of both its parts.
MOST_FUSED = 64


def launch_target_backward(
    d_out: Tensor,
    history: Tensor,
    target: Tensor,
    shared: Tensor,
    scaled: Tensor,
    user_bias: Tensor,
    offsets: Tensor,
    *,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of history, target, shared, scaled and user_bias, in their dtypes and shapes."""
    if max(scaled.shape) > MOST_FUSED or history.shape[0] == 0:
        weight = (shared + target[:, :, None] * scaled).to(history.dtype)
        wanted = (True, True, True)
        d_history, d_weight, d_bias = launch_linear_backward(
            d_out, history, weight, user_bias, offsets, None, activation, wanted
        )
        d_weight = d_weight.to(shared.dtype)
        d_target = torch.einsum("bdk,dk->bd", d_weight, scaled).to(target.dtype)
        d_scaled = torch.einsum("bdk,bd->dk", d_weight, target.to(shared.dtype))
        return d_history, d_target, d_weight.sum(0), d_scaled, d_bias

    x, y, target, bias = unit_stride(history), unit_stride(d_out), target.contiguous(), user_bias
    (tokens, dim), columns, users = x.shape, y.shape[1], target.shape[0]
    d_x = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    d_target = torch.empty_like(target)
    d_bias = torch.empty((users, columns), dtype=bias.dtype, device=x.device)
    tile = 16 if x.element_size() == 4 else 64
    units = tile_count(tokens, users, tile)
    span = triton.cdiv(units, span_programs(x.device))
    programs = triton.cdiv(units, span)
    d_weights = torch.empty((2, programs, dim, columns), dtype=torch.float32, device=x.device)
    size = dim + columns
    # Of the user that a program goes on with, and of the one that it begins.
    partials = torch.empty((programs, 2, size), dtype=torch.float32, device=x.device)
    offsets = offsets.contiguous()
    walk = (users, search_steps(users), units, span)
    with torch.cuda.device_of(x):
        _target_backward_kernel[(programs,)](
            x, y, target, shared, scaled, bias.contiguous(), d_x, d_target, d_bias, d_weights,
            partials, offsets, *walk, programs,
            x.stride(0), y.stride(0), *shared.stride(), *scaled.stride(),
            ACTIVATION=activation, D=dim, K=columns, BLOCK_D=block_size(dim, MOST_FUSED),
            BLOCK_K=block_size(columns, MOST_FUSED), TILE=tile,
            PRECISION=dot_precision(x.dtype), num_warps=8, num_stages=2,
            maxnreg=128 if x.element_size() == 2 else None,
        )  # fmt: skip
        if programs > 1:
            grid = (programs - 1, triton.cdiv(size, MERGE_BLOCK.value))
            merge_kernel[grid](
                partials, d_target, d_bias, offsets, None, None, *walk,
                MATRIX=dim, K=columns, SIZE=size, TILE=tile, num_warps=4,
            )  # fmt: skip
    d_shared, d_scaled = d_weights.sum(1)
    return d_x, d_target, d_shared, d_scaled.clone(), d_bias


@triton.jit(do_not_specialize=["users", "steps", "units", "span", "programs"])
def _target_backward_kernel(
    x_ptr, y_ptr, target_ptr, shared_ptr, scaled_ptr, bias_ptr, dx_ptr, d_target_ptr, d_bias_ptr,
    d_weights_ptr, partial_ptr, offsets_ptr, users, steps, units, span, programs,
    x_stride, y_stride, shared_stride_d, shared_stride_k, scaled_stride_d, scaled_stride_k,
    ACTIVATION: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    low = program * span
    high = tl.minimum(low + span, units)
    first_user = user_of_tile(offsets_ptr, users, steps, low, TILE)
    last_user = user_of_tile(offsets_ptr, users, steps, high - 1, TILE)
    rows, columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    d_shared = tl.zeros([BLOCK_D, BLOCK_K], tl.float32)
    d_scaled = tl.zeros([BLOCK_D, BLOCK_K], tl.float32)
    for index in range(0, last_user + 1 - first_user):
        user = first_user + index
        row = user.to(tl.int64)
        shared = load_weight(
            shared_ptr, shared_stride_d, shared_stride_k, 0, 0, D, K, BLOCK_D, BLOCK_K
        )
        scaled = load_weight(
            scaled_ptr, scaled_stride_d, scaled_stride_k, 0, 0, D, K, BLOCK_D, BLOCK_K
        )
        target = load_row(target_ptr, row, 0, D, BLOCK_D)
        weight = fold(shared, scaled, target, x_ptr.dtype.element_ty)
        bias = load_row(bias_ptr, row, 0, K, BLOCK_K)
        begin, end = first_tile(offsets_ptr, user, TILE), first_tile(offsets_ptr, user + 1, TILE)
        user_start, user_end = tl.load(offsets_ptr + user), tl.load(offsets_ptr + user + 1)
        acc, total = add_tiles(
            tl.zeros([BLOCK_D, BLOCK_K], tl.float32), tl.zeros([BLOCK_K], tl.float32),
            user_start + tl.maximum(low - begin, 0) * TILE,
            tl.minimum(user_start + (high - begin) * TILE, user_end),
            x_ptr, y_ptr, dx_ptr, x_stride, y_stride, weight, bias, 0, 0,
            ACTIVATION, D, K, BLOCK_D, BLOCK_K, TILE, PRECISION,
        )  # fmt: skip
        d_shared += acc
        d_scaled += target[:, None] * acc
        d_target = tl.sum(scaled.to(tl.float32) * acc, 1)
        if (begin >= low) & (end <= high):
            _store_user(d_target_ptr + row * D, d_target, rows, D)
            _store_user(d_bias_ptr + row * K, total, columns, K)
        else:
            slot = (program * 2 + (begin >= low).to(tl.int32)).to(tl.int64)
            _store_user(partial_ptr + slot * (D + K), d_target, rows, D)
            _store_user(partial_ptr + slot * (D + K) + D, total, columns, K)
    place = program.to(tl.int64) * (D * K) + rows[:, None] * K + columns[None, :]
    inside = (rows[:, None] < D) & (columns[None, :] < K)
    tl.store(d_weights_ptr + place, d_shared, mask=inside)
    tl.store(d_weights_ptr + programs.to(tl.int64) * (D * K) + place, d_scaled, mask=inside)


@triton.jit
def _store_user(ptr, numbers, place, SIZE: tl.constexpr):
    tl.store(ptr + place, numbers.to(ptr.dtype.element_ty), mask=place < SIZE)
