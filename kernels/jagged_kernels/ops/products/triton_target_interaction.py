"""The kernels of `target_interaction`: one pass over the tokens each way.

Forward, programs take equal spans of tokens, whosever they are, each with the target of its user:
three products with matrices that all users share.

Backward, they take equal spans of tile numbers (`device.search`) and walk the users that lie in
them. A user's matrix is put together when its tokens come, and its gradient is taken apart when
they are done: what belongs to the user is stored, what all users share is added up by each program,
and then over programs. What the target alone takes part in needs the sums over a user's tokens
only: a pass over users.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.backends import multiprocessors
from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import LaunchConfig, block_size, cdiv
from jagged_kernels.device.arithmetic import add_dot, product_precision
from jagged_kernels.device.float32 import dot
from jagged_kernels.device.memory import load_block, store_block
from jagged_kernels.device.search import (
    search_steps,
    tile_count,
    user_among,
    user_of,
    user_of_slot,
    user_of_tile,
)
from jagged_kernels.ops.products.activations import activate
from jagged_kernels.ops.products.blocks import fold, load_row, load_weight, sum_precision
from jagged_kernels.ops.products.triton_accumulate import MERGE_BLOCK, add_tiles
from jagged_kernels.ops.products.triton_products import merge_kernel

# D and K up to which one program holds the gradient of a user's matrix and those of its parts.
MOST_FUSED = 64
# The same of the forward, by bytes of a number: of float32, whose products are six, one with a
# matrix for each user takes less time than three.
FORWARD_MOST_FUSED = {2: 64, 4: 0}
FORWARD_CONFIG = LaunchConfig(64, 4, 3)
# By bytes of a number; `block` is the tokens at a time.
BACKWARD_CONFIGS = {2: LaunchConfig(32, 4, 3, 168), 4: LaunchConfig(32, 4, 2)}
# Up to so many tokens, forward programs search for users themselves: that is one launch, but a
# loop that searches cannot load ahead.
ONE_LAUNCH_TOKENS = 2**16
# Spans a multiprocessor, as many as run at a time.
FORWARD_PROGRAMS = 4
BACKWARD_PROGRAMS = {2: 3, 4: 2}

_OWNER_BLOCK = 512
# Users at a time in the pass over users.
_USERS = 64
_SUM_BLOCK = 16
# Programs whose sums are added at a time.
_SUM_ROWS = tl.constexpr(512)


def launch_target(
    history: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    *,
    activation: str,
) -> Tensor:
    """[T, K] of history [T, D], target [B, D], weight [K, 4 D] and bias [K]; D and K up to
    `FORWARD_MOST_FUSED`."""
    x = rows_of_dims(history)
    (tokens, dim), columns, users = x.shape, weight.shape[0], target.shape[0]
    out = torch.empty((tokens, columns), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    most = FORWARD_MOST_FUSED[x.element_size()]
    tiles = cdiv(tokens, FORWARD_CONFIG.block)
    span = cdiv(tiles, multiprocessors(x.device) * FORWARD_PROGRAMS)
    owner = None
    if tokens > ONE_LAUNCH_TOKENS:
        owner = torch.empty(tokens, dtype=torch.int32, device=x.device)
        launch(
            _owner_kernel, cdiv(tokens, _OWNER_BLOCK),
            (owner, offsets, users, search_steps(users), tokens), {"BLOCK": _OWNER_BLOCK},
        )  # fmt: skip
    launch(
        _target_kernel, cdiv(tiles, span),
        (
            x, target.contiguous(), weight.contiguous(),
            None if bias is None else bias.contiguous(), out, owner, offsets,
            users, tokens, span,
        ),
        {
            "X_STRIDE": x.stride(0), "ACTIVATION": activation, "D": dim, "K": columns,
            "BLOCK_D": block_size(dim, most), "BLOCK_K": block_size(columns, most),
            "TILE": FORWARD_CONFIG.block, "PRECISION": product_precision(x),
        },
        **FORWARD_CONFIG.options(),
    )  # fmt: skip
    return out


def launch_target_backward(
    d_out: Tensor,
    history: Tensor,
    target: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    offsets: Tensor,
    *,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of history, target, weight and bias, in their dtypes and shapes; empty for no
    bias."""
    x, y = rows_of_dims(history), rows_of_dims(d_out)
    (tokens, dim), columns, users = x.shape, weight.shape[0], target.shape[0]
    new = torch.empty if tokens else torch.zeros
    d_x = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    d_target = new((users, dim), dtype=target.dtype, device=x.device)
    d_weight = new((columns, 4 * dim), dtype=weight.dtype, device=x.device)
    d_bias = new(0 if bias is None else columns, dtype=weight.dtype, device=x.device)
    if tokens == 0:
        return d_x, d_target, d_weight, d_bias
    config = BACKWARD_CONFIGS[x.element_size()]
    units = tile_count(tokens, users, config.block)
    span = cdiv(units, multiprocessors(x.device) * BACKWARD_PROGRAMS[x.element_size()])
    programs = cdiv(units, span)
    target, weight = target.contiguous(), weight.contiguous()
    scratch = {"dtype": torch.float32, "device": x.device}
    share = cdiv(cdiv(users, _USERS), multiprocessors(x.device))
    user_programs = cdiv(users, _USERS * share)
    # Of each program of this pass [2, D + K], the user that it goes on with and the one that it
    # begins; behind these, [2, D, K] of all users.
    by_program = torch.empty(programs * 2 * (dim + columns + dim * columns), **scratch)
    # Of each user [D + K]; behind these, [D + 1, K] of each program of the pass over users.
    by_user = torch.empty(users * (dim + columns) + user_programs * (dim + 1) * columns, **scratch)
    walk = (users, search_steps(users), units, span)
    shape = {
        "D": dim, "K": columns, "BLOCK_D": block_size(dim, MOST_FUSED),
        "BLOCK_K": block_size(columns, MOST_FUSED),
    }  # fmt: skip
    launch(
        _target_backward_kernel, programs,
        (
            x, y, target, weight, None if bias is None else bias.contiguous(), d_x, by_user,
            by_program, offsets, *walk,
        ),
        {
            "X_STRIDE": x.stride(0), "Y_STRIDE": y.stride(0), "ACTIVATION": activation, **shape,
            "TILE": config.block, "PRECISION": product_precision(x),
        },
        **config.options(),
    )  # fmt: skip
    if programs > 1:
        launch(
            merge_kernel, (programs - 1, cdiv(dim + columns, MERGE_BLOCK.value)),
            (by_program, by_user, None, offsets, None, None, *walk),
            {"MATRIX": dim + columns, "K": 1, "SIZE": dim + columns, "TILE": config.block},
            num_warps=8,
        )  # fmt: skip
    launch(
        _users_kernel, user_programs,
        (by_user, target, weight, d_target, users, share),
        {**shape, "USERS": _USERS, "PRECISION": sum_precision(x)},
        num_warps=8, num_stages=1,
    )  # fmt: skip
    launch(
        _weight_sums_kernel, cdiv(dim * columns, _SUM_BLOCK),
        (
            by_program, by_user, d_weight, None if bias is None else d_bias,
            programs, users, user_programs,
        ),
        {"D": dim, "K": columns, "BLOCK": _SUM_BLOCK}, num_warps=8,
    )  # fmt: skip
    return d_x, d_target, d_weight, d_bias


