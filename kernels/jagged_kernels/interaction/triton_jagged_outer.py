"""The kernels of `jagged_outer` and `jagged2_matmul`; each is the other's gradient.

Memory is what takes time: a user's matrix begins and its rows end at any address, so it is moved
value by value, and what matters is that a program touches it once and many are on their way.
"""

# Triton's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.tiles import LaunchConfig
from jagged_kernels.attention.triton_blocks import add_dot
from jagged_kernels.backends import multiprocessors
from jagged_kernels.interaction.triton_linear import block_size, product_precision, unit_stride
from jagged_kernels.interaction.triton_tiles import (
    first_strip,
    first_tile,
    load_tile,
    search_steps,
    store_tile,
    strip_count,
    tile_count,
    user_of_strip,
    user_of_tile,
)
from jagged_kernels.launch import cdiv, launch


@dataclass(frozen=True)
class OuterConfig(LaunchConfig):
    """Attributes beside those of `LaunchConfig`, for blocks [block, block] of scores:
    blocks: beside each other in a piece, for one read of its rows.
    programs: spans of pieces, a multiprocessor.
    """

    blocks: int = 4
    programs: int = 16


@dataclass(frozen=True)
class MatmulConfig(LaunchConfig):
    """Attributes beside those of `LaunchConfig`, for `block` columns of a matrix:
    tile: rows a program.
    """

    tile: int = 64


# By bytes of a number, measured on an H100.
OUTER_CONFIGS = {2: OuterConfig(64, 8, 2), 4: OuterConfig(64, 4, 2)}
MATMUL_CONFIGS = {2: MatmulConfig(64, 4, 2, 128), 4: MatmulConfig(32, 4, 3)}
TRANSPOSED_CONFIGS = {2: MatmulConfig(32, 4, 2, 128), 4: MatmulConfig(32, 4, 3)}
BACKWARD_CONFIGS = {2: MatmulConfig(32, 4, 2, 128), 4: MatmulConfig(32, 4, 3)}


def launch_outer(
    x: Tensor, y: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int
) -> Tensor:
    """[total] in x's dtype: x_b y_b^T of every user, row by row."""
    x, y = unit_stride(x), unit_stride(y)
    (tokens, dim), users = x.shape, offsets.shape[0] - 1
    out = torch.empty(total, dtype=x.dtype, device=x.device)
    if total == 0:
        return out
    config = OUTER_CONFIGS[x.element_size()]
    piece = config.block * config.blocks
    pieces = strip_count(tokens, users, total, config.block, piece)
    span = cdiv(pieces, multiprocessors(x.device) * config.programs)
    launch(
        _outer_kernel, cdiv(pieces, span),
        (
            x, y, out, offsets.contiguous(), matrix_offsets.contiguous(),
            users, search_steps(users), pieces, span,
        ),
        {
            "X_STRIDE": x.stride(0), "Y_STRIDE": y.stride(0), "D": dim,
            "BLOCK_D": block_size(dim, _depth(x)), "TILE": config.block, "PIECE": piece,
            "PRECISION": product_precision(x),
        },
        **config.options(),
    )  # fmt: skip
    return out


def launch_matmul(
    m: Tensor, x: Tensor, offsets: Tensor, matrix_offsets: Tensor, *, transpose: bool
) -> Tensor:
    """[T, D] in x's dtype: m_b x_b of every user, or m_b^T x_b."""
    x = unit_stride(x)
    (tokens, dim), users = x.shape, offsets.shape[0] - 1
    out = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    config, block_d = _matmul_config(TRANSPOSED_CONFIGS if transpose else MATMUL_CONFIGS, x)
    launch(
        _matmul_kernel, tile_count(tokens, users, config.tile) * cdiv(dim, block_d),
        (
            m.contiguous(), x, out, offsets.contiguous(), matrix_offsets.contiguous(),
            users, search_steps(users),
        ),
        {
            "X_STRIDE": x.stride(0), "TRANSPOSE": transpose, "D": dim, "BLOCK_D": block_d,
            "TILE": config.tile, "BLOCK": config.block, "PRECISION": product_precision(x),
        },
        **config.options(),
    )  # fmt: skip
    return out


