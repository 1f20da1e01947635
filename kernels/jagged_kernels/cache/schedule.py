"""The schedule of one step of queries over a cache, for all layers of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from jagged_kernels.cache.history import HistoryCache
from jagged_kernels.core.autocast import dtype_in_products
from jagged_kernels.core.backends import multiprocessors
from jagged_kernels.core.contents import readable
from jagged_kernels.core.operators import call
from jagged_kernels.core.sizes import padded_dim, power_of_two
from jagged_kernels.schedule.offsets import Compared, compare_offsets, stale
from jagged_kernels.schedule.row_layout import NO_LIMIT
from jagged_kernels.schedule.rows import schedule_rows
from jagged_kernels.schedule.spans import (
    SHORT_ROW,
    Partition,
    build_partition,
    members_in_tile,
    pack_size,
    split_backward_fits,
    split_forward_config,
    stream_programs,
)
from jagged_kernels.schedule.tiles import MOST_SPLIT_QUERIES
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested
from jagged_kernels.tensors.offsets import cumulative

# Of queries: as deep as a matrix product must be.
SMALLEST_TILE = 16


@dataclass(eq=False, repr=False)
class CacheSchedule:
    """Built by `cache_schedule` once a step; shared by the caches of all layers.

    Attributes:
        rows: [R, 8] int32, tiles of `tile_q` queries, and the keys that they see, counted as if
            those of all users lay one after another.
        partition: who walks which of them.
        q_offsets, k_offsets: [B + 1], of the queries, and sums of the cache's lengths.
        causal: as in `cached_attention`.
        q_tokens: queries.
        heads: of queries, of keys, the larger head_dim, and bytes of a number: what the partition
            is made for.
        lengths, version: the cache's, and their version then; None in a trace, which has none.
        compared: offsets of calls that the device has compared with `q_offsets`.

    >>> cache = HistoryCache(2, 8, kv_heads=1, head_dim=4)
    >>> q = JaggedTensor(torch.randn(3, 2, 4), torch.tensor([0, 1, 3]))
    >>> cache.append(q.with_values(q.values[:, :1]), q.with_values(q.values[:, :1]))
    >>> schedule = cache_schedule(q, cache)
    >>> schedule
    CacheSchedule(users=2, q_tokens=3, tile_q=16, causal=True, device=cpu)
    """

    rows: Tensor
    partition: Partition
    q_offsets: Tensor
    k_offsets: Tensor
    tile_q: int
    causal: bool
    q_tokens: int
    heads: tuple[int, int, int, int]
    lengths: Tensor
    version: int | None
    compared: Compared = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"CacheSchedule(users={self.lengths.shape[0]}, q_tokens={self.q_tokens}, "
            f"tile_q={self.tile_q}, causal={self.causal}, device={self.rows.device})"
        )


@takes_nested
def cache_schedule(
    q: JaggedTensor, cache: HistoryCache, *, causal: bool = True, tile_q: int | None = None
) -> CacheSchedule:
    """What `cached_attention` would build for these queries and what the cache holds now.

    Layers whose caches have the same lengths share it: build it after the step's new events were
    appended. On the device, in a few launches, and without waiting.

    Args:
        q: queries [T, H, D]; of their values the shape matters, and the dtype.
        causal: as in `cached_attention`.
        tile_q: queries of a user that are walked together, a power of two from 16 to 64; by default
            it holds twice what users have on average. A user may have any number, and has its keys
            read once for each tile.

    Raises:
        TypeError, ValueError: q is no `JaggedTensor` of the cache's users and head_dim, or another
            tile.

    >>> cache = HistoryCache(1, 8, kv_heads=1, head_dim=4)
    >>> q = JaggedTensor(torch.randn(2, 1, 4), torch.tensor([0, 2]))
    >>> cache.append(q, q)
    >>> cache_schedule(q, cache).k_offsets.tolist()
    [0, 2]
    """
    check_queries(q, cache)
    queries, users = q.values.shape[0], len(cache)
    heads = shape_of_heads(q, cache)
    if tile_q is None:
        # Rows of a tile without a query cost less than keys that are read twice.
        most = power_of_two(max(-(-2 * queries // max(users, 1)), 1))
        tile_q = min(max(most, SMALLEST_TILE), MOST_SPLIT_QUERIES)
        while tile_q > SMALLEST_TILE and not split_backward_fits(
            *heads[:2], tile_q, *heads[2:], q.device
        ):
            tile_q //= 2
    elif not SMALLEST_TILE <= tile_q <= MOST_SPLIT_QUERIES or tile_q & (tile_q - 1):
        raise ValueError(f"tile_q must be a power of two from 16 to 64, got {tile_q}")
    k_offsets = cumulative(cache.lengths)
    k_tokens, right = users * cache.capacity, 0 if causal else NO_LIMIT
    band = (queries, k_tokens, tile_q, tile_q, NO_LIMIT, right)
    rows = call(schedule_rows, q.offsets, k_offsets, *band, True, False)
    return CacheSchedule(
        rows, _partition(cache, rows, heads, tile_q), q.offsets, k_offsets, tile_q, causal,
        queries, heads, cache.lengths,
        None if torch.compiler.is_compiling() else cache.lengths._version,
    )  # fmt: skip


def shape_of_heads(q: JaggedTensor, cache: HistoryCache) -> tuple[int, int, int, int]:
    """Heads of queries and of keys, the larger head_dim, and bytes of a number."""
    dim = max(cache.k_store.shape[2], cache.v_store.shape[2])
    return q.values.shape[1], cache.kv_heads, dim, dtype_in_products(q.values).itemsize


def _partition(
    cache: HistoryCache, rows: Tensor, shape: tuple[int, int, int, int], tile_q: int
) -> Partition:
    """`spans.split_partitions` of a forward alone, where the host knows how many keys there may be,
    and not how many there are."""
    heads, kv_heads, dim, element_size = shape
    members = members_in_tile(heads, kv_heads, tile_q)
    pack = pack_size(members, tile_q)
    short = cache.capacity < SHORT_ROW
    config = split_forward_config(padded_dim(dim), element_size, pack, short=short)
    programs = stream_programs(
        multiprocessors(rows.device),
        groups=heads // members,
        rows=rows.shape[0],
        k_tokens=len(cache) * cache.capacity,
        config=config,
    )
    return build_partition(rows, block=config.block, programs=programs)


def check_queries(q: JaggedTensor, cache: HistoryCache) -> None:
    """Whether a cache can be asked by such queries.

    Raises:
        TypeError, ValueError: not [T, H, D] of its users, heads, head_dim, dtype and device.
    """
    if not isinstance(q, JaggedTensor):
        raise TypeError(f"q must be a JaggedTensor, got {type(q).__name__}")
    if not isinstance(cache, HistoryCache):
        raise TypeError(f"cache must be a HistoryCache, got {type(cache).__name__}")
    shape, (_, kv_heads, dim) = q.values.shape, cache.k_store.shape
    if len(shape) != 3 or shape[2] != dim or shape[1] == 0 or shape[1] % kv_heads:
        raise ValueError(
            f"q must be [T, H, {dim}] with H a multiple of the cache's {kv_heads} heads, got "
            f"{tuple(shape)}"
        )
    if len(q) != len(cache):
        raise ValueError(f"q has {len(q)} users and the cache {len(cache)}")
    if dtype_in_products(q.values) != cache.dtype or q.device != cache.device:
        raise TypeError(
            f"q must be {cache.dtype} on {cache.device} as the cache, got {q.dtype} on {q.device}"
        )


def check_schedule(
    schedule: CacheSchedule, q: JaggedTensor, cache: HistoryCache, causal: bool
) -> None:
    """Whether a schedule serves a call.

    Raises:
        TypeError: not from `cache_schedule`.
        ValueError: it is of another batch, mask, or kind of heads, or of what the cache held
            before; of another layer's cache whose lengths are seen to differ.
    """
    if not isinstance(schedule, CacheSchedule):
        raise TypeError(
            f"schedule must be a CacheSchedule, from cache_schedule, got {type(schedule).__name__}"
        )
    built = (schedule.q_tokens, schedule.lengths.shape[0], schedule.causal, schedule.heads)
    wanted = (q.values.shape[0], len(cache), causal, shape_of_heads(q, cache))
    if built != wanted:
        raise ValueError(
            "the schedule was built for another batch: (q tokens, users, causal, (heads, kv_heads, "
            f"head_dim, bytes)) is {built} in the schedule and {wanted} in the call"
        )
    if schedule.rows.device != q.device:
        raise ValueError(f"the schedule is on {schedule.rows.device} and q on {q.device}")
    if torch.compiler.is_compiling():
        return
    same = schedule.lengths is cache.lengths
    if same and schedule.version not in (None, cache.lengths._version):
        raise ValueError(stale("the cache's lengths"))
    if readable(cache.lengths) and not torch.equal(schedule.k_offsets.diff(), cache.lengths):
        raise ValueError("the schedule was built for a cache of other lengths")
    compare_offsets("q", schedule.q_offsets, q.offsets, schedule.compared)
