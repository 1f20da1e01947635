"""The kernels of `jagged2_matmul` and of the gradient of `jagged_outer`: products with a user's
matrix or its transpose.

Rows of a matrix are read in words, of rows that begin alike, as `triton_jagged_outer` writes them;
of a transposed matrix, numbers one by one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import LaunchConfig, block_size, cdiv
from jagged_kernels.device.arithmetic import add_products, product_precision, sum_products
from jagged_kernels.device.search import search_steps, tile_count
from jagged_kernels.device.squares import is_below, least_step, load_rows, tokens_at


@dataclass(frozen=True)
class MatmulConfig(LaunchConfig):
    """Attributes beside those of `LaunchConfig`, for `block` columns of a matrix:
    tile: rows a program.
    step: from one of its rows to the next at most, and numbers that a thread loads as one, up to 8.
    """

    tile: int = 64
    step: int = 2


# By bytes of a number.
MATMUL_CONFIGS = {2: MatmulConfig(64, 4, 3, step=4), 4: MatmulConfig(32, 4, 3, 168)}
TRANSPOSED_CONFIGS = {
    2: MatmulConfig(32, 4, 3, 80, step=1),
    4: MatmulConfig(32, 4, 3, 168, step=1),
}
BACKWARD_CONFIGS = {2: MatmulConfig(32, 4, 3, 80), 4: MatmulConfig(32, 4, 3, 168)}


def launch_matmul(
    m: Tensor, x: Tensor, offsets: Tensor, matrix_offsets: Tensor, *, transpose: bool
) -> Tensor:
    """[T, D] in x's dtype: m_b x_b of every user, or m_b^T x_b."""
    x = rows_of_dims(x)
    (tokens, dim), users = x.shape, offsets.shape[0] - 1
    out = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return out
    config, block_d = _matmul_config(TRANSPOSED_CONFIGS if transpose else MATMUL_CONFIGS, x)
    launch(
        _matmul_kernel, _tiles(tokens, users, config) * cdiv(dim, block_d),
        (
            m.contiguous(), x, out, offsets, matrix_offsets,
            users, search_steps(users),
        ),
        {
            "X_STRIDE": x.stride(0), "TRANSPOSE": transpose, "D": dim, "BLOCK_D": block_d,
            "TILE": config.tile, "STEP": config.step, "BLOCK": config.block,
            "PRECISION": product_precision(x),
        },
        **config.options(),
    )  # fmt: skip
    return out


