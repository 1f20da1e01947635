"""The distinct ids of each user, by sorting every user by itself, in registers.

A key is an id, counted from the user's lowest, in front of its place in the user, so that a sort
keeps the places, and keys have 32 bits wherever the user's ids spread little enough. The results
lie at the users' own tokens until it is known how many distinct ids come before. Whether every user
was sorted is found out on the way; the host learns it together with the size of the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.core.launch import launch
from jagged_kernels.core.sizes import cdiv
from jagged_kernels.device.search import search_steps, user_of_slot

# Tokens that are sorted at a time: a user takes the first of these that it fits in. LONG has a
# launch of its own, with more warps, that is made when there are such users. (With one warp alone,
# a look at the key before is a hundred times the instructions.)
SHORT, LONG = (64, 128, 256, 512, 1024), (4096,)
SHORT_WARPS, LONG_WARPS = 4, 16
# In place of the number of a user's distinct ids: it is for LONG; or it is longer yet, or its ids
# spread too far. The lowest of all users' is told.
_IS_LONG, _DOES_NOT_FIT = tl.constexpr(-1), tl.constexpr(-2)
# Users whose distinct ids are counted at a time, and tokens that are moved at a time.
USERS, MOVED, MOVE_WARPS = 4096, 128, 1


def launch_user_unique(
    values: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """(unique [U], its offsets [B + 1], counts [U], inverse [T]), or None if some user has more
    tokens than `LONG` or ids that spread too far. Waits for the device, once, and once more where
    a user has more tokens than `SHORT`. T > 0."""
    tokens, users = values.shape[0], offsets.shape[0] - 1
    if tokens > users * LONG[-1]:
        return None
    values = values.contiguous()
    ids = torch.empty_like(values)
    # Of each token which of its user's distinct ids it is; where in the user's sorted tokens each
    # of the distinct ids begins; of each user how many there are.
    scratch = offsets.new_empty(2 * tokens + users, dtype=torch.int32)
    found = (scratch, ids, values, offsets, tokens)
    launch(
        _short_kernel, users, found, {"SIZES": SHORT, "LONGEST": LONG[-1]}, num_warps=SHORT_WARPS
    )
    begins, unique = torch.empty_like(offsets), torch.empty_like(values)
    inverse = offsets.new_empty(tokens, dtype=torch.int64)
    counts = torch.empty_like(inverse)
    moved = (unique, counts, inverse, begins, scratch, ids, offsets, tokens, users)
    distinct = _move(*moved)
    if distinct == _IS_LONG.value:
        launch(
            _long_kernel, cdiv(tokens, SHORT[-1]), (*found, users, search_steps(users)),
            {"SHORTER": SHORT[-1], "SIZES": LONG}, num_warps=LONG_WARPS,
        )  # fmt: skip
        distinct = _move(*moved)
    if distinct < 0:
        return None
    return unique.resize_(distinct), begins, counts.resize_(distinct), inverse


def _move(
    unique: Tensor, counts: Tensor, inverse: Tensor, begins: Tensor, scratch: Tensor, ids: Tensor,
    offsets: Tensor, tokens: int, users: int,
) -> int:  # fmt: skip
    """Fills the first four from `scratch` and `ids`, if all users were sorted. How many distinct
    ids there are, or why not all were."""
    launch(_begins_kernel, 1, (begins, scratch, tokens, users), {"USERS": USERS}, num_warps=8)
    launch(
        _move_kernel, users,
        (unique, counts, inverse, begins, scratch, ids, offsets, tokens, users),
        {"BLOCK": MOVED}, num_warps=MOVE_WARPS,
    )  # fmt: skip
    return int(begins[-1])  # waits


@triton.jit(do_not_specialize=["tokens"])
def _short_kernel(
    scratch_ptr, ids_ptr, values_ptr, offsets_ptr, tokens,
    SIZES: tl.constexpr, LONGEST: tl.constexpr,
):  # fmt: skip
    """A user each."""
    user = tl.program_id(0)
    begin = tl.load(offsets_ptr + user).to(tl.int64)
    length = tl.load(offsets_ptr + user + 1).to(tl.int64) - begin
    _sort_user(scratch_ptr, ids_ptr, values_ptr, tokens, user, begin, length, -1, SIZES)
    if length > SIZES[len(SIZES) - 1]:
        why = tl.where(length > LONGEST, _DOES_NOT_FIT, _IS_LONG)
        tl.store(scratch_ptr + 2 * tokens.to(tl.int64) + user, why)


@triton.jit(do_not_specialize=["tokens", "users", "steps"])
def _long_kernel(
    scratch_ptr, ids_ptr, values_ptr, offsets_ptr, tokens, users, steps,
    SHORTER: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """The user, if it is longer than SHORTER, whose first token at a multiple of SHORTER is the
    program's: each such user has one."""
    token = tl.program_id(0) * SHORTER
    user = user_of_slot(offsets_ptr, users, steps, token, 1)
    begin = tl.load(offsets_ptr + user).to(tl.int64)
    length = tl.load(offsets_ptr + user + 1).to(tl.int64) - begin
    if (length > SHORTER) & (token - begin < SHORTER):
        _sort_user(scratch_ptr, ids_ptr, values_ptr, tokens, user, begin, length, SHORTER, SIZES)