def launch_outer_backward(
    d_out: Tensor, x: Tensor, y: Tensor, offsets: Tensor, matrix_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, dy) [T, D] of `launch_outer`, for d_out [total]."""
    x, y = unit_stride(x), unit_stride(y)
    (tokens, dim), users = x.shape, offsets.shape[0] - 1
    d_x = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    d_y = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return d_x, d_y
    config, block_d = _matmul_config(BACKWARD_CONFIGS, x)
    tiles = tile_count(tokens, users, config.tile) * cdiv(dim, block_d)
    launch(
        _outer_backward_kernel, 2 * tiles,
        (
            d_out.contiguous(), x, y, d_x, d_y, offsets.contiguous(), matrix_offsets.contiguous(),
            users, search_steps(users),
        ),
        {
            "X_STRIDE": x.stride(0), "Y_STRIDE": y.stride(0), "D": dim, "BLOCK_D": block_d,
            "TILE": config.tile, "BLOCK": config.block, "PRECISION": product_precision(x),
        },
        **config.options(),
    )  # fmt: skip
    return d_x, d_y


def _matmul_config(configs: dict[int, MatmulConfig], x: Tensor) -> tuple[MatmulConfig, int]:
    """And the columns of x that a program takes."""
    config, block_d = configs[x.element_size()], block_size(x.shape[1], _depth(x))
    if block_d > 64:
        config = replace(config, num_warps=8, registers=None)
    return config, block_d


def _depth(x: Tensor) -> int:
    """The most columns of tokens that a program holds."""
    return 128 if x.element_size() == 2 else 64


@triton.jit(do_not_specialize=["users", "steps", "pieces", "span"])
def _outer_kernel(
    x_ptr, y_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users, steps, pieces, span,
    X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    low = tl.program_id(0) * span
    high = tl.minimum(low + span, pieces)
    first_user = user_of_strip(offsets_ptr, matrix_offsets_ptr, users, steps, low, TILE, PIECE)
    last_user = user_of_strip(offsets_ptr, matrix_offsets_ptr, users, steps, high - 1, TILE, PIECE)
    for index in range(0, last_user + 1 - first_user):
        user = first_user + index
        start, end = tl.load(offsets_ptr + user), tl.load(offsets_ptr + user + 1)
        size = (end - start).to(tl.int32)
        begin = first_strip(offsets_ptr, matrix_offsets_ptr, user, True, TILE, PIECE)
        matrix_ptr = out_ptr + tl.load(matrix_offsets_ptr + user)
        across = tl.cdiv(size, PIECE)
        needed = tl.cdiv(size, TILE) * across
        for number in range(tl.maximum(low - begin, 0), tl.minimum(high - begin, needed)):
            row, column = number // across * TILE, number % across * PIECE
            rows = tl.arange(0, TILE)[:, None]
            row_ptr = matrix_ptr + row.to(tl.int64) * size
            x_first = load_tile(x_ptr, start + row, end, X_STRIDE, 0, D, TILE, BLOCK_D)
            for block in range(column, tl.minimum(column + PIECE, size), TILE):
                y = load_tile(y_ptr, start + block, end, Y_STRIDE, 0, D, TILE, BLOCK_D)
                scores = tl.dot(x_first, tl.trans(y), input_precision=PRECISION)
                for depth in range(BLOCK_D, D, BLOCK_D):
                    x = load_tile(x_ptr, start + row, end, X_STRIDE, depth, D, TILE, BLOCK_D)
                    y = load_tile(y_ptr, start + block, end, Y_STRIDE, depth, D, TILE, BLOCK_D)
                    scores = add_dot(scores, x, tl.trans(y), PRECISION)
                columns = block + tl.arange(0, TILE)[None, :]
                inside = (rows < size - row) & (columns < size)
                address = row_ptr + rows * size + columns
                tl.store(address, scores.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["users", "steps"])
def _matmul_kernel(
    m_ptr, x_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
    X_STRIDE: tl.constexpr, TRANSPOSE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    _multiply(
        tl.program_id(0), m_ptr, x_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
        X_STRIDE, TRANSPOSE, D, BLOCK_D, TILE, BLOCK, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["users", "steps"])
def _outer_backward_kernel(
    m_ptr, x_ptr, y_ptr, dx_ptr, dy_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
    X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Programs for rows and for columns of a user run beside each other, so that one of the two
    # reads of its matrix is from cache.
    program = tl.program_id(0) // 2
    if tl.program_id(0) % 2 == 0:
        _multiply(
            program, m_ptr, y_ptr, dx_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
            Y_STRIDE, False, D, BLOCK_D, TILE, BLOCK, PRECISION,
        )  # fmt: skip
    else:
        _multiply(
            program, m_ptr, x_ptr, dy_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
            X_STRIDE, True, D, BLOCK_D, TILE, BLOCK, PRECISION,
        )  # fmt: skip


@triton.jit
def _multiply(
    program, m_ptr, x_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
    X_STRIDE: tl.constexpr, TRANSPOSE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of m x, or of m^T x."""
    D_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    tile, depth = program // D_BLOCKS, program % D_BLOCKS * BLOCK_D
    user = user_of_tile(offsets_ptr, users, steps, tile, TILE)
    start, end = tl.load(offsets_ptr + user), tl.load(offsets_ptr + user + 1)
    size = (end - start).to(tl.int32)
    row = (tile - first_tile(offsets_ptr, user, TILE)) * TILE
    if row < size:
        m_ptr += tl.load(matrix_offsets_ptr + user)
        m_ptr += row if TRANSPOSE else row.to(tl.int64) * size
        rows = tl.arange(0, TILE)[:, None]
        acc = tl.zeros([TILE, BLOCK_D], tl.float32)
        for block in range(0, size, BLOCK):
            # 64-bit products for a block's start alone: TILE or BLOCK times size is not as long.
            columns = tl.arange(0, BLOCK)[None, :]
            if TRANSPOSE:
                address = m_ptr + block * size.to(tl.int64) + columns * size + rows
            else:
                address = m_ptr + block + rows * size + columns
            inside = (rows < size - row) & (columns < size - block)
            weights = tl.load(address, mask=inside, other=0.0)
            x = load_tile(x_ptr, start + block, end, X_STRIDE, depth, D, BLOCK, BLOCK_D)
            acc = add_dot(acc, weights, x, PRECISION)
        store_tile(out_ptr, acc, start + row, end, depth, D, TILE, BLOCK_D)