def launch_outer_backward(
    d_out: Tensor, x: Tensor, y: Tensor, offsets: Tensor, matrix_offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """(dx, dy) [T, D] of `launch_outer`, for d_out [total]."""
    x, y = rows_of_dims(x), rows_of_dims(y)
    (tokens, dim), users = x.shape, offsets.shape[0] - 1
    d_x = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    d_y = torch.empty((tokens, dim), dtype=x.dtype, device=x.device)
    if tokens == 0:
        return d_x, d_y
    config, block_d = _matmul_config(BACKWARD_CONFIGS, x)
    tiles = _tiles(tokens, users, config) * cdiv(dim, block_d)
    launch(
        _outer_backward_kernel, 2 * tiles,
        (
            d_out.contiguous(), x, y, d_x, d_y, offsets, matrix_offsets,
            users, search_steps(users),
        ),
        {
            "X_STRIDE": x.stride(0), "Y_STRIDE": y.stride(0), "D": dim, "BLOCK_D": block_d,
            "TILE": config.tile, "STEP": config.step, "BLOCK": config.block,
            "PRECISION": product_precision(x),
        },
        **config.options(),
    )  # fmt: skip
    return d_x, d_y


def _matmul_config(configs: dict[int, MatmulConfig], x: Tensor) -> tuple[MatmulConfig, int]:
    """And the columns of x that a program takes."""
    config, block_d = configs[x.element_size()], block_size(x.shape[1], widest_tokens(x))
    if block_d > 64:
        config = replace(config, num_warps=8, registers=None)
    return config, block_d


def widest_tokens(x: Tensor) -> int:
    """The most columns of tokens that a program holds, of `jagged_outer`, too."""
    return 128 if x.element_size() == 2 else 64


def _tiles(tokens: int, users: int, config: MatmulConfig) -> int:
    return tile_count(tokens, users, config.tile * config.step) * config.step


@triton.jit(do_not_specialize=["users", "steps"])
def _matmul_kernel(
    m_ptr, x_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
    X_STRIDE: tl.constexpr, TRANSPOSE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    _multiply(
        tl.program_id(0), m_ptr, x_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
        X_STRIDE, TRANSPOSE, D, BLOCK_D, TILE, STEP, BLOCK, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["users", "steps"])
def _outer_backward_kernel(
    m_ptr, x_ptr, y_ptr, dx_ptr, dy_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
    X_STRIDE: tl.constexpr, Y_STRIDE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Programs for rows and for columns of a user run beside each other, so that one of the two
    # reads of its matrix is from cache.
    program = tl.program_id(0) // 2
    if tl.program_id(0) % 2 == 0:
        _multiply(
            program, m_ptr, y_ptr, dx_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
            Y_STRIDE, False, D, BLOCK_D, TILE, STEP, BLOCK, PRECISION,
        )  # fmt: skip
    else:
        _multiply(
            program, m_ptr, x_ptr, dy_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
            X_STRIDE, True, D, BLOCK_D, TILE, STEP, BLOCK, PRECISION,
        )  # fmt: skip


@triton.jit
def _multiply(
    program, m_ptr, x_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users, steps,
    X_STRIDE: tl.constexpr, TRANSPOSE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of m x, or of m^T x: of TILE * STEP rows of the result a part, of m x rows that
    begin alike."""
    D_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    tile, depth = program // D_BLOCKS, program % D_BLOCKS * BLOCK_D
    tile, part = tile // STEP, tile % STEP
    _, start, size, matrix, row = load_rows(
        offsets_ptr, matrix_offsets_ptr, users, steps, tile, TILE * STEP
    )
    step = 1 if TRANSPOSE else least_step(size, STEP)
    row += part // step * (TILE * step) + part % step
    if row < size:
        x_ptr += start * X_STRIDE
        rows = row + tl.arange(0, TILE) * step
        if TRANSPOSE:
            acc = _columns_times(
                m_ptr + matrix, x_ptr, size, row, depth,
                X_STRIDE, D, BLOCK_D, TILE, BLOCK, PRECISION,
            )  # fmt: skip
        else:
            acc = _rows_times(
                m_ptr, x_ptr, matrix, size, row, step, depth,
                X_STRIDE, D, BLOCK_D, TILE, STEP, BLOCK, PRECISION,
            )  # fmt: skip
        columns = (depth + tl.arange(0, BLOCK_D))[None, :]
        address = out_ptr + (start + rows)[:, None] * D + columns
        inside = (rows < size)[:, None] & (columns < D)
        tl.store(address, acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _columns_times(
    m_ptr, x_ptr, size, row, depth, X_STRIDE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """TILE columns of a user's matrix from `row` on, times its tokens: [TILE, BLOCK_D]."""
    # Copies to shared memory, which Triton makes blocks ahead, have four bytes at least: words of
    # two are asked for one block ahead here.
    AHEAD: tl.constexpr = m_ptr.dtype.element_ty.primitive_bitwidth < 32
    place = tl.arange(0, BLOCK)
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    rest = tl.zeros([TILE, BLOCK_D], tl.float32)
    following = _load_columns(m_ptr, size, row, 0, TILE, BLOCK)
    for block in range(0, size, BLOCK):
        if AHEAD:
            weights = following
            following = _load_columns(m_ptr, size, row, block + BLOCK, TILE, BLOCK)
        else:
            weights = _load_columns(m_ptr, size, row, block, TILE, BLOCK)
        x = tokens_at(x_ptr, block + place, size, X_STRIDE, depth, D, BLOCK_D)
        acc, rest = add_products(acc, rest, weights, x, PRECISION)
    return sum_products(acc, rest, PRECISION)


@triton.jit
def _load_columns(m_ptr, size, row, block, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """[TILE, BLOCK]: columns from `row` on of a matrix's rows from `block` on, turned; 0 where it
    has none."""
    # What goes through registers is loaded as two halves: a thread then works out an address for
    # two numbers.
    SPLIT: tl.constexpr = m_ptr.dtype.element_ty.primitive_bitwidth < 32
    HEIGHT: tl.constexpr = TILE // 2 if SPLIT else TILE
    rows, place = tl.arange(0, HEIGHT)[:, None], tl.arange(0, BLOCK)[None, :]
    # A 64-bit product for a block's start alone: BLOCK times size is not as long.
    address = m_ptr + row + block * size.to(tl.int64) + place * size + rows
    inside = place < size - block
    tile = tl.load(address, mask=(rows < size - row) & inside, other=0.0)
    if SPLIT:
        below = (rows < size - row - HEIGHT) & inside
        second = tl.load(address + HEIGHT, mask=below, other=0.0)
        tile = tl.reshape(tl.permute(tl.join(tile, second), 2, 0, 1), [TILE, BLOCK])
    return tile


@triton.jit
def _rows_times(
    m_ptr, x_ptr, matrix, size, row, step, depth, X_STRIDE: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """TILE rows of a user's matrix, `step` apart, times its tokens: [TILE, BLOCK_D].

    As in `_outer_rows`, words of STEP numbers; columns before the first whole word of these rows
    and behind the last are a block of their own.
    """
    number = tl.arange(0, TILE)
    exists = (row + number * step < size)[:, None]
    begin = matrix + row.to(tl.int64) * size
    # Not rounded up or down by a difference: the compiler must see that it is a multiple.
    words = (begin + STEP - 1) // STEP
    ahead = (words * STEP - begin).to(tl.int32)
    whole = tl.maximum(size - ahead, 0) // STEP * STEP
    place = tl.arange(0, BLOCK)
    row_offset = (number * (size * step // STEP * STEP))[:, None]
    word_ptr = m_ptr + words * STEP + row_offset + place[None, :]
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    rest = tl.zeros([TILE, BLOCK_D], tl.float32)
    for block in range(0, whole, BLOCK):
        inside = exists & (place < whole - block)[None, :]
        weights = tl.load(word_ptr + block, mask=inside, other=0.0)
        # No token of the ends: 0 times inf is NaN.
        token = ahead + block + place
        x = tokens_at(x_ptr, token, ahead + whole, X_STRIDE, depth, D, BLOCK_D)
        acc, rest = add_products(acc, rest, weights, x, PRECISION)
    if STEP > 1:
        edge = tl.arange(0, 16)
        edge = tl.where(edge < 8, tl.where(edge < ahead, edge, -1), ahead + whole + edge - 8)
        address = m_ptr + begin + row_offset + edge[None, :]
        weights = tl.load(address, mask=exists & is_below(edge, size)[None, :], other=0.0)
        x = tokens_at(x_ptr, edge, size, X_STRIDE, depth, D, BLOCK_D)
        acc, rest = add_products(acc, rest, weights, x, PRECISION)
    return sum_products(acc, rest, PRECISION)