@triton.jit
def _load_parts(
    weight_ptr, dtype: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_D, BLOCK_K] each: what multiplies a token, what multiplies token times target, and
    what multiplies the target."""
    shared = _load_shared(weight_ptr, D, K, BLOCK_D, BLOCK_K)
    scaled = _load_part(weight_ptr, 3, D, K, BLOCK_D, BLOCK_K)
    of_target = _load_of_target(weight_ptr, D, K, BLOCK_D, BLOCK_K)
    return shared.to(dtype), scaled.to(dtype), of_target.to(dtype)


@triton.jit
def _load_shared(
    weight_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr
):
    shared = _load_part(weight_ptr, 0, D, K, BLOCK_D, BLOCK_K)
    return shared + _load_part(weight_ptr, 2, D, K, BLOCK_D, BLOCK_K)


@triton.jit
def _load_of_target(
    weight_ptr, D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr
):
    of_target = _load_part(weight_ptr, 1, D, K, BLOCK_D, BLOCK_K)
    return of_target - _load_part(weight_ptr, 2, D, K, BLOCK_D, BLOCK_K)


@triton.jit
def _load_part(
    weight_ptr, part, D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr
):
    """One of the four matrices of the weight, transposed."""
    matrix = load_weight(weight_ptr + part * D, 1, 4 * D, 0, 0, D, K, BLOCK_D, BLOCK_K)
    return matrix.to(tl.float32)


@triton.jit(do_not_specialize=["users", "steps", "tokens"])
def _owner_kernel(owner_ptr, offsets_ptr, users, steps, tokens, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    # Most tokens are then found in a few steps: the last users that begin before the block and
    # in it lie close together.
    last = user_of_slot(offsets_ptr, users, steps, block, BLOCK)
    first = user_of_slot(offsets_ptr, users, steps, tl.maximum(block - 1, 0), BLOCK)
    first = tl.where(block == 0, 0, first)
    user = user_among(offsets_ptr, first, last + 1 - first, tl.minimum(token, tokens - 1))
    tl.store(owner_ptr + token, user, mask=token < tokens)


@triton.jit(do_not_specialize=["users", "tokens", "span"])
def _target_kernel(
    x_ptr, target_ptr, weight_ptr, bias_ptr, out_ptr, owner_ptr, offsets_ptr, users, tokens, span,
    X_STRIDE: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr, K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    shared, scaled, of_target = _load_parts(weight_ptr, dtype, D, K, BLOCK_D, BLOCK_K)
    bias = tl.zeros([BLOCK_K], tl.float32)
    if bias_ptr is not None:
        bias = load_row(bias_ptr, 0, 0, K, BLOCK_K)
    column = tl.arange(0, BLOCK_D)
    first = tl.program_id(0) * span * TILE
    for start in range(first, tl.minimum(first + span * TILE, tokens), TILE):
        x = load_block(x_ptr, start, tokens, X_STRIDE, TILE, D, BLOCK_D, KEPT=False)
        token = start + tl.arange(0, TILE)
        if owner_ptr is None:
            user = user_of(offsets_ptr, users, tl.minimum(token, tokens - 1))
        else:
            user = tl.load(owner_ptr + token, mask=token < tokens, other=0)
        address = target_ptr + user.to(tl.int64)[:, None] * D + column[None, :]
        target = tl.load(address, mask=column[None, :] < D, other=0.0)
        out = dot(x, shared, PRECISION)
        out = add_dot(out, x * target, scaled, PRECISION)
        out = add_dot(out, target, of_target, PRECISION) + bias[None, :]
        out = activate(out, ACTIVATION, out_ptr.dtype.element_ty)
        store_block(out_ptr, out, start, tokens, K, TILE, K, BLOCK_K, KEPT=False)


@triton.jit(do_not_specialize=["users", "steps", "units", "span"])
def _target_backward_kernel(
    x_ptr, y_ptr, target_ptr, weight_ptr, bias_ptr, dx_ptr, by_user_ptr, by_program_ptr,
    offsets_ptr, users, steps, units, span,
    X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, ACTIVATION: tl.constexpr, D: tl.constexpr,
    K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr, TILE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    low = program * span
    high = tl.minimum(low + span, units)
    first_user = user_of_tile(offsets_ptr, users, steps, low, TILE)
    last_user = user_of_tile(offsets_ptr, users, steps, high - 1, TILE)
    rows, columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    of_target = _load_of_target(weight_ptr, D, K, BLOCK_D, BLOCK_K).to(dtype)
    bias = tl.zeros([BLOCK_K], tl.float32)
    if bias_ptr is not None:
        bias = load_row(bias_ptr, 0, 0, K, BLOCK_K)
    d_shared = tl.zeros([BLOCK_D, BLOCK_K], tl.float32)
    d_scaled = tl.zeros([BLOCK_D, BLOCK_K], tl.float32)
    every_row = tl.zeros([16, BLOCK_K], tl.int32)
    first_row = (tl.arange(0, 16)[:, None] == 0) & (columns[None, :] < K)
    following = load_row(target_ptr, first_user.to(tl.int64), 0, D, BLOCK_D)
    user_end = tl.load(offsets_ptr + first_user)
    following_end = tl.load(offsets_ptr + first_user + 1)
    for index in range(0, last_user + 1 - first_user):
        user = first_user + index
        target, user_start, user_end = following, user_end, following_end
        # Asked for now, they are there when their user comes.
        next_user = tl.minimum(user + 1, last_user)
        following = load_row(target_ptr, next_user.to(tl.int64), 0, D, BLOCK_D)
        following_end = tl.load(offsets_ptr + next_user + 1)
        # Read for each user, and again behind its tokens, from the cache: in registers, weights
        # would drive other things out of them.
        shared = _load_shared(weight_ptr, D, K, BLOCK_D, BLOCK_K)
        scaled = _load_part(weight_ptr, 3, D, K, BLOCK_D, BLOCK_K)
        weight = fold(shared, scaled, target, dtype)
        targets = tl.broadcast_to(target[None, :], [16, BLOCK_D]).to(dtype)
        user_bias = bias + tl.max(dot(targets, of_target, PRECISION), 0)
        begin = (user_start // TILE).to(tl.int32) + user
        end = (user_end // TILE).to(tl.int32) + user + 1
        acc, total = add_tiles(
            tl.zeros([BLOCK_D, BLOCK_K], tl.float32), tl.zeros([16, BLOCK_K], tl.float32),
            user_start + tl.maximum(low - begin, 0) * TILE,
            tl.minimum(user_start + (high - begin) * TILE, user_end),
            x_ptr, y_ptr, dx_ptr, X_STRIDE, Y_STRIDE, weight, user_bias, 0, 0,
            ACTIVATION, D, K, BLOCK_D, BLOCK_K, TILE, PRECISION,
        )  # fmt: skip
        d_shared += acc
        d_scaled += target[:, None] * acc
        scaled = _load_part(weight_ptr, 3, D, K, BLOCK_D, BLOCK_K)
        d_target = tl.sum(scaled * acc, 1, keep_dims=True)
        if (begin >= low) & (end <= high):
            place = by_user_ptr + user.to(tl.int64) * (D + K)
        else:
            slot = program * 2 + (begin >= low).to(tl.int32)
            place = by_program_ptr + slot.to(tl.int64) * (D + K)
        tl.store(place + rows[:, None], d_target, mask=rows[:, None] < D)
        tl.store(place + D + every_row + columns[None, :], total, mask=first_row)
    sums_ptr = _behind(by_program_ptr, tl.num_programs(0), 2 * (D + K))
    sums_ptr += program.to(tl.int64) * (2 * D * K)
    place = rows[:, None] * K + columns[None, :]
    inside = (rows[:, None] < D) & (columns[None, :] < K)
    tl.store(sums_ptr + place, d_shared, mask=inside)
    tl.store(sums_ptr + D * K + place, d_scaled, mask=inside)


@triton.jit(do_not_specialize=["users", "share"])
def _users_kernel(
    by_user_ptr, target_ptr, weight_ptr, d_target_ptr, users, share,
    D: tl.constexpr, K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    USERS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Finishes the gradients of targets, and adds up those of what multiplies them, of `share`
    times USERS users a program."""
    rows, columns = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_K)
    of_target = _load_of_target(weight_ptr, D, K, BLOCK_D, BLOCK_K)
    d_of_target = tl.zeros([BLOCK_D, BLOCK_K], tl.float32)
    d_bias = tl.zeros([BLOCK_K], tl.float32)
    for step in range(0, share):
        first = (tl.program_id(0) * share + step) * USERS
        d_target = load_block(by_user_ptr, first, users, D + K, USERS, D, BLOCK_D)
        d_user_bias = load_block(by_user_ptr + D, first, users, D + K, USERS, K, BLOCK_K)
        target = load_block(target_ptr, first, users, D, USERS, D, BLOCK_D).to(tl.float32)
        d_target += dot(d_user_bias, tl.trans(of_target), PRECISION)
        store_block(d_target_ptr, d_target, first, users, D, USERS, D, BLOCK_D)
        d_of_target = add_dot(d_of_target, tl.trans(target), d_user_bias, PRECISION)
        d_bias += tl.sum(d_user_bias, 0)
    sums_ptr = _behind(by_user_ptr, users, D + K)
    sums_ptr += tl.program_id(0).to(tl.int64) * (D * K + K)
    place = rows[:, None] * K + columns[None, :]
    tl.store(sums_ptr + place, d_of_target, mask=(rows[:, None] < D) & (columns[None, :] < K))
    tl.store(sums_ptr + D * K + columns, d_bias, mask=columns < K)


