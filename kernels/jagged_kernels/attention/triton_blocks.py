"""What the attention kernels share: a row's fields, token blocks in and out, and the mask."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.rows import NO_LIMIT, ROW_WIDTH

LOG2_E = 1.4426950408889634
_ROW_WIDTH = tl.constexpr(ROW_WIDTH)


@triton.jit
def load_row(rows_ptr, row):
    """The fields of a row, in the order of `rows.ROW_FIELDS`."""
    base = rows_ptr + row.to(tl.int64) * _ROW_WIDTH
    return (
        tl.load(base),
        tl.load(base + 1),
        tl.load(base + 2),
        tl.load(base + 3),
        tl.load(base + 4),
    )


@triton.jit
def load_block(
    ptr, start, end, stride, BLOCK: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """[BLOCK, PAD_D] of the tokens from `start`; zero from D on and, if CUT, from `end` on."""
    token = start + tl.arange(0, BLOCK)
    dim = tl.arange(0, PAD_D)
    # int64: tokens x heads x dim passes 2^31 in large batches.
    address = ptr + token.to(tl.int64)[:, None] * stride + dim[None, :]
    if CUT and PAD_D != D:
        return tl.load(address, mask=(token[:, None] < end) & (dim[None, :] < D), other=0.0)
    if CUT:
        return tl.load(address, mask=token[:, None] < end, other=0.0)
    if PAD_D != D:
        return tl.load(address, mask=dim[None, :] < D, other=0.0)
    return tl.load(address)


@triton.jit
def store_block(
    ptr, block, start, end, stride, BLOCK: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr
):  # fmt: skip
    """The first D columns of the tokens before `end`, in the dtype of `ptr`."""
    token = start + tl.arange(0, BLOCK)
    dim = tl.arange(0, PAD_D)
    address = ptr + token.to(tl.int64)[:, None] * stride + dim[None, :]
    inside = (token[:, None] < end) & (dim[None, :] < D)
    tl.store(address, block.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_numbers(ptr, start, end, stride, BLOCK: tl.constexpr):
    """[BLOCK] numbers, one a token; 0 from `end` on."""
    token = start + tl.arange(0, BLOCK)
    return tl.load(ptr + token.to(tl.int64) * stride, mask=token < end, other=0.0)


@triton.jit
def store_numbers(ptr, numbers, start, end, stride, BLOCK: tl.constexpr):
    token = start + tl.arange(0, BLOCK)
    tl.store(ptr + token.to(tl.int64) * stride, numbers, mask=token < end)


@triton.jit
def whole_blocks(
    tile_start, tile_end, range_start, range_end, shift, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """(first, last): blocks that start in [first, last) are visible whole to the whole tile.

    Blocks start at range_start and every BLOCK tokens after it.
    """
    first = range_start
    visible_end = range_end
    if HAS_LEFT:
        hidden = tl.maximum(tile_end - 1 + shift - left - range_start, 0)
        first += tl.cdiv(hidden, BLOCK) * BLOCK
    if HAS_RIGHT:
        visible_end = tl.minimum(range_end, tile_start + shift + right + 1)
    last = range_start + tl.maximum(visible_end - range_start, 0) // BLOCK * BLOCK
    return first, last


@triton.jit
def visible(
    tile_start, block_start, range_end, shift, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[TILE, BLOCK]: does this token of the tile see that token of the block?"""
    seen_from = (tile_start + shift + tl.arange(0, TILE))[:, None]
    token = (block_start + tl.arange(0, BLOCK))[None, :]
    inside = (token < range_end) & (seen_from == seen_from)
    if HAS_LEFT:
        inside = inside & (token >= seen_from - left)
    if HAS_RIGHT:
        inside = inside & (token <= seen_from + right)
    return inside


@triton.jit
def probability(scores, lse2):
    """2 ** (scores - lse2), at most 1: the rounding of lse2 must not make it infinite where scores
    are enormous. NaN stays NaN."""
    exponent = tl.minimum(scores - lse2, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(exponent)


@triton.jit
def add_dot(acc, a, b, PRECISION: tl.constexpr):
    """acc + a @ b.

    float32 sums a block by itself first: thousands of additions, one after another, to a sum that
    is large already would cost digits. (`fma` by 1, because Triton turns a plain sum back into a
    product that accumulates.) For half types the hardware's accumulation is far better than
    their rounding.
    """
    if a.dtype == tl.float32:
        product = tl.dot(a, b, input_precision=PRECISION)
        return tl.fma(product, tl.full(product.shape, 1.0, tl.float32), acc)
    return tl.dot(a, b, acc)


def dot_precision(dtype: torch.dtype) -> str:
    """float32 products are exact unless the user allowed TF32, as in torch.matmul."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 else "ieee"


def padded_dim(dim: int) -> int:
    """Triton's blocks are powers of two, and its matrix products at least 16 deep."""
    if dim > 256:
        raise NotImplementedError(f"the triton backend goes to head_dim 256, got {dim}")
    return max(16, 1 << (dim - 1).bit_length())


def rows_of_dims(x: Tensor) -> Tensor:
    """[T, H, D] with unit stride in D; packed QKV is read in place."""
    return x if x.stride(-1) == 1 else x.contiguous()


def scale_arguments(scale: float) -> dict[str, float | bool]:
    """The kernels work in base 2 and with a positive scale; the sign goes into q.

    Not quite 0, so that a masked score stays -inf when it is scaled.
    """
    return {"scale_log2": max(abs(scale) * LOG2_E, 1e-37), "NEGATE": scale < 0}


def band_arguments(left: int, right: int) -> dict[str, int | bool]:
    return {
        "left": left,
        "right": right,
        "HAS_LEFT": left != NO_LIMIT,
        "HAS_RIGHT": right != NO_LIMIT,
    }