@triton.jit
def _sort_user(
    scratch_ptr, ids_ptr, values_ptr, tokens, user, begin, length,
    SHORTER: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """In the first of the SIZES that it fits in, if one is; it is longer than SHORTER."""
    for i in tl.static_range(len(SIZES)):
        if length <= SIZES[i] and length > (SIZES[i - 1] if i > 0 else SHORTER):
            _sort_block(scratch_ptr, ids_ptr, values_ptr, tokens, user, begin, length, SIZES[i])


@triton.jit
def _sort_block(scratch_ptr, ids_ptr, values_ptr, tokens, user, begin, length, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < length
    some = tl.load(values_ptr + begin, mask=length > 0, other=0)
    value = tl.load(values_ptr + begin + at, mask=inside, other=some)
    lowest = tl.min(value, 0).to(tl.int64)
    # Negative where 64 bits do not hold it.
    spread = tl.max(value, 0).to(tl.int64) - lowest
    shifted = value.to(tl.int64) - lowest
    out = (scratch_ptr, ids_ptr, tokens, user, begin, length, lowest)
    if (spread >= 0) & (spread < (1 << 31) // BLOCK):
        _rank_ids(*out, shifted.to(tl.int32), BLOCK, 0x7FFFFFFF)
    elif (spread >= 0) & (spread < (1 << 62) // BLOCK):
        _rank_ids(*out, shifted, BLOCK, 0x7FFFFFFFFFFFFFFF)
    else:
        tl.store(scratch_ptr + 2 * tokens.to(tl.int64) + user, _DOES_NOT_FIT)


@triton.jit
def _rank_ids(
    scratch_ptr, ids_ptr, tokens, user, begin, length, lowest, shifted,
    BLOCK: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """shifted: [BLOCK] >= 0, times BLOCK at most LAST, behind which is nothing."""
    at = tl.arange(0, BLOCK)
    inside = at < length
    key = tl.sort(tl.where(inside, shifted * BLOCK + at, LAST))
    place = (key & (BLOCK - 1)).to(tl.int32)
    id = key // BLOCK
    before = tl.gather(id, tl.maximum(at - 1, 0), 0)
    first = inside & ((at == 0) | (id != before))
    rank = tl.cumsum(first.to(tl.int32), 0) - 1
    ranks_ptr = scratch_ptr + begin
    starts_ptr = ranks_ptr + tokens
    tl.store(ranks_ptr + place, rank, mask=inside)
    tl.store(starts_ptr + rank, at, mask=first)
    tl.store(ids_ptr + begin + rank, (id + lowest).to(ids_ptr.dtype.element_ty), mask=first)
    tl.store(scratch_ptr + 2 * tokens.to(tl.int64) + user, tl.sum(first.to(tl.int32), 0))


@triton.jit(do_not_specialize=["tokens", "users"])
def _begins_kernel(begins_ptr, scratch_ptr, tokens, users, USERS: tl.constexpr):
    """Of how many distinct ids those of each user come after; at the end how many there are, or
    the lowest number of any user if one was not sorted."""
    found_ptr = scratch_ptr + 2 * tokens.to(tl.int64)
    total, fewest = tl.full([], 0, tl.int64), tl.full([], 0, tl.int32)
    for start in range(0, users, USERS):
        user = start + tl.arange(0, USERS)
        found = tl.load(found_ptr + user, mask=user < users, other=0)
        begin = total + tl.cumsum(found, 0) - found
        tl.store(begins_ptr + user, begin.to(begins_ptr.dtype.element_ty), mask=user < users)
        total += tl.sum(found, 0)
        fewest = tl.minimum(fewest, tl.min(found, 0))
    end = tl.where(fewest < 0, fewest, total)
    tl.store(begins_ptr + users, end.to(begins_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["tokens", "users"])
def _move_kernel(
    unique_ptr, counts_ptr, inverse_ptr, begins_ptr, scratch_ptr, ids_ptr, offsets_ptr,
    tokens, users, BLOCK: tl.constexpr,
):  # fmt: skip
    """What was found of a user to where it belongs; nothing if some user was not sorted."""
    user = tl.program_id(0)
    begin = tl.load(offsets_ptr + user).to(tl.int64)
    length = (tl.load(offsets_ptr + user + 1) - begin).to(tl.int32)
    row = tl.load(begins_ptr + user).to(tl.int64)
    distinct = (tl.load(begins_ptr + user + 1) - row).to(tl.int32)
    sorted = tl.load(begins_ptr + users) >= 0
    ranks_ptr = scratch_ptr + begin
    starts_ptr = ranks_ptr + tokens
    for start in range(0, tl.where(sorted, length, 0), BLOCK):
        at = start + tl.arange(0, BLOCK)
        rank = tl.load(ranks_ptr + at, mask=at < length, other=0)
        one = at < distinct
        id = tl.load(ids_ptr + begin + at, mask=one, other=0)
        first = tl.load(starts_ptr + at, mask=one, other=0)
        # Behind the last of the distinct ids is the end of the user.
        after = tl.load(starts_ptr + at + 1, mask=at + 1 < distinct, other=length)
        tl.store(inverse_ptr + begin + at, row + rank, mask=at < length)
        tl.store(unique_ptr + row + at, id, mask=one)
        tl.store(counts_ptr + row + at, (after - first).to(tl.int64), mask=one)