@triton.jit
def _behind(ptr, rows, WIDTH: tl.constexpr):
    """Where what lies behind [rows, WIDTH] begins."""
    return ptr + rows.to(tl.int64) * WIDTH


@triton.jit(do_not_specialize=["programs", "users", "user_programs"])
def _weight_sums_kernel(
    by_program_ptr, by_user_ptr, d_weight_ptr, d_bias_ptr, programs, users, user_programs,
    D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up the sums of all programs and puts the parts of the weight in their places."""
    sums_ptr = _behind(by_program_ptr, programs, 2 * (D + K))
    user_sums_ptr = _behind(by_user_ptr, users, D + K)
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < D * K
    shared = _sum_programs(sums_ptr + element, inside, programs, 2 * D * K, BLOCK)
    scaled = _sum_programs(sums_ptr + D * K + element, inside, programs, 2 * D * K, BLOCK)
    of_target = _sum_programs(user_sums_ptr + element, inside, user_programs, D * K + K, BLOCK)
    dtype = d_weight_ptr.dtype.element_ty
    place = d_weight_ptr + element % K * (4 * D) + element // K
    tl.store(place, shared.to(dtype), mask=inside)
    tl.store(place + D, of_target.to(dtype), mask=inside)
    tl.store(place + 2 * D, (shared - of_target).to(dtype), mask=inside)
    tl.store(place + 3 * D, scaled.to(dtype), mask=inside)
    if d_bias_ptr is not None:
        bias_ptr = user_sums_ptr + D * K + element
        bias = _sum_programs(bias_ptr, element < K, user_programs, D * K + K, BLOCK)
        tl.store(d_bias_ptr + element, bias.to(dtype), mask=element < K)


@triton.jit
def _sum_programs(ptr, inside, programs, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, programs, _SUM_ROWS):
        program = first + tl.arange(0, _SUM_ROWS)[:, None]
        address = ptr[None, :] + program.to(tl.int64) * STRIDE
        part = tl.load(address, mask=(program < programs) & inside[None, :], other=0.0)
        total += tl.sum(part, 0)
    return total
