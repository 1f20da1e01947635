"""A matrix for each user or group of users: the kernel of `jagged_linear` and `jagged_dense_bmm`.

A program takes one tile of one user's tokens (`device.search`) and a block of columns. It is short:
many at a time keep the memory busy, and no long user sets the time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import LaunchConfig, block_size, cdiv
from jagged_kernels.device.arithmetic import add_dot, product_precision
from jagged_kernels.device.memory import load_block, store_block
from jagged_kernels.device.search import search_steps, tile_count, user_of_tile
from jagged_kernels.ops.products.activations import activate
from jagged_kernels.ops.products.blocks import fold, load_row, load_weight, weight_in_place

# By bytes of a number.
LINEAR_CONFIGS = {2: LaunchConfig(64, 4, 3), 4: LaunchConfig(64, 4, 3, 128)}


def launch_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    groups: Tensor | None,
    *,
    activation: str,
    target: Tensor | None = None,
    scaled: Tensor | None = None,
) -> Tensor:
    """[T, K] = activation(x_t weight_g + bias_g) in x's dtype, g the group of token t's user.

    With `target` [B, D] and `scaled` [D, K], the matrix of user b is
    weight_b + target_b[:, None] * scaled instead.
    """
    x, weight = rows_of_dims(x), weight_in_place(weight)
    tokens, dim = x.shape
    columns, users = weight.shape[2], offsets.shape[0] - 1
    out = torch.empty((tokens, columns), dtype=x.dtype, device=x.device)
    if tokens == 0 or columns == 0:
        return out
    wide = 128 if x.element_size() == 2 else 64
    block_k = block_size(columns, wide)
    config = LINEAR_CONFIGS[x.element_size()]
    launch(
        _linear_kernel, tile_count(tokens, users, config.block) * cdiv(columns, block_k),
        (
            x, weight, None if bias is None else bias.contiguous(),
            None if groups is None else groups.contiguous(), offsets, out,
            None if target is None else target.contiguous(), scaled,
            users, search_steps(users),
        ),
        {
            "X_STRIDE": x.stride(0), "WEIGHT_STRIDES": weight.stride(),
            "SCALED_STRIDES": (0, 0) if scaled is None else scaled.stride(),
            "ACTIVATION": activation, "D": dim, "K": columns,
            "BLOCK_D": block_size(dim, wide // 2), "BLOCK_K": block_k, "TILE": config.block,
            "PRECISION": product_precision(x),
        },
        **config.options(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["users", "steps"])
def _linear_kernel(
    x_ptr, weight_ptr, bias_ptr, groups_ptr, offsets_ptr, out_ptr, target_ptr, scaled_ptr,
    users, steps, X_STRIDE: tl.constexpr, WEIGHT_STRIDES: tl.constexpr,
    SCALED_STRIDES: tl.constexpr, ACTIVATION: tl.constexpr,
    D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    K_BLOCKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile, column = tl.program_id(0) // K_BLOCKS, tl.program_id(0) % K_BLOCKS * BLOCK_K
    user = user_of_tile(offsets_ptr, users, steps, tile, TILE)
    user_start, end = tl.load(offsets_ptr + user), tl.load(offsets_ptr + user + 1)
    start = user_start + (tile - (user_start // TILE).to(tl.int32) - user) * TILE
    if start >= end:
        return
    group = (user if groups_ptr is None else tl.load(groups_ptr + user)).to(tl.int64)
    weight_ptr += group * WEIGHT_STRIDES[0]
    acc = tl.zeros([TILE, BLOCK_K], tl.float32)
    for row in range(0, D, BLOCK_D):
        x = load_block(x_ptr, start, end, X_STRIDE, TILE, D, BLOCK_D, row)
        weight = load_weight(
            weight_ptr, WEIGHT_STRIDES[1], WEIGHT_STRIDES[2], row, column,
            D, K, BLOCK_D, BLOCK_K,
        )  # fmt: skip
        if target_ptr is not None:
            scaled = load_weight(
                scaled_ptr, SCALED_STRIDES[0], SCALED_STRIDES[1], row, column,
                D, K, BLOCK_D, BLOCK_K,
            )  # fmt: skip
            target = load_row(target_ptr, user.to(tl.int64), row, D, BLOCK_D)
            weight = fold(weight, scaled, target, x.dtype)
        acc = add_dot(acc, x, weight, PRECISION)
    if bias_ptr is not None:
        acc += load_row(bias_ptr, group, column, K, BLOCK_K)[None, :]
    acc = activate(acc, ACTIVATION, out_ptr.dtype.element_ty)
    store_block(out_ptr, acc, start, end, K, TILE, K, BLOCK_K, column)
