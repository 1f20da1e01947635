"""What the attention kernels share: a row's fields, token blocks in and out, and the mask."""

from __future__ import annotations

import triton
import triton.language as tl

# Scaled scores (log2) this far from 0 are off by less than 1/16 when their product is rounded.
FAR = 2.0**20
_FARTHEST = tl.constexpr(2.0**24)


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
def finite(x):
    """x, or 0 for -inf: -inf - -inf is NaN, so a query that has seen nothing subtracts 0."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def weighted_mean(acc, total):
    """acc [A, B] / total [A]; 0 where it is 0, for a query that saw nothing.

    One division a query: Triton's takes three instructions a number.
    """
    return acc * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]


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
def score_gradients(weights, d_weights, delta, d_lse):
    """weights * (d_weights - delta + d_lse), of probabilities.

    d_lse comes last, or is None where delta has it: where a query sees one key, all else cancels,
    and is larger by far than what is left.
    """
    d_scores = d_weights - delta
    if d_lse is not None:
        d_scores += d_lse
    return weights * d_scores
