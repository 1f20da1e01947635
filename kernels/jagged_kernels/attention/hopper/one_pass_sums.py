"""What a tile of keys adds to dQ in `hopper.one_pass`: the product, the sums, and dQ of these."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from jagged_kernels.attention.hopper.blocks import LANES, size_of_sums, told

# What a consumer does with what its tile adds to a block of dQ.
STORE = gl.constexpr(0)  # it is the first
ADD = gl.constexpr(1)
LAST = gl.constexpr(2)  # add, and write dq
ALONE = gl.constexpr(3)  # write dq


@gluon.constexpr_function
def holds(S):
    """Whether there are registers for K and dS of the block before, and for V or, where dQ is made
    as its transpose, for that of K: shared memory then need not bring them."""
    return S.PAD_D == 64


@gluon.constexpr_function
def layout_of_dq(S, C):
    """Of the share of a consumer: half of dQ's columns, or half of those of its transpose."""
    width = (S.BLOCK if C.turned else S.PAD_D) // C.consumers
    return gl.NVMMADistributedLayout([3, 0], [C.warps, 1], [16, width, 16])


@gluon.jit
def all_keys(k, S: gl.constexpr, C: gl.constexpr):
    """The transposes of the tile's K as left factors, one for each consumer's keys."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, layout_of_dq(S, C), 2)
    keys = (k.index(0).permute((1, 0)).load(LEFT),)
    if C.consumers == 2:
        keys = keys + (k.index(1).permute((1, 0)).load(LEFT),)  # noqa: RUF005
    return keys


@gluon.jit
def product_of_dq(ds, k, all_k, side, S: gl.constexpr, C: gl.constexpr, ME: gl.constexpr):
    """A consumer's share of what the tile adds to a block of dQ, in the making, by one product for
    each consumer's keys: [BLOCK, PAD_D / consumers], or [PAD_D, BLOCK / consumers] of the
    transpose."""
    CONSUMERS: gl.constexpr = C.consumers
    ROWS: gl.constexpr = S.PAD_D if C.turned else S.BLOCK
    WIDTH: gl.constexpr = (S.BLOCK if C.turned else S.PAD_D) // CONSUMERS
    dq = gl.full([ROWS, WIDTH], 0.0, gl.float32, layout_of_dq(S, C))
    for consumer in gl.static_range(CONSUMERS):
        weights = ds.index(side * CONSUMERS + consumer)
        if C.turned:
            left = all_k[consumer]
            right = weights.slice(ME * WIDTH, WIDTH, 1)
        else:
            left = weights.permute((1, 0))
            right = k.index(consumer).slice(ME * WIDTH, WIDTH, 1)
        dq = warpgroup_mma(left, right, dq, use_acc=consumer > 0, is_async=True)
    return dq


@gluon.jit
def add(
    dq, end, out, notes, barriers, turn_phase, S: gl.constexpr, C: gl.constexpr, ME: gl.constexpr
):  # fmt: skip
    """Adds a consumer's share to a block of dQ when it is the tile's turn."""
    dq_ptr, alarm_ptr, sums_ptr, scale = out
    of_turn = notes[2]
    my_turn, added = barriers[7], barriers[8]
    PART: gl.constexpr = S.BLOCK * S.PAD_D // C.consumers
    FLAT: gl.constexpr = gl.BlockedLayout([4], [LANES], [C.warps], [0])
    LAYOUT: gl.constexpr = dq.type.layout
    mbarrier.wait(my_turn, turn_phase)
    what = told(of_turn.index(0), C.warps)
    place = told(of_turn.index(1), C.warps) * C.consumers + ME
    address = sums_ptr + place.to(gl.int64) * PART + gl.arange(0, PART, FLAT)
    if what == ADD:
        gl.atomic_add(address, _flat(dq, FLAT), sem="relaxed")
    elif what == STORE:
        gl.store(address, _flat(dq, FLAT))
    else:
        if what == LAST:
            flat = gl.load(address, cache_modifier=".cg")
            dq += _block(flat, LAYOUT)
        q_start = told(of_turn.index(2), C.warps)
        head = told(of_turn.index(3), C.warps)
        _write(dq * scale, dq_ptr, alarm_ptr, q_start, end, head, S, C, ME)
    mbarrier.arrive(added)
    return turn_phase ^ 1


@gluon.jit
def _flat(x, LAYOUT: gl.constexpr):
    """[64, N] as a product leaves it in a warpgroup's registers: the numbers of a thread four by
    four, those of threads next to each other. So no data moves, and every thread adds 16 bytes."""
    N: gl.constexpr = x.shape[1]
    x = x.reshape([4, 2, 8, N // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([64 * N])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _block(flat, LAYOUT: gl.constexpr):
    """`_flat` undone."""
    N: gl.constexpr = flat.shape[0] // 64
    x = flat.reshape([N // 8, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5])
    return gl.convert_layout(x.reshape([64, N]), LAYOUT, assert_trivial=True)


@gluon.jit
def _write(
    share, ptr, alarm_ptr, start, end, head, S: gl.constexpr, C: gl.constexpr, ME: gl.constexpr
):  # fmt: skip
    """Stores a consumer's share of a block of dQ, which starts at token `start`."""
    block = share.to(ptr.dtype.element_ty)
    first_column = 0
    if C.turned:
        block = block.permute((1, 0))
        BY_TOKEN: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        block = gl.convert_layout(block, BY_TOKEN)
        start += ME * block.shape[0]
    else:
        first_column = ME * block.shape[1]
    COLUMNS: gl.constexpr = block.shape[1]
    LAYOUT: gl.constexpr = block.type.layout
    token = start + gl.arange(0, block.shape[0], gl.SliceLayout(1, LAYOUT))
    own = token < end
    token = gl.expand_dims(token, 1)
    column = first_column + gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT)), 0)
    address = ptr + (token.to(gl.int64) * S.HEADS + head) * S.D + column
    gl.store(address, block, mask=(token < end) & (column < S.D))
    if alarm_ptr is not None:
        sizes = size_of_sums(block.to(gl.float32))
        alarms = alarm_ptr + gl.zeros([block.shape[0]], gl.int32, gl.SliceLayout(1, LAYOUT))
        gl.store(alarms, 1, mask=~(sizes < float("inf")) & own)
