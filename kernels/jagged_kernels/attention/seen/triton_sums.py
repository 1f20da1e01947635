"""What the mask hides touches nothing: how kernels hold to `products`' rule at no price.

A hidden weight is 0, and 0 times a NaN or inf is NaN. In a sum it stays: a tile whose sums are
finite was touched by nothing. So kernels walk a tile as if all numbers were finite, look at what
comes out, and walk again in the rare case, with sums over what is seen alone. That walk takes small
blocks, so that it needs neither the registers nor the shared memory that decide how many programs
run beside each other. Without a mask nothing is hidden (what is behind a user's end is not loaded),
and kernels have no such walk.
"""

from __future__ import annotations

import triton
import triton.language as tl

from jagged_kernels.device.arithmetic import add_dot

# Tokens that the second walk takes at a time.
SEEN_BLOCK = tl.constexpr(16)


@triton.jit
def size_of_sums(x):
    """[A] of x [A, B]: inf or NaN where a number of the row is."""
    return tl.abs(tl.sum(x, 1))


@triton.jit
def size_of_pieces(x):
    """`size_of_sums` of pieces of columns, added up."""
    size = size_of_sums(x[0])
    for i in tl.static_range(1, len(x)):
        size += size_of_sums(x[i])
    return size


@triton.jit
def is_bad(sizes):
    """Whether one of `size_of_sums` is inf or NaN."""
    return tl.min((sizes < float("inf")).to(tl.int32), 0) == 0


@triton.jit
def add_seen(acc, weights, x, seen, PRECISION: tl.constexpr):
    """acc [A, C] + the sums of weights [A, B] times x [B, C] over what is seen [A, B], as
    `products.seen_product` has them; weights in the dtype of x."""
    weights = tl.where(seen, weights, 0.0).to(x.dtype)
    if is_bad(size_of_sums(x.to(tl.float32))):
        # Token by token, which needs few registers.
        column = tl.arange(0, x.shape[0])[None, :]
        row = tl.arange(0, x.shape[0])[:, None]
        for token in range(0, x.shape[0]):
            here = column == token
            weight = tl.sum(tl.where(here, weights.to(tl.float32), 0.0), 1)
            is_seen = tl.max((here & seen).to(tl.int32), 1) > 0
            number = tl.sum(tl.where(row == token, x.to(tl.float32), 0.0), 0)
            acc += tl.where(is_seen[:, None], weight[:, None] * number[None, :], 0.0)
    else:
        acc = add_dot(acc, weights, x, PRECISION)
    return acc


@triton.jit
def add_weighted(acc, weights, x, seen, PRECISION: tl.constexpr):
    """acc + weights times x, with weights rounded to the dtype of x: by `add_seen`, or the plain
    product where `seen` is None."""
    weights = weights.to(x.dtype)
    if seen is None:
        acc = add_dot(acc, weights, x, PRECISION)
    else:
        acc = add_seen(acc, weights, x, seen, PRECISION)
    return acc


@triton.jit
def add_weighted_pieces(acc, weights, x, seen, PRECISION: tl.constexpr):
    """`add_weighted` to each piece of columns of acc, of that piece of x."""
    sums = ()
    for i in tl.static_range(len(x)):
        sums += (add_weighted(acc[i], weights, x[i], seen, PRECISION),)
    return sums
