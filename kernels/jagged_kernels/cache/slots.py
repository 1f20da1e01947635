"""Where a cache's events lie: lists of pages, and how events are written and read through them.

A store is [slots, Hk, D]. Page p holds slots p * page_size and those after it. A user has lists of
pages [G, P], one for all key heads or one for each: event i of its history, for the heads of list
g, lies in slot pages[g, i // page_size] * page_size + i % page_size. A list names every page that
the user owns, once: those behind its length are free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.core.operators import define_op
from jagged_kernels.ops.users import token_positions
from jagged_kernels.tensors.offsets import cumulative


def check_pages(pages: Tensor, limit: int) -> None:
    """Reads the lists, which waits for a GPU.

    Raises:
        ValueError: a page of [users, G, P] that a store of `limit` pages does not have.
    """
    outside = ((pages < 0) | (pages >= limit)).nonzero()
    if outside.shape[0]:
        user, of, index = outside[0].tolist()
        raise ValueError(
            f"pages must lie in [0, {limit}), the store's; pages[{user}, {of}, {index}], of user "
            f"{user}, is {int(pages[user, of, index])}"
        )


def slots_of(pages: Tensor, user: Tensor, place: Tensor, page_size: int) -> Tensor:
    """[T, G] int64: the slots of event place[t] of user[t], one for each list of pages
    [users, G, P]."""
    page = pages[user, :, place // page_size].long()
    return page * page_size + (place % page_size)[:, None]


def _slots_there(
    store: Tensor, pages: Tensor, user: Tensor, place: Tensor, page_size: int
) -> Tensor:
    """`slots_of`, all of them in the store: a negative index would be one from its end. Waits."""
    slot = slots_of(pages, user, place, page_size)
    if bool(((slot < 0) | (slot >= store.shape[0])).any()):
        check_pages(pages, store.shape[0] // page_size)
    return slot


def gather_events(
    k_store: Tensor, v_store: Tensor, pages: Tensor, lengths: Tensor, page_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(k [T, Hk, D], v [T, Hk, Dv], offsets [users + 1]): what is kept of each user, in its order.

    Waits for the device: lengths decide a shape.

    Raises:
        ValueError: an event lies outside of the store.
    """
    offsets = cumulative(lengths)
    user, place = token_positions(offsets, int(offsets[-1]))
    slot = _slots_there(k_store, pages, user, place, page_size)
    head = torch.arange(k_store.shape[1], device=pages.device)
    return k_store[slot, head], v_store[slot, head], offsets


def _append_events(
    k_store: Tensor,
    v_store: Tensor,
    lengths: Tensor,
    pages: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    page_size: int,
    capacity: int,
    triton: bool,
) -> None:
    """Writes each user's tokens of k and v [T, Hk, *] behind its events, and counts them.

    What passes `capacity` events of a user is not written. Nor is what would lie outside of the
    store: a ValueError without triton.
    """
    if k.shape[0] == 0:
        return
    if triton:
        from jagged_kernels.cache.triton_append import launch_append

        launch_append(
            k_store, v_store, lengths, pages, k, v, offsets, page_size=page_size, capacity=capacity
        )
    else:
        user, place = token_positions(offsets, k.shape[0])
        place = place + lengths[user]
        fits = place < capacity
        slot = _slots_there(k_store, pages, user[fits], place[fits], page_size)
        head = torch.arange(k.shape[1], device=k.device)
        k_store[slot, head] = k[fits]
        v_store[slot, head] = v[fits]
        lengths += offsets.diff()
        lengths.clamp_(max=capacity)
    # So that a schedule is seen to be older: nothing counts what a kernel writes, or what happens
    # below autograd. What inference mode made counts nothing.
    if not torch.compiler.is_compiling() and not lengths.is_inference():
        torch.autograd.graph.increment_version(lengths)


def _nothing(*inputs: object) -> None:
    return None


append_events = define_op(
    _append_events,
    fake=_nothing,
    schema="(Tensor(a!) k_store, Tensor(b!) v_store, Tensor(c!) lengths, Tensor pages, Tensor k, "
    "Tensor v, Tensor offsets, int page_size, int capacity, bool triton) -> ()",
)
