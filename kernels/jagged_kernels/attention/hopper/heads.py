"""A head's columns in the Gluon kernels: in boxes of shared memory, in products, and in sums.

TMA brings some tokens of a head into a box [tokens, PAD_D], whose columns from D on it fills with
zeros. A box of 128 or 256 with up to three quarters of its columns taken is multiplied in two
pieces, the first half and 16, 32 or 64 columns more; any other one in one piece. What is added up
of weights times boxes (sums) is a tuple of as many blocks.
"""

# Tuples are put together by `+`: Gluon does not unpack.
# ruff: noqa: RUF005

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from jagged_kernels.attention.hopper.blocks import by_row, size_of_sums, zero_rows


@gluon.constexpr_function
def _first(D):
    """Columns of the first of two pieces."""
    return 64 if D <= 128 else 128


@gluon.constexpr_function
def _rest(D):
    """Columns of the second piece; 0 where there is none."""
    half = 64 if D <= 128 else 128
    more = D - half
    return 0 if more <= 0 or more > half // 2 else max(16, 1 << (more - 1).bit_length())


@gluon.constexpr_function
def pieces(D):
    """How many products are in the making when two boxes are multiplied, or weights and a box."""
    return 2 if _rest(D) else 1


# --- boxes ----------------------------------------------------------------------------------------


