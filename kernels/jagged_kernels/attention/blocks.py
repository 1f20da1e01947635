"""What the attention kernels share: a row's fields, token blocks in and out, and the mask."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.sizes import padded_dim
from jagged_kernels.device.arithmetic import LOG2_E, dot_precision
from jagged_kernels.schedule.policy.plain import MAX_HEAD_DIM
from jagged_kernels.schedule.row_layout import NO_LIMIT

# Scaled scores (log2) this far from 0 are off by less than 1/16 when their product is rounded.
FAR = 2.0**20
_FARTHEST = tl.constexpr(2.0**24)
# Plans that are kept of each kernel: one for each layout and mask in use.
PLANS = 256


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


def empty_lse(q: Tensor) -> Tensor:
    """[T, H] float32."""
    return torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)


def scale_argument(scale: float) -> tuple[float, bool]:
    """(scale in base 2, negate q): the kernels work in base 2 and with a positive scale.

    Not quite 0, so that a masked score stays -inf when it is scaled.
    """
    return max(abs(scale) * LOG2_E, 1e-37), scale < 0
