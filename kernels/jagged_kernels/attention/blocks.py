"""What the attention kernels share: a row's fields, token blocks in and out, and the mask."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.sizes import padded_dim
from jagged_kernels.device.float32 import dot_factors, factor
from jagged_kernels.schedule.policy.plain import MAX_HEAD_DIM
from jagged_kernels.schedule.row_layout import NO_LIMIT, ROW_FIELDS, ROW_WIDTH, SHORT_USER

LOG2_E = 1.4426950408889634
# Scaled scores (log2) this far from 0 are off by less than 1/16 when their product is rounded.
FAR = 2.0**20
_FARTHEST = tl.constexpr(2.0**24)
# Plans that are kept of each kernel: one for each layout and mask in use.
PLANS = 256
_ROW_WIDTH = tl.constexpr(ROW_WIDTH)
_LENGTH = tl.constexpr(ROW_FIELDS.index("length"))
_SHORT_USER = tl.constexpr(SHORT_USER)


@triton.jit
def load_row(rows_ptr, row):
    """The first fields of a row, in the order of `rows.ROW_FIELDS`."""
    base = rows_ptr + row.to(tl.int64) * _ROW_WIDTH
    return (
        tl.load(base),
        tl.load(base + 1),
        tl.load(base + 2),
        tl.load(base + 3),
        tl.load(base + 4),
    )


@triton.jit
def load_part(
    rows_ptr, row, part, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    TILE: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """`load_row` for TILE tokens of its tile, number `part`; start == end if there are none, or
    the user is short and SKIPS."""
    start, end, range_start, range_end, shift = load_row(rows_ptr, row)
    if SKIPS:
        length = tl.load(rows_ptr + row.to(tl.int64) * _ROW_WIDTH + _LENGTH)
        end = tl.where(length <= _SHORT_USER, start, end)
    if PARTS > 1:
        start += part * TILE
        end = tl.minimum(end, start + TILE)
        if HAS_LEFT:
            range_start = tl.minimum(tl.maximum(range_start, start + shift - left), range_end)
        if HAS_RIGHT:
            range_end = tl.maximum(tl.minimum(range_end, end + shift + right), range_start)
        end = tl.maximum(start, end)
    return start, end, range_start, range_end, shift


@triton.jit
def load_block(
    ptr, start, end, stride, BLOCK: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr
):  # fmt: skip
    """[BLOCK, PAD_D] of the tokens from `start`; zero from D and from `end` on."""
    address, token, dim = _addresses(ptr, start, stride, BLOCK, PAD_D)
    if PAD_D != D:
        return tl.load(address, mask=(token < end) & (dim < D), other=0.0)
    return tl.load(address, mask=token < end, other=0.0)


@triton.jit
def store_block(
    ptr, block, start, end, stride, BLOCK: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr
):  # fmt: skip
    """The first D columns of the tokens before `end`, in the dtype of `ptr`."""
    address, token, dim = _addresses(ptr, start, stride, BLOCK, PAD_D)
    tl.store(address, block.to(ptr.dtype.element_ty), mask=(token < end) & (dim < D))


@triton.jit
def _addresses(ptr, start, stride, BLOCK: tl.constexpr, PAD_D: tl.constexpr):
    """Addresses [BLOCK, PAD_D], tokens [BLOCK, 1] and dims [1, PAD_D].

    Tokens x heads x dim pass 2^31, a block does not: 64-bit products for the block's start alone,
    and what is left does not change from block to block.
    """
    index = tl.arange(0, BLOCK)[:, None]
    dim = tl.arange(0, PAD_D)[None, :]
    return _token_start(ptr, start, stride) + (index * stride + dim), start + index, dim


@triton.jit
def _token_start(ptr, start, stride):
    # A sum, because the interpreter's loops count in Python integers, which cannot be cast.
    return ptr + (start + tl.full([], 0, tl.int64)) * stride


@triton.jit
def load_numbers(ptr, start, end, stride, BLOCK: tl.constexpr):
    """[BLOCK] numbers, one a token; 0 from `end` on."""
    index = tl.arange(0, BLOCK)
    address = _token_start(ptr, start, stride) + index * stride
    return tl.load(address, mask=start + index < end, other=0.0)


@triton.jit
def load_number_pairs(first_ptr, second_ptr, start, end, stride, BLOCK: tl.constexpr):
    """Two times [BLOCK] numbers, one a token; 0 from `end` on.

    For numbers that stand along the columns of scores. In one load of both there is a number for
    each thread, and Triton brings it through shared memory; two loads of BLOCK numbers it repeats
    in every thread that needs them, dozens of instructions in a loop of hundreds.
    """
    index = tl.arange(0, BLOCK)[:, None]
    which = tl.arange(0, 2)[None, :]
    first = _token_start(first_ptr, start, stride)
    second = _token_start(second_ptr, start, stride)
    address = tl.where(which == 0, first, second) + index * stride
    inside = (start + index < end) & (which < 2)
    return tl.split(tl.load(address, mask=inside, other=0.0))


@triton.jit
def store_numbers(ptr, numbers, start, end, stride, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    address = _token_start(ptr, start, stride) + index * stride
    tl.store(address, numbers, mask=start + index < end)


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
    return band(seen_from, token, range_end, left, right, HAS_LEFT, HAS_RIGHT)


@triton.jit
def band(
    seen_from, token, range_end, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):  # fmt: skip
    """Which tokens are seen; `seen_from` and `token` of any two shapes that broadcast."""
    inside = (token < range_end) & (seen_from == seen_from)
    if HAS_LEFT:
        inside = inside & (token >= seen_from - left)
    if HAS_RIGHT:
        inside = inside & (token <= seen_from + right)
    return inside


@triton.jit
def lse2_of(top, total):
    """log2 of a sum of exponentials, where `total` is that of 2 ** (score - top); -inf for none.

    An enormous one is raised by more than it was rounded, so that 2 ** (score - lse2) stays at
    most 1 and the backward need not look.
    """
    lse2 = top + tl.log2(total)
    lse2 = tl.where(tl.abs(lse2) > _FARTHEST, lse2 + tl.abs(lse2) * 2.0**-22, lse2)
    return tl.where(total == 0.0, float("-inf"), lse2)


@triton.jit
def probability(scores, lse2, ROUNDS: tl.constexpr):
    """2 ** (scores - lse2), NaN where one is.

    Args:
        ROUNDS: scores are not to the bit what they were in the forward, and could pass lse2 by far
            where large terms cancel; at most 1 then.
    """
    exponent = scores - lse2
    if ROUNDS:
        exponent = tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.exp2(exponent)


@triton.jit
def add_dot(acc, a, b, PRECISION: tl.constexpr):
    """acc + a @ b.

    float32 sums a block by itself first: thousands of additions, one after another, to a sum that
    is large already would cost digits. (`fma` by 1, because Triton turns a plain sum back into a
    product that accumulates.) For half types the hardware's accumulation is far better than
    their rounding.
    """
    return add_factors(acc, factor(a, PRECISION), factor(b, PRECISION), a.dtype, PRECISION)


@triton.jit
def add_factors(acc, a, b, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """`add_dot` of what `factor` has made of numbers of `dtype`."""
    if dtype == tl.float32:
        product = dot_factors(a, b, PRECISION)
        acc = tl.fma(product, tl.full(product.shape, 1.0, tl.float32), acc)
    else:
        acc = tl.dot(a, b, acc)
    return acc


class AttentionShape(NamedTuple):
    """What an attention kernel is compiled for beside its bias; nothing that a batch changes.

    Fields:
        HEADS, GROUP: of queries, and how many of them share keys.
        D, DV, PAD_D, PAD_DV: of q and k, and of v; padded to a power of two.
        TILE, BLOCK: tokens that a program holds, and of a block that they meet.
        PARTS: programs that share a row, each with TILE tokens of its tile.
        SKIPS: users of up to `SHORT_USER` tokens are left to `plain.short`.
        *_STRIDE_T, *_STRIDE_H: of tokens and heads.
    """

    HEADS: int
    GROUP: int
    D: int
    DV: int
    PAD_D: int
    PAD_DV: int
    TILE: int
    PARTS: int
    BLOCK: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    PRECISION: str
    Q_STRIDE_T: int
    Q_STRIDE_H: int
    K_STRIDE_T: int
    K_STRIDE_H: int
    V_STRIDE_T: int
    V_STRIDE_H: int
    DO_STRIDE_T: int = 0
    DO_STRIDE_H: int = 0
    SKIPS: bool = False


class LaunchPlan(NamedTuple):
    """What of a launch follows from layouts and options alone, kept for the next one.

    Fields:
        programs: for each row.
        constants, options: as `launch` takes them.
    """

    programs: int
    scale_log2: float
    constants: dict[str, Any]
    options: dict[str, int]


# Of [T, H, D] what kernels are compiled for: heads, dim, and strides of tokens and heads.
Layout = tuple[int, int, int, int]


def layout_of(x: Tensor) -> Layout:
    """Where there is one head or token, its stride says nothing, and must not compile another
    kernel."""
    tokens, heads, dim = x.shape
    stride_t, stride_h, _ = x.stride()
    return heads, dim, stride_t if tokens > 1 else heads * dim, stride_h if heads > 1 else dim


def attention_shape(
    q: Tensor, k: Tensor, v: Tensor, d_o: Tensor | None = None,
    *, tile: int, block: int, left: int, right: int, parts: int = 1,
) -> AttentionShape:  # fmt: skip
    """`tile`: tokens of a row."""
    return shape_of_layouts(
        layout_of(q), layout_of(k), layout_of(v), None if d_o is None else layout_of(d_o),
        tile=tile, parts=parts, block=block,
        limits=(left != NO_LIMIT, right != NO_LIMIT), precision=dot_precision(q.dtype),
    )  # fmt: skip


def shape_of_layouts(
    q: Layout, k: Layout, v: Layout, d_o: Layout | None = None,
    *, tile: int, block: int, limits: tuple[bool, bool], precision: str, parts: int = 1,
    skips: bool = False,
) -> AttentionShape:  # fmt: skip
    """`limits`: has the mask a left and a right one."""
    heads, dim, *q_strides = q
    kv_heads, _, *k_strides = k
    _, dim_v, *v_strides = v
    largest = max(dim, dim_v)
    if largest > MAX_HEAD_DIM:
        raise NotImplementedError(
            f"the triton backend goes to head_dim {MAX_HEAD_DIM}, got {largest}"
        )
    return AttentionShape(
        heads, heads // kv_heads,
        dim, dim_v, padded_dim(dim), padded_dim(dim_v),
        tile // parts, parts, block, *limits, precision,
        *q_strides, *k_strides, *v_strides, *(() if d_o is None else d_o[2:]),
        SKIPS=skips,
    )  # fmt: skip


def with_equal_columns(shape: AttentionShape) -> AttentionShape:
    """For a forward: v's columns padded to k's where float32 is multiplied in parts.

    Parts of a narrower v stand where k's stood in shared memory, swizzled differently. ptxas (of
    Triton 3.6, for an H100) then made the descriptors of their later tokens from the start of
    shared memory, not of the part: results were wrong, or addresses.
    """
    if shape.PRECISION != "bf16x6":
        return shape
    return shape._replace(PAD_DV=max(shape.PAD_D, shape.PAD_DV))


def dot_precision(dtype: torch.dtype) -> str:
    """float32 products are exact unless the user allowed TF32, as in torch.matmul."""
    # Says what was set by any of PyTorch's ways; `allow_tf32` raises where another was used.
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


def product_precision(x: Tensor) -> str:
    """How `device.float32` multiplies numbers like those of `x`.

    float32 that is not TF32 as "bf16x6": several times as fast as "ieee", which multiplies in
    registers.
    """
    precision = dot_precision(x.dtype)
    exact = x.dtype == torch.float32 and precision == "ieee"
    # The interpreter knows no other.
    return "bf16x6" if exact and x.is_cuda else precision


def rows_of_dims(x: Tensor) -> Tensor:
    """[T, ..., D] with unit stride in D; packed QKV is read in place.

    A block's addresses must fit 32 bits, so that nobody's tokens lie millions of numbers apart.
    """
    strides = x.stride()
    return x if strides[-1] == 1 and strides[0] < 2**22 else x.contiguous()


def empty_lse(q: Tensor) -> Tensor:
    """[T, H] float32."""
    return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def scale_argument(scale: float) -> tuple[float, bool]:
    """(scale in base 2, negate q): the kernels work in base 2 and with a positive scale.

    Not quite 0, so that a masked score stays -inf when it is scaled.
    """
    return max(abs(scale) * LOG2_E, 1e-37), scale < 0