@gluon.jit
def boxes(COUNT: gl.constexpr, TOKENS: gl.constexpr, S: gl.constexpr, dtype: gl.constexpr):
    """Shared memory for COUNT boxes of TOKENS."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TOKENS, S.PAD_D], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, TOKENS, S.PAD_D], LAYOUT)


@gluon.constexpr_function
def tokens_of(blocks):
    """How many a descriptor of `token_blocks` brings."""
    return blocks.block_type.shape[0]


@gluon.jit
def bring(blocks, at, head, there, box, STRIDE_H: gl.constexpr):
    """A head of the tokens from `at` on into a box, by TMA.

    Args:
        blocks: of `token_blocks`.
        there: the barrier that expects the box's bytes.
        STRIDE_H: from head to head in memory; where it is 0, there is one head for all.
    """
    if STRIDE_H == 0:
        head = 0
    # The head is an axis of its own to TMA: else the next head would stand behind D.
    as_brought = box._reinterpret(blocks.dtype, blocks.block_type.shape, blocks.layout)
    tma.async_copy_global_to_shared(blocks, [at, head, 0], there, as_brought)


@gluon.jit
def bring_queries(of_q, of_do, at, head, tail, own, landed, tail_phase, S: gl.constexpr):
    """A box of Q and one of dO, for whoever waits for their barriers; the next `tail_phase`.

    Args:
        of_q, of_do: (descriptor, box, the barrier that says it is there).
        at, head: where the boxes begin, and of which head they are.
        tail: whether rows from number `own` on are the next user's: they come to be zeros.
        landed: a barrier for this warp alone, whose parity is `tail_phase`.
    """
    q_blocks, q, q_there = of_q
    do_blocks, d_o, do_there = of_do
    BYTES: gl.constexpr = q_blocks.block_type.nbytes
    if tail:
        mbarrier.expect(landed, 2 * BYTES)
        bring(q_blocks, at, head, landed, q, S.Q_STRIDE_H)
        bring(do_blocks, at, head, landed, d_o, S.DO_STRIDE_H)
        mbarrier.wait(landed, tail_phase)
        tail_phase ^= 1
        zero_rows(q, own)
        mbarrier.arrive(q_there)
        zero_rows(d_o, own)
        mbarrier.arrive(do_there)
    else:
        mbarrier.expect(q_there, BYTES)
        bring(q_blocks, at, head, q_there, q, S.Q_STRIDE_H)
        mbarrier.expect(do_there, BYTES)
        bring(do_blocks, at, head, do_there, d_o, S.DO_STRIDE_H)
    return tail_phase


# --- products of two boxes ------------------------------------------------------------------------


@gluon.jit
def product_with_transpose(a, b, D: gl.constexpr, LAYOUT: gl.constexpr, over=None):
    """a @ b.T in the making, float32, of boxes a and b.

    Args:
        over: like the product, and not needed any more: it comes to stand in the same registers.
            Of what a loop carries around, the compiler does not see that by itself.
    """
    nothing = over
    if over is None:
        nothing = gl.full([a.shape[0], b.shape[0]], 0.0, gl.float32, LAYOUT)
    REST: gl.constexpr = _rest(D)
    FIRST: gl.constexpr = _first(D)
    if REST == 0:
        product = warpgroup_mma(a, b.permute((1, 0)), nothing, use_acc=False, is_async=True)
    else:
        left = a.slice(0, FIRST, 1)
        right = b.slice(0, FIRST, 1).permute((1, 0))
        product = warpgroup_mma(left, right, nothing, use_acc=False, is_async=True)
        left = a.slice(FIRST, REST, 1)
        right = b.slice(FIRST, REST, 1).permute((1, 0))
        product = warpgroup_mma(left, right, product, is_async=True)
    return product


@gluon.jit
def hold(box, D: gl.constexpr, LAYOUT: gl.constexpr):
    """In registers, what of a box `product_of_held` takes as its left factor."""
    REST: gl.constexpr = _rest(D)
    FIRST: gl.constexpr = _first(D)
    if REST == 0:
        held = (box.load(LAYOUT),)
    else:
        held = (box.slice(0, FIRST, 1).load(LAYOUT), box.slice(FIRST, REST, 1).load(LAYOUT))
    return held


@gluon.jit
def product_of_held(held, b, D: gl.constexpr, LAYOUT: gl.constexpr):
    """`product_with_transpose` of what `hold` gave."""
    nothing = gl.full([held[0].shape[0], b.shape[0]], 0.0, gl.float32, LAYOUT)
    REST: gl.constexpr = _rest(D)
    FIRST: gl.constexpr = _first(D)
    if REST == 0:
        product = warpgroup_mma(held[0], b.permute((1, 0)), nothing, use_acc=False, is_async=True)
    else:
        right = b.slice(0, FIRST, 1).permute((1, 0))
        product = warpgroup_mma(held[0], right, nothing, use_acc=False, is_async=True)
        right = b.slice(FIRST, REST, 1).permute((1, 0))
        product = warpgroup_mma(held[1], right, product, is_async=True)
    return product


# --- sums -----------------------------------------------------------------------------------------


@gluon.constexpr_function
def _layout(WARPS, WIDTH):
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, WIDTH, 16])


@gluon.jit
def no_sums(ROWS: gl.constexpr, D: gl.constexpr, S: gl.constexpr, C: gl.constexpr):
    """Zeros to add to: [ROWS, columns], of a consumer."""
    REST: gl.constexpr = _rest(D)
    FIRST: gl.constexpr = _first(D) if REST else S.PAD_D
    sums = (gl.zeros([ROWS, FIRST], gl.float32, _layout(C.warps, FIRST)),)
    if REST > 0:
        sums = sums + (gl.zeros([ROWS, REST], gl.float32, _layout(C.warps, REST)),)
    return sums


@gluon.jit
def left_factor(weights, sums, dtype: gl.constexpr):
    """Weights as a product that adds to `sums` reads them, from registers."""
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, sums[0].type.layout, 2)
    return gl.convert_layout(weights.to(dtype), LAYOUT)


@gluon.jit
def add_product(weights, box, sums, D: gl.constexpr, IN_REGISTERS: gl.constexpr = True):
    """sums + weights @ box in the making.

    Args:
        weights: of `left_factor`, or in shared memory.
    """
    REST: gl.constexpr = _rest(D)
    FIRST: gl.constexpr = _first(D)
    if REST == 0:
        added = (warpgroup_mma(weights, box, sums[0], is_async=True),)
    else:
        first = warpgroup_mma(weights, box.slice(0, FIRST, 1), sums[0], is_async=True)
        if IN_REGISTERS:
            # The same registers.
            LAYOUT: gl.constexpr = gl.DotOperandLayout(0, sums[1].type.layout, 2)
            weights = gl.convert_layout(weights, LAYOUT, assert_trivial=True)
        rest = warpgroup_mma(weights, box.slice(FIRST, REST, 1), sums[1], is_async=True)
        added = (first, rest)
    return added


@gluon.jit
def wait_for(PENDING: gl.constexpr, sums, others):
    """(sums, *others) when at most PENDING later products are in the making."""
    if len(sums) == 1:
        deps = warpgroup_mma_wait(PENDING, deps=sums + others)
        waited = (deps[:1],) + deps[1:]
    else:
        deps = warpgroup_mma_wait(PENDING, deps=sums + others)
        waited = (deps[:2],) + deps[2:]
    return waited


@gluon.jit
def times(sums, factor):
    """Sums times one number."""
    product = (sums[0] * factor,)
    if len(sums) == 2:
        product = product + (sums[1] * factor,)
    return product


@gluon.jit
def times_by_row(sums, factors):
    """Sums times a number for each row."""
    product = (sums[0] * by_row(factors, sums[0]),)
    if len(sums) == 2:
        product = product + (sums[1] * by_row(factors, sums[1]),)
    return product


@gluon.jit
def size_of_head(sums):
    """`size_of_sums` of all columns."""
    size = size_of_sums(sums[0])
    if len(sums) == 2:
        size = size + gl.convert_layout(size_of_sums(sums[1]), size.type.layout)
    return size


@gluon.jit
def store_head(
    ptr, sums, start, end, head, HEADS: gl.constexpr, D: gl.constexpr, alarm_ptr=None
):  # fmt: skip
    """Stores sums as one head of the tokens [start, end) of a tensor [T, HEADS, D].

    An alarm becomes 1 where the sum of a token's numbers is inf or NaN.
    """
    FIRST: gl.constexpr = _first(D)
    _store(ptr, sums[0], 0, start, end, head, HEADS, D, alarm_ptr)
    if len(sums) == 2:
        _store(ptr, sums[1], FIRST, start, end, head, HEADS, D, alarm_ptr)


@gluon.jit
def _store(
    ptr, block, COLUMN: gl.constexpr, start, end, head, HEADS: gl.constexpr, D: gl.constexpr,
    alarm_ptr,
):  # fmt: skip
    WIDTH: gl.constexpr = block.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // WIDTH, WIDTH // 8], [gl.num_warps(), 1], [1, 0]
    )
    block = gl.convert_layout(block.to(ptr.dtype.element_ty), LAYOUT)
    token = start + gl.arange(0, block.shape[0], gl.SliceLayout(1, LAYOUT))
    token = gl.expand_dims(token, 1)
    dim = COLUMN + gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)), 0)
    address = ptr + (token.to(gl.int64) * HEADS + head) * D + dim
    gl.store(address, block, mask=(token < end) & (dim < D))
    if alarm_ptr is not None:
        # Now, because sums need registers that the block in float32 had.
        sizes = size_of_sums(block.to(gl.float32))
        alarms = alarm_ptr + gl.zeros([block.shape[0]], gl.int32, gl.SliceLayout(1, LAYOUT))
        gl.store(alarms, 1, mask=~(sizes < float("inf")))
