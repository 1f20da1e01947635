"""The kernels of `jagged_outer` and `jagged2_matmul`; each is the other's gradient.

Memory is what takes time: a user's matrix begins and its rows end at any address, so it is moved
value by value, and what matters is that a program touches it once and many programs run.
"""

# Triton's jit and its launch options are not typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.triton_blocks import add_dot, dot_precision
from jagged_kernels.interaction.triton_linear import block_size, token_tile, unit_stride
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

# Column blocks that a program of `jagged_outer` takes beside each other, for one read of its rows.
_STRIP_BLOCKS = 4


def launch_outer(
    x: Tensor, y: Tensor, offsets: Tensor, matrix_offsets: Tensor, total: int
) -> Tensor:
    """[total] in x's dtype: x_b y_b^T of every user, row by row."""
    x, y = unit_stride(x), unit_stride(y)
    (tokens, dim), users = x.shape, offsets.shape[0] - 1
    out = torch.empty(total, dtype=x.dtype, device=x.device)
    if total == 0:
        return out
    tile = token_tile(x.dtype)
    strip = tile * _STRIP_BLOCKS
    with torch.cuda.device_of(x):
        _outer_kernel[(strip_count(tokens, users, total, tile, strip),)](
            x, y, out, offsets.contiguous(), matrix_offsets.contiguous(),
            users, search_steps(users), x.stride(0), y.stride(0),
            D=dim, BLOCK_D=block_size(dim, _depth(x)), TILE=tile, STRIP=strip,
            PRECISION=dot_precision(x.dtype), num_warps=8, num_stages=2,
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
    tile, block_d = token_tile(x.dtype), block_size(dim, _depth(x))
    # Neighbouring threads must read neighbouring scores. Of blocks of one shape and order Triton
    # would give each thread eight values in a row, as is best for x, and read them one by one.
    block = tile // 2 if block_d == tile and not transpose else tile
    with torch.cuda.device_of(x):
        _matmul_kernel[(tile_count(tokens, users, tile) * triton.cdiv(dim, block_d),)](
            m.contiguous(), x, out, offsets.contiguous(), matrix_offsets.contiguous(),
            users, search_steps(users), x.stride(0), TRANSPOSE=transpose,
            D=dim, BLOCK_D=block_d, TILE=tile, BLOCK=block,
            PRECISION=dot_precision(x.dtype), num_warps=8 if block_d > 64 else 4, num_stages=2,
        )  # fmt: skip
    return out


def _depth(x: Tensor) -> int:
    """The most columns of tokens that a program holds."""
    return 128 if x.element_size() == 2 else 64


@triton.jit(do_not_specialize=["users", "steps"])
def _outer_kernel(
    x_ptr, y_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users, steps, x_stride, y_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, STRIP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(0)
    user = user_of_strip(offsets_ptr, matrix_offsets_ptr, users, steps, strip, TILE, STRIP)
    start, end = tl.load(offsets_ptr + user), tl.load(offsets_ptr + user + 1)
    size = (end - start).to(tl.int32)
    number = strip - first_strip(offsets_ptr, matrix_offsets_ptr, user, True, TILE, STRIP)
    across = tl.maximum(tl.cdiv(size, STRIP), 1)
    row, column = number // across * TILE, number % across * STRIP
    if row >= size:
        return
    out_ptr += tl.load(matrix_offsets_ptr + user)
    rows = row + tl.arange(0, TILE)[:, None]
    out_rows = out_ptr + rows.to(tl.int64) * size
    x_first = load_tile(x_ptr, start + row, end, x_stride, 0, D, TILE, BLOCK_D)
    for block in range(column, tl.minimum(column + STRIP, size), TILE):
        y = load_tile(y_ptr, start + block, end, y_stride, 0, D, TILE, BLOCK_D)
        scores = tl.dot(x_first, tl.trans(y), input_precision=PRECISION)
        for depth in range(BLOCK_D, D, BLOCK_D):
            x = load_tile(x_ptr, start + row, end, x_stride, depth, D, TILE, BLOCK_D)
            y = load_tile(y_ptr, start + block, end, y_stride, depth, D, TILE, BLOCK_D)
            scores = add_dot(scores, x, tl.trans(y), PRECISION)
        columns = block + tl.arange(0, TILE)[None, :]
        inside = (rows < size) & (columns < size)
        tl.store(out_rows + columns, scores.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["users", "steps"])
def _matmul_kernel(
    m_ptr, x_ptr, out_ptr, offsets_ptr, matrix_offsets_ptr, users, steps, x_stride,
    TRANSPOSE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    D_BLOCKS: tl.constexpr = (D + BLOCK_D - 1) // BLOCK_D
    tile, depth = tl.program_id(0) // D_BLOCKS, tl.program_id(0) % D_BLOCKS * BLOCK_D
    user = user_of_tile(offsets_ptr, users, steps, tile, TILE)
    start, end = tl.load(offsets_ptr + user), tl.load(offsets_ptr + user + 1)
    size = (end - start).to(tl.int32)
    row = (tile - first_tile(offsets_ptr, user, TILE)) * TILE
    if row >= size:
        return
    m_ptr += tl.load(matrix_offsets_ptr + user)
    rows = row + tl.arange(0, TILE)[:, None]
    acc = tl.zeros([TILE, BLOCK_D], tl.float32)
    for block in range(0, size, BLOCK):
        columns = block + tl.arange(0, BLOCK)[None, :]
        if TRANSPOSE:
            address = m_ptr + columns.to(tl.int64) * size + rows
        else:
            address = m_ptr + rows.to(tl.int64) * size + columns
        weights = tl.load(address, mask=(rows < size) & (columns < size), other=0.0)
        x = load_tile(x_ptr, start + block, end, x_stride, depth, D, BLOCK, BLOCK_D)
        acc = add_dot(acc, weights, x, PRECISION)
    store_tile(out_ptr, acc, start + row, end, depth, D, TILE, BLOCK_D)
