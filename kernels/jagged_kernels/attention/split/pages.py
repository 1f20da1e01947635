"""Keys and values that lie where a list of pages says (`cache.slots`), block by block."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def slots_of_block(
    list_ptr, start, end, page_limit, PAGE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """([BLOCK] int64 slots of the places from `start` in a list, which of them there are).

    There is none from `end` on, and none of a page below 0 or from `page_limit` on. `start` is a
    multiple of BLOCK.
    """
    index = tl.arange(0, BLOCK)
    there = start + index < end
    if BLOCK <= PAGE:
        # Powers of two: the block lies in one page.
        page = tl.load(list_ptr + start // PAGE)
        within = start % PAGE + index
    else:
        place = start + index
        page = tl.load(list_ptr + place // PAGE, mask=there, other=0)
        within = place % PAGE
    there = there & (page >= 0) & (page < page_limit)
    return page.to(tl.int64) * PAGE + within, there


@triton.jit
def load_slots(ptr, slot, there, stride, D: tl.constexpr, PAD_D: tl.constexpr):
    """[BLOCK, PAD_D]: the rows of a store; 0 where there is none and from D on."""
    dim = tl.arange(0, PAD_D)[None, :]
    mask = there[:, None] & (dim < D)
    return tl.load(ptr + slot[:, None] * stride + dim, mask=mask, other=0.0)
