"""What the split kernels share: spans, query tiles that hold several heads, partial results.

The heads that share keys (grouped-query attention) stand in one tile, MEMBERS times TILE rows
padded to PACK, so that keys and values are read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged_kernels.attention.triton_meeting import list_ends, listed_block
from jagged_kernels.schedule.span_layout import SPAN_WIDTH

_SPAN_WIDTH = tl.constexpr(SPAN_WIDTH)


@triton.jit
def load_span(spans_ptr, span):
    """(first row, first block, last row, last block); the last is where the next span starts."""
    base = spans_ptr + span * _SPAN_WIDTH
    return (
        tl.load(base),
        tl.load(base + 1),
        tl.load(base + _SPAN_WIDTH),
        tl.load(base + _SPAN_WIDTH + 1),
    )


@triton.jit
def ends_of_walk(
    meets, rows_ptr, row, q_start, k_start, k_end, shift, head, from_block, last_block, is_cut,
    S: tl.constexpr,
):  # fmt: skip
    """(start, end, begin of the row's list) of what a span walks of a row: tokens at which blocks
    start, or numbers of blocks of its list, which may have fewer than another group's."""
    begin = 0
    if S.GROUPS:
        begin, list_end = list_ends(meets, rows_ptr, row, q_start, k_end, shift, head, S)
        count = (list_end - begin) * (S.TILE * S.PARTS // S.BLOCK)
        start = from_block
        end = tl.where(is_cut, tl.minimum(last_block, count), count)
    else:
        start = k_start + from_block * S.BLOCK
        end = tl.where(is_cut, k_start + last_block * S.BLOCK, k_end)
    return start, end, begin


@triton.jit
def start_of_block(at, meets, begin, k_start, k_end, S: tl.constexpr, BLOCK: tl.constexpr):
    """The first token of a block, of those that `ends_of_walk` ends."""
    if S.GROUPS:
        at, _partial = listed_block(meets, begin, at, k_start, k_end, S.TILE * S.PARTS, BLOCK)
    return at


@triton.jit
def load_pack(
    ptr, start, end, stride_t, stride_h,
    MEMBERS: tl.constexpr, TILE: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, PAD_D: tl.constexpr,
):  # fmt: skip
    """[PACK, PAD_D]: the tokens from `start` for MEMBERS heads; 0 from `end` and from D on."""
    token, member, inside = places(start, end, MEMBERS, TILE, PACK)
    dim = tl.arange(0, PAD_D)
    address = token * stride_t + member.to(tl.int64) * stride_h
    return tl.load(
        ptr + address[:, None] + dim[None, :],
        mask=inside[:, None] & (dim[None, :] < D),
        other=0.0,
    )


@triton.jit
def store_pack(
    ptr, pack, start, end, stride_t, stride_h,
    MEMBERS: tl.constexpr, TILE: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, PAD_D: tl.constexpr,
):  # fmt: skip
    """The inverse of `load_pack`, in the dtype of `ptr`."""
    token, member, inside = places(start, end, MEMBERS, TILE, PACK)
    dim = tl.arange(0, PAD_D)
    address = token * stride_t + member.to(tl.int64) * stride_h
    tl.store(
        ptr + address[:, None] + dim[None, :],
        pack.to(ptr.dtype.element_ty),
        mask=inside[:, None] & (dim[None, :] < D),
    )


@triton.jit
def load_pack_numbers(
    ptr, start, end, stride_t,
    MEMBERS: tl.constexpr, TILE: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """[PACK] numbers of [T, H], one for each token and head; 0 from `end` on."""
    token, member, inside = places(start, end, MEMBERS, TILE, PACK)
    return tl.load(ptr + token * stride_t + member, mask=inside, other=0.0)


@triton.jit
def store_pack_numbers(
    ptr, numbers, start, end, stride_t,
    MEMBERS: tl.constexpr, TILE: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    token, member, inside = places(start, end, MEMBERS, TILE, PACK)
    tl.store(ptr + token * stride_t + member, numbers, mask=inside)


@triton.jit
def places(start, end, MEMBERS: tl.constexpr, TILE: tl.constexpr, PACK: tl.constexpr):
    """[PACK]: tokens (int64) and heads of a tile of several heads, and which of them exist."""
    index = tl.arange(0, PACK)
    token, member = start + index % TILE, index // TILE
    return token.to(tl.int64), member, (token < end) & (member < MEMBERS)


@triton.jit
def heads_of_pack(start, end, first_head, MEMBERS: tl.constexpr, TILE: tl.constexpr,
                  PACK: tl.constexpr):  # fmt: skip
    """[PACK] tokens (int32) and heads, as biases take them: what stands for no head is token `end`,
    which is no query, of the last head, whose numbers can be read."""
    index = tl.arange(0, PACK)
    member = index // TILE
    token = tl.where(member < MEMBERS, start + index % TILE, end)
    return token, first_head + tl.minimum(member, MEMBERS - 1)


@triton.jit
def slot_of(span, begins, group, GROUPS: tl.constexpr):
    """Where a span keeps a partial result: one for the row it goes on with, one for the row that
    it begins and does not end."""
    return (span * 2 + begins).to(tl.int64) * GROUPS + group


@triton.jit
def store_partial(ptr, partial, PACK: tl.constexpr, D: tl.constexpr, PAD_D: tl.constexpr):
    """[PACK, D], float32."""
    index = tl.arange(0, PACK)[:, None]
    dim = tl.arange(0, PAD_D)[None, :]
    tl.store(ptr + index * D + dim, partial, mask=(dim < D) & (index < PACK))
