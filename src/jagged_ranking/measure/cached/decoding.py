"""New queries of users over what a cache has of them, and how a cache grows: problems and peers."""

import functools
import inspect
import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from jagged_kernels import (
    HistoryCache,
    JaggedTensor,
    cache_schedule,
    cached_attention,
    jagged_attention,
    jagged_cat,
    lengths_to_offsets,
)
from jagged_kernels.cache.slots import slots_of
from jagged_ranking.measure.cached.cached_ops import SCHEDULE
from jagged_ranking.measure.cached.cases import Case
from jagged_ranking.measure.interaction.layout import Form, masked, positions
from jagged_ranking.measure.interaction.problem import Peer, Problem
from jagged_ranking.measure.providers.base import Unavailable, need_cuda, need_half
from jagged_ranking.measure.providers.optional import FLASHINFER_WORKSPACE, find

# FlashAttention-2 has pages of a multiple of this.
_FLASH_PAGE = 256


class Cached:
    """Users whose histories lie in a cache, the newest events among them their queries.

    Attributes:
        lengths, new: [B] int64 on the device.
        k, v: [T, H, D], all events; q: [Tq, H, D], of the newest.
        cache: holds k and v.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.on_host = case.lengths()
        self.lengths, self.new = self.on_host.to(device), case.new().to(device)
        self.offsets = lengths_to_offsets(self.on_host).to(device)
        self.new_offsets = lengths_to_offsets(case.new()).to(device)
        generator = torch.Generator(device).manual_seed(case.seed + 2)
        shape = (case.heads, case.head_dim)
        counts = (int(self.on_host.sum()), int(self.on_host.sum()), int(case.new().sum()))
        self.k, self.v, self.q = (
            torch.randn(count, *shape, generator=generator, device=device).to(case.dtype)
            for count in counts
        )
        self.cache = HistoryCache(
            case.users, case.history, kv_heads=case.heads, head_dim=case.head_dim,
            page_size=case.page_size, dtype=case.dtype, device=device,
        )  # fmt: skip
        with torch.no_grad():
            self.cache.append(self.jagged(self.k), self.jagged(self.v))

    def jagged(self, values: Tensor) -> JaggedTensor:
        return JaggedTensor(values, self.offsets, validate=False)

    def queries(self, values: Tensor) -> JaggedTensor:
        return JaggedTensor(values, self.new_offsets, validate=False)

    def newest(self) -> Tensor:
        """[Tq]: where the new events stand among all."""
        user = self.user_of_query()
        place = torch.arange(len(user), device=self.device) - self.new_offsets[user]
        return self.offsets[1:][user] - self.new[user] + place

    def user_of_query(self) -> Tensor:
        users = torch.arange(self.case.users, device=self.device)
        return users.repeat_interleave(self.new, output_size=len(self.q))

    def slots(self) -> Tensor:
        """[T]: where the cache has each event."""
        user, place = self.exists().nonzero(as_tuple=True)
        return slots_of(self.cache.pages, user, place, self.case.page_size)[:, 0]

    def exists(self) -> Tensor:
        """[B, longest] bool."""
        return positions(self.lengths, self.case.history)

    def padded(self, values: Tensor) -> Tensor:
        """[T, H, D] -> [B, H, longest, D]."""
        return masked(self.exists).to(values).transpose(1, 2).contiguous()


def decoding(case: Case, device: torch.device) -> Problem:
    """`cached_attention`, its schedule made beforehand as for all layers of a model."""
    users = Cached(case, device)
    build = functools.partial(cache_schedule, users.queries(users.q), users.cache)
    schedule = build()

    def call(backend: Any, q: Tensor) -> Tensor:
        asked = users.queries(q)
        if backend == "auto":
            return cached_attention(asked, users.cache, schedule=schedule).values
        # What the cache was given, not what it says that it has.
        k, v = (users.jagged(x.to(q.dtype)) for x in (users.k, users.v))
        return jagged_attention(asked, k, v, causal=True, backend=backend).values

    tokens, size = len(users.k), case.dtype.itemsize
    width = case.heads * case.head_dim
    pairs = float((users.new * users.lengths - users.new * (users.new - 1) // 2).sum())
    return Problem(
        call=call,
        inputs=(users.q,),
        bytes=(2.0 * (tokens + len(users.q)) * width * size, 0.0),
        flops=(4.0 * width * pairs, 0.0),
        peers={
            "varlen_paged": _varlen_paged(users),
            "varlen_gathered": _varlen_gathered(users),
            "flashinfer": _flashinfer_paged(users),
            "dense_sdpa": _padded_sdpa(users),
        },
        builds={SCHEDULE: build},
    )


def _varlen_paged(users: Cached) -> Peer | Unavailable:
    """FlashAttention-2 with a table of pages of its own size."""
    attend = _varlen(users)
    if isinstance(attend, Unavailable):
        return attend
    if "block_table" not in inspect.signature(attend).parameters:
        return Unavailable("missing", f"varlen_attn of torch {torch.__version__} has no pages")
    case = users.case
    pages = -(-case.history // _FLASH_PAGE)
    used, q_offsets = users.lengths.int(), users.new_offsets.int()

    @functools.cache
    def stored() -> tuple[Tensor, Tensor, Tensor]:
        numbers = torch.arange(case.users * pages, dtype=torch.int32, device=users.device)
        shape = (case.users * pages, _FLASH_PAGE, case.heads, case.head_dim)
        there = positions(users.lengths, pages * _FLASH_PAGE)
        k, v = (masked(lambda: there).to(x).view(shape) for x in (users.k, users.v))
        return k, v, numbers.view(case.users, pages)

    def forward(q: Tensor) -> Tensor:
        k, v, table = stored()
        return attend(
            q, k, v, q_offsets, None, case.queries, case.history,
            window_size=(-1, 0), seqused_k=used, block_table=table,
        )  # fmt: skip

    return Peer(forward, needs=2 * case.users * pages * _FLASH_PAGE * _bytes_of_event(case))


def _varlen_gathered(users: Cached) -> Peer | Unavailable:
    """FlashAttention-2 over a copy of what the cache holds, which is part of the time."""
    attend = _varlen(users)
    if isinstance(attend, Unavailable):
        return attend
    case = users.case
    slots, cache = users.slots(), users.cache
    q_offsets, k_offsets = users.new_offsets.int(), users.offsets.int()
    causal: dict[str, Any] = {"window_size": (-1, 0)}
    if "window_size" not in inspect.signature(attend).parameters:
        causal = {"is_causal": True}

    def forward(q: Tensor) -> Tensor:
        k, v = (x.index_select(0, slots) for x in (cache.k_store, cache.v_store))
        return attend(q, k, v, q_offsets, k_offsets, case.queries, case.history, **causal)

    return Peer(forward, needs=2 * len(users.k) * _bytes_of_event(case))


def _flashinfer_paged(users: Cached) -> Peer | Unavailable:
    """FlashInfer over the very pages of the cache; its plan is made beforehand, as our schedule."""
    case, pages = users.case, users.cache.pages[:, 0]
    try:
        make = find("BatchPrefillWithPagedKVCacheWrapper", ("flashinfer",), "flashinfer")
        need_cuda(users.device, "FlashInfer")
        need_half(case.dtype, "FlashInfer")
    except Unavailable as error:
        return error

    @functools.cache
    def planned() -> Any:
        workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=users.device)
        wrapper = make(workspace, "NHD", backend="fa2")
        used = -(-users.lengths // case.page_size)
        wrapper.plan(
            users.new_offsets.int(),
            lengths_to_offsets(used).int(),
            pages[positions(used, pages.shape[1])],
            (users.lengths - (used - 1) * case.page_size).int(),
            case.heads,
            case.heads,
            case.head_dim,
            case.page_size,
            causal=True,
            q_data_type=case.dtype,
        )
        return wrapper

    def forward(q: Tensor) -> Tensor:
        paged = (-1, case.page_size, case.heads, case.head_dim)
        return planned().run(q, (users.cache.k_store.view(paged), users.cache.v_store.view(paged)))

    return Peer(forward, needs=FLASHINFER_WORKSPACE)


def _varlen(users: Cached) -> Any:
    try:
        need_cuda(users.device, "varlen_attn")
        need_half(users.case.dtype, "varlen_attn")
        from torch.nn.attention.varlen import varlen_attn
    except Unavailable as error:
        return error
    except ImportError:
        return Unavailable("missing", f"torch {torch.__version__} has no torch.nn.attention.varlen")
    return varlen_attn


def _padded_sdpa(users: Cached) -> Peer:
    """PyTorch's SDPA over padded keys, which are kept padded. The mask is added to scores, in their
    dtype: of booleans SDPA would make that in each call."""
    case = users.case

    @functools.cache
    def stored() -> tuple[Tensor, Tensor, Tensor]:
        key = torch.arange(case.history, device=users.device)
        query = torch.arange(case.queries, device=users.device)
        last = (users.lengths - users.new)[:, None] + query  # the newest key that a query sees
        hidden = key > last[:, :, None]
        # What has no query sees the first key, lest it be NaN.
        seen = ~hidden & (query < users.new[:, None])[:, :, None]
        seen[:, :, 0] = True
        added = torch.zeros_like(seen, dtype=case.dtype).masked_fill_(~seen, -math.inf)
        return users.padded(users.k), users.padded(users.v), added[:, None]

    def forward(q: Tensor) -> Tensor:
        k, v, added = stored()
        return scaled_dot_product_attention(q, k, v, attn_mask=added)

    form = masked(lambda: positions(users.new, case.queries))
    heads_first = Form(lambda x: form.to(x).transpose(1, 2), lambda x: form.back(x.transpose(1, 2)))
    needs = 2 * case.users * case.history * _bytes_of_event(case)
    return Peer(forward, [heads_first], [heads_first], needs=needs)


def _bytes_of_event(case: Case) -> int:
    return case.heads * case.head_dim * case.dtype.itemsize


def appending(case: Case, device: torch.device) -> Problem:
    """`HistoryCache.append` of the new events, after which the cache forgets them again: setting
    its lengths back is part of the time."""
    users = Cached(case, device)
    cache, newest = users.cache, users.newest()
    slots, before = users.slots()[newest], cache.lengths - users.new.int()

    plain: list[Tensor] = []  # what the plain way would have written, if it was called last

    def forget() -> None:
        cache.k_store[slots] = cache.v_store[slots] = 0

    def call(backend: Any, k: Tensor, v: Tensor) -> Tensor:
        if backend == "auto":
            plain.clear()
            cache.lengths.copy_(before)
            cache.append(users.queries(k), users.queries(v))
        else:
            plain[:] = [x.detach().to(case.dtype) for x in (k, v)]
        return cache.lengths

    def written(_: Tensor) -> Tensor:
        """[Tq, H, 2 D]: what lies where the new events belong; nothing from then on."""
        found = torch.cat(plain or [cache.k_store[slots], cache.v_store[slots]], dim=2)
        forget()
        return found

    forget()
    moved = 2.0 * 2 * len(users.q) * _bytes_of_event(case)
    return Problem(
        call=call,
        inputs=(users.k[newest], users.v[newest]),
        outputs=[Form(lambda x: x, written)],
        bytes=(moved, 0.0),
        peers={"padded": _padded_append(users), "cat": _cat(users)},
    )


def _padded_append(users: Cached) -> Peer:
    """PyTorch's indexing into keys that are kept padded."""
    case, user = users.case, users.user_of_query()
    place = users.newest() - users.offsets[user]

    @functools.cache
    def stored() -> tuple[Tensor, Tensor]:
        shape = (case.users, case.history, case.heads, case.head_dim)
        k, v = (torch.zeros(shape, dtype=case.dtype, device=users.device) for _ in range(2))
        return k, v

    def forward(k: Tensor, v: Tensor) -> Tensor:
        k_kept, v_kept = stored()
        k_kept[user, place], v_kept[user, place] = k, v
        return users.cache.lengths

    def written(_: Tensor) -> Tensor:
        return torch.cat([x[user, place] for x in stored()], dim=2)

    needs = 2 * case.users * case.history * _bytes_of_event(case)
    return Peer(forward, outputs=[Form(lambda x: x, written)], needs=needs)


def _cat(users: Cached) -> Peer:
    """Histories without a cache: old and new events copied behind each other."""
    newest = users.newest()
    is_new = torch.zeros(len(users.k), dtype=torch.bool, device=users.device)
    is_new[newest] = True
    offsets = users.offsets - users.new_offsets
    result: list[Tensor] = []

    def forward(k: Tensor, v: Tensor) -> Tensor:
        joined = [
            jagged_cat([JaggedTensor(old, offsets, validate=False), users.queries(new)]).values
            for old, new in ((old_k, k), (old_v, v))
        ]
        result[:] = joined
        return users.cache.lengths

    def written(_: Tensor) -> Tensor:
        return torch.cat([x[newest] for x in result], dim=2)

    old_k, old_v = users.k[~is_new], users.v[~is_new]
    return Peer(
        forward,
        outputs=[Form(lambda x: x, written)],
        needs=4 * len(users.k) * _bytes_of_event(users.case),
    )
