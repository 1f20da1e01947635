"""New events written behind those that a cache holds, in two launches.

1. Programs take equal chunks of the new tokens, of one key head: a search in the offsets tells
   whose each is, its user's length where it goes.
2. Lengths grow. In a launch of its own, because programs of the first read them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from jagged_kernels.attention.plans import layout_of
from jagged_kernels.core.launch import launch
from jagged_kernels.core.layouts import rows_of_dims
from jagged_kernels.core.sizes import cdiv, power_of_two
from jagged_kernels.device.search import user_of

# Numbers of k or v that a program copies.
_NUMBERS = 4096
_USERS = 256


def launch_append(
    k_store: Tensor,
    v_store: Tensor,
    lengths: Tensor,
    pages: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    page_size: int,
    capacity: int,
) -> None:
    """What `slots._append_events` says, of one token or more; stores contiguous."""
    users, lists, page_count = pages.shape
    tokens = k.shape[0]
    k, v = rows_of_dims(k), rows_of_dims(v)
    (heads, dim, *k_strides), (_, dim_v, *v_strides) = layout_of(k), layout_of(v)
    pads = power_of_two(dim), power_of_two(dim_v)
    block = max(_NUMBERS // max(pads), 1)
    constants = {
        "HEADS": heads, "LISTS": lists, "PAGE": page_size, "K_STRIDES": tuple(k_strides),
        "V_STRIDES": tuple(v_strides), "D": dim, "DV": dim_v, "PAD_D": pads[0], "PAD_DV": pads[1],
        "BLOCK": block,
    }  # fmt: skip
    arguments = (k, v, k_store, v_store, offsets, lengths, pages, users, tokens, page_count)
    # The pages of the store, which may be those of more users than these.
    limits = (k_store.shape[0] // page_size, capacity)
    launch(_append_kernel, (cdiv(tokens, block), heads), (*arguments, *limits), constants)
    arguments = (lengths, offsets, users, capacity)
    launch(_grow_kernel, cdiv(users, _USERS), arguments, {"USERS": _USERS})


@triton.jit(do_not_specialize=["users", "tokens", "page_count", "page_limit", "capacity"])
def _append_kernel(
    k_ptr, v_ptr, k_store_ptr, v_store_ptr, offsets_ptr, lengths_ptr, pages_ptr,
    users, tokens, page_count, page_limit, capacity,
    HEADS: tl.constexpr, LISTS: tl.constexpr, PAGE: tl.constexpr, K_STRIDES: tl.constexpr,
    V_STRIDES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAD_D: tl.constexpr,
    PAD_DV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    token = tl.minimum(token, tokens - 1)
    head = tl.program_id(1).to(tl.int64)
    user = user_of(offsets_ptr, users, token)
    place = token - tl.load(offsets_ptr + user).to(tl.int32) + tl.load(lengths_ptr + user)
    fits = inside & (place < capacity)
    page_list = user.to(tl.int64) * LISTS + head % LISTS
    page = tl.load(pages_ptr + page_list * page_count + place // PAGE, mask=fits, other=0)
    # A list that somebody else wrote leads nowhere outside.
    fits = fits & (page >= 0) & (page < page_limit)
    slot = page.to(tl.int64) * PAGE + place % PAGE
    token = token.to(tl.int64)
    _copy(k_ptr, k_store_ptr, token, slot, fits, head, K_STRIDES, HEADS, D, PAD_D)
    _copy(v_ptr, v_store_ptr, token, slot, fits, head, V_STRIDES, HEADS, DV, PAD_DV)


@triton.jit
def _copy(
    ptr, store_ptr, token, slot, fits, head, STRIDES: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, PAD_D: tl.constexpr,
):  # fmt: skip
    """One head of tokens [BLOCK], to their slots."""
    dim = tl.arange(0, PAD_D)[None, :]
    mask = fits[:, None] & (dim < D)
    address = token[:, None] * STRIDES[0] + head * STRIDES[1] + dim
    rows = tl.load(ptr + address, mask=mask, other=0.0)
    tl.store(store_ptr + (slot[:, None] * HEADS + head) * D + dim, rows, mask=mask)


@triton.jit(do_not_specialize=["users", "capacity"])
def _grow_kernel(lengths_ptr, offsets_ptr, users, capacity, USERS: tl.constexpr):
    user = tl.program_id(0) * USERS + tl.arange(0, USERS)
    inside = user < users
    start = tl.load(offsets_ptr + user, mask=inside, other=0)
    count = (tl.load(offsets_ptr + user + 1, mask=inside, other=0) - start).to(tl.int32)
    length = tl.load(lengths_ptr + user, mask=inside, other=0)
    tl.store(lengths_ptr + user, tl.minimum(length + count, capacity), mask=inside)
