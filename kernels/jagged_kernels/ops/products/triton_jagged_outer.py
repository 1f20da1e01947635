"""The kernel of `jagged_outer`. Its gradient is in `triton_jagged2_matmul`, which reads as this
writes.

Memory is what takes time, and a user's matrix begins and its rows end at any address. But rows that
lie a multiple of STEP apart begin alike, modulo STEP numbers: so a program takes such rows, whose
words of STEP numbers it moves as one, and by themselves the few numbers at a row's ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import LaunchConfig, block_size
from jagged_kernels.device.arithmetic import add_dot, product_precision
from jagged_kernels.device.float32 import dot
from jagged_kernels.device.search import first_strip, search_steps, strip_count, user_of_strip
from jagged_kernels.device.squares import is_below, least_step, load_square, tokens_at
from jagged_kernels.ops.products.triton_jagged2_matmul import widest_tokens


@dataclass(frozen=True)
class OuterConfig(LaunchConfig):
    """Attributes beside those of `LaunchConfig`, for `block` columns of scores:
    tile: rows of a block.
    step: from one of its rows to the next at most, and numbers that a thread stores as one.
    blocks: beside each other in a piece, for one read of its rows.
    """

    tile: int = 64
    step: int = 4
    blocks: int = 4


# By bytes of a number.
OUTER_CONFIGS = {2: OuterConfig(128, 8, 3, 128), 4: OuterConfig(64, 4, 3, 168, step=2)}


def launch_outer(
    x: Tensor, y: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int
) -> Tensor:
    """[total] in x's dtype: x_b y_b^T of every user, row by row."""
    x, y = rows_of_dims(x), rows_of_dims(y)
    (tokens, dim), users = x.shape, offsets.shape[0] - 1
    out = torch.empty(total, dtype=x.dtype, device=x.device)
    if total == 0:
        return out
    config, block_d = OUTER_CONFIGS[x.element_size()], block_size(dim, widest_tokens(x))
    if dim > 64:
        config = replace(config, block=64, num_warps=4, registers=None)
    piece = config.block * config.blocks
    launch(
        _outer_kernel, strip_count(tokens, users, total, config.tile * config.step, piece),
        (
            x, y, out, offsets, matrix_offsets,
            users, search_steps(users),
        ),
        {
            "X_STRIDE": x.stride(0), "Y_STRIDE": y.stride(0), "D": dim, "BLOCK_D": block_d,
            "TILE": config.tile, "STEP": config.step, "BLOCK": config.block, "PIECE": piece,
            "PRECISION": product_precision(x),
        },
        **config.options(),
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["users", "steps"])
def _outer_kernel(
    x_ptr, y_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
    X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A piece each."""
    ROWS: tl.constexpr = TILE * STEP
    # Another way through the kernel costs float32 registers that it does not have.
    HALF: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    piece = tl.program_id(0)
    user = user_of_strip(offsets_ptr, matrix_offsets_ptr, users, steps, piece, ROWS, PIECE)
    start, size, matrix = load_square(offsets_ptr, matrix_offsets_ptr, user)
    number = piece - first_strip(offsets_ptr, matrix_offsets_ptr, user, True, ROWS, PIECE)
    across = tl.cdiv(size, PIECE)
    if number >= tl.cdiv(size, ROWS) * across:
        return
    x_ptr += start * X_STRIDE
    y_ptr += start * Y_STRIDE
    small = size <= TILE if HALF else False
    if small:
        _small_square(
            x_ptr, y_ptr, out_ptr + matrix, size,
            X_STRIDE, Y_STRIDE, D, BLOCK_D, TILE, PRECISION,
        )  # fmt: skip
    else:
        _outer_piece(
            x_ptr, y_ptr, out_ptr, matrix, size, number // across * ROWS, number % across * PIECE,
            X_STRIDE, Y_STRIDE, D, BLOCK_D, TILE, STEP, BLOCK, PIECE, PRECISION,
        )  # fmt: skip


@triton.jit
def _small_square(
    x_ptr, y_ptr, out_ptr, size, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All scores of a user of up to TILE tokens, number by number: memory waits for its tokens,
    once, and few scores are all the same to it."""
    token = tl.arange(0, TILE)
    x = tokens_at(x_ptr, token, size, X_STRIDE, 0, D, BLOCK_D)
    scores = _scores(x, x_ptr, y_ptr, token, token, size, X_STRIDE, Y_STRIDE, D, BLOCK_D, PRECISION)
    exists = token < size
    address = out_ptr + (token * size)[:, None] + token[None, :]
    scores = scores.to(out_ptr.dtype.element_ty)
    tl.store(address, scores, mask=exists[:, None] & exists[None, :])


@triton.jit
def _outer_piece(
    x_ptr, y_ptr, out_ptr, matrix, size, row, column,
    X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of TILE * STEP rows with PIECE columns, by rows that begin alike."""
    step = least_step(size, STEP)
    rows = tl.minimum(TILE * STEP, size - row)
    full, left = rows // (TILE * step), rows % (TILE * step)
    parts = full * step + tl.minimum(step, left)
    number = tl.arange(0, TILE) * step
    # Of half types a part ahead; float32 has no registers for that.
    AHEAD: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    if AHEAD:
        following = tokens_at(x_ptr, row + number, size, X_STRIDE, 0, D, BLOCK_D)
    for part in range(0, parts):
        part_row = row + part // step * (TILE * step) + part % step
        if AHEAD:
            x = following
            after = tl.minimum(part + 1, parts - 1)
            after_row = row + after // step * (TILE * step) + after % step
            following = tokens_at(x_ptr, after_row + number, size, X_STRIDE, 0, D, BLOCK_D)
        else:
            x = tokens_at(x_ptr, part_row + number, size, X_STRIDE, 0, D, BLOCK_D)
        _outer_rows(
            x, x_ptr, y_ptr, out_ptr, matrix, size, part_row, step, column,
            X_STRIDE, Y_STRIDE, D, BLOCK_D, TILE, STEP, BLOCK, PIECE, PRECISION,
        )  # fmt: skip


@triton.jit
def _outer_rows(
    x, x_ptr, y_ptr, out_ptr, matrix, size, row, step, column,
    X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of TILE rows, each `step` behind the one before, with PIECE columns.

    In memory these rows begin at the same place modulo STEP numbers: from there a thread stores
    words of STEP numbers. The columns begin with the word that `column` is in. x has the first
    BLOCK_D columns of the rows' tokens.
    """
    number = tl.arange(0, TILE)
    begin = matrix + row.to(tl.int64) * size
    before = (begin % STEP).to(tl.int32)
    exists = (row + number * step < size)[:, None]
    place = tl.arange(0, BLOCK)
    # Not `begin - before`: the compiler must see that it is a multiple.
    word_ptr = out_ptr + begin // STEP * STEP + column
    word_ptr = word_ptr + (number * (size * step // STEP * STEP))[:, None] + place[None, :]
    first = column - before
    count = tl.where(column + PIECE < size, PIECE, size - first)
    for done in range(0, count, BLOCK):
        block = first + done
        scores = _scores(
            x, x_ptr, y_ptr, row + number * step, block + place, size,
            X_STRIDE, Y_STRIDE, D, BLOCK_D, PRECISION,
        )  # fmt: skip
        scores = scores.to(out_ptr.dtype.element_ty)
        address = word_ptr + done
        # Multiples, again: words of the row alone.
        low = (block < 0).to(tl.int32) * STEP
        high = (size - block) // STEP * STEP
        whole = (place >= low) & (place < high)
        tl.store(address, scores, mask=exists & whole[None, :])
        if STEP > 1:
            parts = is_below(block + place, size) & ((place < low) | (place >= high))
            if (block < 0) | (block + BLOCK > size):
                tl.store(address, scores, mask=exists & parts[None, :])


@triton.jit
def _scores(
    x, x_ptr, y_ptr, rows, columns, size, X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """[rows, columns] float32 of a user's tokens, of which x has the first BLOCK_D columns."""
    y = tokens_at(y_ptr, columns, size, Y_STRIDE, 0, D, BLOCK_D)
    left, right = _factors(x, y)
    scores = dot(left, right, PRECISION)
    for depth in range(BLOCK_D, D, BLOCK_D):
        x_more = tokens_at(x_ptr, rows, size, X_STRIDE, depth, D, BLOCK_D)
        y = tokens_at(y_ptr, columns, size, Y_STRIDE, depth, D, BLOCK_D)
        left, right = _factors(x_more, y)
        scores = add_dot(scores, left, right, PRECISION)
    return tl.trans(scores) if x.dtype == tl.float32 else scores


@triton.jit
def _factors(x, y):
    """The factors of x y^T, or of its transpose for float32: those are split into parts, of the
    left factor in registers, and x, on the right, is the same for all blocks."""
    if x.dtype == tl.float32:
        return y, tl.trans(x)
    return x, tl.trans(y)
