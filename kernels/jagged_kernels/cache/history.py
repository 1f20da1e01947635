"""`HistoryCache`: keys and values of many users, which grow on the device and are never moved."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.cache.slots import append_events, check_pages, gather_events
from jagged_kernels.core.autocast import as_autocast
from jagged_kernels.core.backends import Backend, choose_backend
from jagged_kernels.core.contents import can_be_read, checking, known_to_differ, readable
from jagged_kernels.core.operators import call, wants_gradient
from jagged_kernels.core.sizes import as_int, cdiv
from jagged_kernels.schedule.schedule import MOST_TOKENS
from jagged_kernels.tensors.arguments import not_a_tensor
from jagged_kernels.tensors.checks import FLOATS
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested

_LARGEST_PAGE = 128


class HistoryCache:
    """Keys and values of B users, for queries to come: of one layer.

    Args:
        users: B.
        capacity: events of a user, at most. Memory for them is taken now.
        kv_heads, head_dim, head_dim_v: Hk, D of keys and Dv of values (by default D).
        page_size: events that lie together, a power of two from 1 to 128. With 1 every key head has
            a list of its own, and may keep other events than the next one (`scissorhands`): as
            many of each user.
        dtype, device: of keys and values.

    Attributes:
        k_store, v_store: [slots, Hk, D] and [slots, Hk, Dv].
        pages: [B, G, P] int32: where events lie, by list (`slots`); G is Hk with pages of one
            event, else 1.
        lengths: [B] int32, events of each user.

    Lists and lengths are on the device, and what changes them does not wait for it. Nothing here
    has a gradient: for training there is `jagged_attention`.

    >>> cache = HistoryCache(2, 8, kv_heads=1, head_dim=4, page_size=4)
    >>> for lengths in ([3, 1], [0, 2]):
    ...     new = JaggedTensor.from_lengths(torch.ones(sum(lengths), 1, 4), torch.tensor(lengths))
    ...     cache.append(new, new)
    >>> cache.lengths
    tensor([3, 3], dtype=torch.int32)
    >>> cache.gather()[0]
    JaggedTensor(users=2, values=[6, 1, 4], dtype=torch.float32, device=cpu)
    """

    def __init__(
        self,
        users: int,
        capacity: int,
        *,
        kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        users, self.capacity = as_int("users", users), as_int("capacity", capacity)
        self.page_size = as_int("page_size", page_size)
        kv_heads, head_dim = as_int("kv_heads", kv_heads), as_int("head_dim", head_dim)
        head_dim_v = head_dim if head_dim_v is None else as_int("head_dim_v", head_dim_v)
        if users < 0 or self.capacity < 1 or min(kv_heads, head_dim, head_dim_v) < 1:
            raise ValueError(
                "capacity, kv_heads and head_dim must be at least 1, and users 0; got "
                f"{self.capacity}, {kv_heads}, {head_dim} and {head_dim_v}, {users}"
            )
        if not 1 <= self.page_size <= _LARGEST_PAGE or self.page_size & (self.page_size - 1):
            raise ValueError(
                f"page_size must be a power of two from 1 to {_LARGEST_PAGE}, got {page_size}"
            )
        if dtype not in FLOATS:
            raise TypeError(f"dtype must be floating, got {dtype}")
        pages = cdiv(self.capacity, self.page_size)
        slots = users * pages * self.page_size
        if slots > MOST_TOKENS:
            raise ValueError(f"a cache has at most {MOST_TOKENS} slots, got {slots}")
        lists = kv_heads if self.page_size == 1 else 1
        # What inference mode makes cannot be changed outside of it.
        with torch.inference_mode(False):
            self.k_store = torch.zeros(slots, kv_heads, head_dim, dtype=dtype, device=device)
            self.v_store = torch.zeros(slots, kv_heads, head_dim_v, dtype=dtype, device=device)
            self.lengths = torch.zeros(users, dtype=torch.int32, device=device)
            page = torch.arange(users * pages, dtype=torch.int32, device=device)
            self.pages = page.view(users, 1, pages).repeat(1, lists, 1)

    def __len__(self) -> int:
        return self.lengths.shape[0]

    @property
    def kv_heads(self) -> int:
        return self.k_store.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.k_store.dtype

    @property
    def device(self) -> torch.device:
        return self.k_store.device

    @property
    def nbytes(self) -> int:
        """Of keys, values, lists and lengths."""
        return sum(x.nbytes for x in (self.k_store, self.v_store, self.pages, self.lengths))

    def __repr__(self) -> str:
        _, heads, dim = self.k_store.shape
        return (
            f"HistoryCache(users={len(self)}, capacity={self.capacity}, kv_heads={heads}, "
            f"head_dim=({dim}, {self.v_store.shape[2]}), page_size={self.page_size}, "
            f"dtype={self.dtype}, device={self.device})"
        )

    @takes_nested
    def append(self, k: JaggedTensor, v: JaggedTensor, *, backend: Backend = "auto") -> None:
        """Writes each user's new events behind those that it has.

        Args:
            k, v: [T, Hk, D] and [T, Hk, Dv] of the B users: none or many of each.
            backend: "triton", or PyTorch ("native", "reference"); "auto" is triton on CUDA.

        Raises:
            TypeError, ValueError: arguments of wrong kind, shape, dtype or device; on a CPU also a
                user of more than `capacity` events. On a GPU, where looking would wait, what
                passes it is dropped, and so is, by triton, what a list leads outside of the store;
                with JAGGED_CHECK=1 both raise too.
            NotImplementedError: k or v want a gradient.
        """
        if torch._C._is_any_autocast_enabled():
            k, v = as_autocast(k, v)
        self._check_new(k, v)
        if checking():
            self.check_lists()
        chosen = choose_backend(backend, k.values)
        call(
            append_events,
            *(self.k_store, self.v_store, self.lengths, self.pages),
            *(k.values, v.values, k.offsets, self.page_size, self.capacity, chosen == "triton"),
        )

    def _check_new(self, k: JaggedTensor, v: JaggedTensor) -> None:
        for name, x, store in (("k", k, self.k_store), ("v", v, self.v_store)):
            if not isinstance(x, JaggedTensor):
                raise TypeError(f"{name} must be a JaggedTensor, got {type(x).__name__}")
            if x.values.dim() != 3 or x.values.shape[1:] != store.shape[1:] or len(x) != len(self):
                raise ValueError(
                    f"{name} must be [T, {store.shape[1]}, {store.shape[2]}] of {len(self)} users, "
                    f"got {tuple(x.values.shape)} of {len(x)}"
                )
            if x.dtype != store.dtype or x.device != store.device:
                raise TypeError(
                    f"{name} must be {store.dtype} on {store.device} as the cache, got {x.dtype} "
                    f"on {x.device}"
                )
        if k.values.shape[0] != v.values.shape[0] or known_to_differ(k.offsets, v.offsets):
            raise ValueError("k and v must have the same offsets")
        if wants_gradient(k.values, v.values):
            raise NotImplementedError(
                "a cache has no gradient: append under torch.no_grad(), or what is detached"
            )
        if readable(self.lengths) and len(self):
            longest, user = (self.lengths + k.lengths).max(0)
            if int(longest) > self.capacity:
                raise ValueError(
                    f"user {int(user)} would have {int(longest)} events, and the cache's capacity "
                    f"is {self.capacity}"
                )

    def reset(self, users: Tensor | None = None) -> None:
        """Forgets all events of some users, [N] indices or [B] bools, or of all.

        Raises:
            TypeError: `users` is no tensor, or not of int32, int64 or bool.
            ValueError: indices of another form, or bools of other users.

        >>> cache = HistoryCache(2, 8, kv_heads=1, head_dim=4)
        >>> cache.append(*[JaggedTensor(torch.ones(5, 1, 4), torch.tensor([0, 3, 5]))] * 2)
        >>> cache.reset(torch.tensor([0]))
        >>> cache.lengths.tolist()
        [0, 2]
        """
        if users is None:
            self.lengths.zero_()
        elif not isinstance(users, Tensor):
            raise TypeError(f"users must be a tensor or None, got {type(users).__name__}")
        elif users.dtype == torch.bool:
            if users.shape != self.lengths.shape:
                raise ValueError(
                    f"users must be [{len(self)}] bools, one for each, got {tuple(users.shape)}"
                )
            self.lengths.masked_fill_(users, 0)
        elif users.dtype not in (torch.int32, torch.int64):
            # Not bytes either: PyTorch has taken them for masks, and for indices.
            raise TypeError(f"users must be of int32, int64 or bool, got {users.dtype}")
        elif users.dim() != 1:
            raise ValueError(f"users must be [N] indices, got {tuple(users.shape)}")
        else:
            self.lengths.index_fill_(0, users.long(), 0)

    def gather(self) -> tuple[JaggedTensor, JaggedTensor]:
        """(k, v): what is kept of each user, in its order; copies, [T, Hk, *] with offsets [B + 1].

        The specification of what a cache holds, for tests and statistics. Waits for the device.

        Raises:
            ValueError: a list that leads outside of the store.
        """
        parts = (self.k_store, self.v_store, self.pages, self.lengths)
        k, v, offsets = gather_events(*parts, self.page_size)
        return JaggedTensor._trusted(k, offsets), JaggedTensor._trusted(v, offsets)

    def keep(self, kept: Tensor) -> None:
        """Forgets all events but some: lists are written anew, keys and values stay where they are.

        Args:
            kept: [B, G, P] bool, by place in the history, for a cache with pages of one event. As
                many for each list of a user; places behind its length do not count.

        Raises:
            TypeError: `kept` is no tensor.
            ValueError: larger pages, or another shape; on a CPU (elsewhere it would wait) also
                lists of one user that keep different numbers.

        >>> cache = HistoryCache(1, 4, kv_heads=2, head_dim=1, page_size=1)
        >>> event = torch.arange(3.0)[:, None, None].expand(3, 2, 1)
        >>> cache.append(*[JaggedTensor(event, torch.tensor([0, 3]))] * 2)
        >>> kept = torch.tensor([[True, False, True, False], [False, True, True, False]])
        >>> cache.keep(kept[None])
        >>> cache.gather()[0].values[..., 0].tolist()
        [[0.0, 1.0], [2.0, 2.0]]
        """
        if self.page_size != 1:
            raise ValueError(f"events are kept one by one with page_size=1, not {self.page_size}")
        if not isinstance(kept, Tensor):
            raise not_a_tensor("kept", kept)
        if kept.shape != self.pages.shape or kept.dtype != torch.bool:
            raise ValueError(
                f"kept must be {tuple(self.pages.shape)} of bool, got {tuple(kept.shape)} of "
                f"{kept.dtype}"
            )
        place = torch.arange(kept.shape[2], device=kept.device)
        kept = kept & (place < self.lengths[:, None, None])
        counts = kept.sum(-1, dtype=torch.int32)
        if readable(counts) and bool((counts != counts[:, :1]).any()):
            raise ValueError("all key heads of a user must keep the same number of events")
        order = torch.sort((~kept).byte(), stable=True).indices
        self.pages.copy_(self.pages.gather(-1, order))
        self.lengths.copy_(counts[:, 0])

    def check_lists(self) -> None:
        """Reads the lists where they can be read, which waits for a GPU.

        Raises:
            ValueError: a page that the store does not have.
        """
        if can_be_read(self.pages):
            check_pages(self.pages, self.k_store.shape[0] // self.page_size)
