"""The schedule of an attention call: which tile of queries meets which range of keys.

Everything irregular about a jagged batch is in two small tables of *rows*, built on the device
without waiting for it (`rows`). One row is one tile of one user's queries and the keys it can see;
the rows of the transpose are tiles of keys and the queries that see them, for dK and dV. There are
as many rows as tiles (plus unused ones, because the host only knows a bound), those of long users
first, so that short users do not wait behind a long one and no program walks padding.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jagged_kernels.core.contents import checking
from jagged_kernels.schedule.band import band_of, lists_of
from jagged_kernels.schedule.dense import DenseShape, check_dense, dense_offsets
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.rules import KeyRule
from jagged_kernels.schedule.offsets import (
    Compared,
    Versions,
    check_contents,
    find_shared,
    find_versions,
)
from jagged_kernels.schedule.row_layout import row_counts
from jagged_kernels.schedule.rows import schedule_rows
from jagged_kernels.schedule.spans import Partition, split_partitions
from jagged_kernels.schedule.tiles import Split, choose_tiles
from jagged_kernels.schedule.window import NO_BAND, WIDEST_SIDE, mask_of
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested

# Of queries or keys in a batch: rows are int32, and kernels look a side or a block beyond a token.
MOST_TOKENS = 2**31 - WIDEST_SIDE
# What tile shapes are made for where q does not say its head_dim.
_USUAL_HEAD_DIM = 64


# Not frozen: that takes many times as long to make, and each call without a schedule makes one.
@dataclass(eq=False, repr=False)
class AttentionSchedule:
    """Built by `attention_schedule` once a batch; shared by layers, heads, forward and backward.

    Attributes:
        rows: [R, 8] int32; query tiles and the keys they see (`row_layout.ROW_FIELDS`, in token
            indices).
        rows_t: [R', 8] int32; key tiles and the queries that see them.
        window: (left, right) keys visible around the aligned diagonal, -1 for no limit.
        tile_q, tile_k: tokens in a tile of queries (forward, dQ) and of keys (dK, dV).
        q_offsets: [B + 1], of jagged queries, or of dense ones laid end to end.
        k_offsets: [B + 1].
        q_tokens, k_tokens, users: what the schedule was built for.
        offsets: [B + 1], of jagged queries and keys alike, None where they are not known to be.
        dense: the shape of dense queries, None for jagged ones.
        split: "rows": a program walks a whole row. "stream", "split": rows are cut, by
            `partition` in the forward and `partition_t` in the backward; those of "stream" are in
            batch order.
        versions: (name, offsets, their version when the schedule was built) of those that say when
            they change in place.
        keys: as given, None where rows see ranges.
        lists: the blocks that they show; rows then have ranges without a mask.
        compared: "q", "k", "v" -> offsets of a call that the device has compared with the
            schedule's, and their version then.

    Two schedules are equal if they are one.

    >>> x = JaggedTensor(torch.zeros(5, 2, 8), torch.tensor([0, 3, 3, 5]))
    >>> schedule = attention_schedule(x, causal=True)
    >>> schedule.users, schedule.q_tokens, schedule.window
    (3, 5, (-1, 0))
    """

    rows: Tensor
    rows_t: Tensor
    window: tuple[int, int]
    tile_q: int
    tile_k: int
    q_offsets: Tensor
    k_offsets: Tensor
    q_tokens: int
    k_tokens: int
    users: int
    offsets: Tensor | None = None
    dense: DenseShape | None = None
    split: str = "rows"
    partition: Partition | None = None
    partition_t: Partition | None = None
    versions: Versions = ()
    keys: KeyRule | KeyLists | None = None
    lists: KeyLists | None = None
    compared: Compared = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        # A copy's offsets count their changes anew.
        return {**vars(self), "versions": (), "compared": {}}

    def __repr__(self) -> str:
        queries = "" if self.dense is None else f"{self.dense.queries} dense queries a user, "
        return (
            f"AttentionSchedule({queries}users={self.users}, tokens=({self.q_tokens}, "
            f"{self.k_tokens}), tiles=({self.tile_q}, {self.tile_k}), split={self.split!r}, "
            f"window={self.window}, device={self.rows.device})"
        )


@takes_nested
def attention_schedule(
    q: JaggedTensor | Tensor,
    k: JaggedTensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    keys: KeyRule | KeyLists | None = None,
    longest: int | None = None,
    head_dim: int | None = None,
    tile_q: int | None = None,
    tile_k: int | None = None,
    split: Split = "auto",
    shared_offsets: bool | None = None,
) -> AttentionSchedule:
    """Builds the schedule that `jagged_attention` would build for these offsets and this mask.

    A schedule is of the contents that its offsets have now: build it again when they change in
    place. `jagged_attention` raises for one that is older than its offsets, as far as they count
    their changes; what they do not (changes of inference tensors, by `Tensor.data`, by the replay
    of a CUDA graph) it sees with JAGGED_CHECK=1 in the environment.

    Args:
        q: a `JaggedTensor` with the queries' offsets (of its values only the shape matters), or
            dense queries [B, N, H, D] or [N, H, D] as `jagged_attention` takes them (under
            autocast if it is called so: the dtype counts).
        k: the keys' offsets; None for self-attention.
        causal, window, keys: as in `jagged_attention`.
        longest: tokens of the longest user, or more, a bound of the blocks that a rule of `keys`
            lists. None: offsets are read, which waits once for a GPU. Of a user with more tokens,
            those behind see and are seen by nothing.
        head_dim: a hint for the tile shapes, never a number in the result: the larger of q's and
            v's. By default q's, so that it is needed only where v's is larger, or where q's values
            are not [T, H, D] (then 64 is taken).
        tile_q, tile_k: powers of two, 16 or more, in place of the default tile shapes.
        split: how rows become programs. "rows": a program each. "stream": rows are cut into spans
            of equal cost (LeanAttention, arXiv 2405.10480), "split": each row into equal chunks;
            both for dense queries, at most 64 a user. "auto": "stream" where it can be.
        shared_offsets: whether the offsets of jagged q and k, where they are two tensors, have the
            same contents: then one table serves both, and users of few tokens have kernels of
            their own. None: they are compared, which waits once for a GPU if q and k have as many
            tokens (not in a trace or while a CUDA graph is captured: there they count as
            different). True: they are, without waiting; a GPU stops at its next operation if that
            is wrong. False: taken as different.

    Raises:
        TypeError: `q` is neither, or `window` is not two integers.
        ValueError: `q` and `k` have different numbers of users or are on different devices, dense
            `q` comes without `k`, `split` asks for a cut that these queries cannot have,
            `shared_offsets` is True for dense queries or for offsets seen to differ, or there are
            more than 1.5 * 2^30 queries or keys.

    >>> x = JaggedTensor(torch.randn(5, 2, 8), torch.tensor([0, 3, 3, 5]))
    >>> schedule = attention_schedule(x, causal=True)  # once a batch, for all layers
    >>> for layer in range(2):
    ...     x = jagged_attention(x, x, x, causal=True, schedule=schedule)
    >>> x
    JaggedTensor(users=3, values=[5, 2, 8], dtype=torch.float32, device=cpu)
    """
    # What inference mode makes cannot be used in training.
    with _outside_inference_mode():
        if not (k is None or isinstance(k, JaggedTensor)):
            raise TypeError(f"k must be a JaggedTensor, got {type(k).__name__}")
        if isinstance(q, JaggedTensor):
            k = q if k is None else k
            check_users(q, k)
            q_offsets, q_tokens, dense = q.offsets, q.values.shape[0], None
            q_dim = q.values.shape[2] if q.values.dim() == 3 else _USUAL_HEAD_DIM
        else:
            if not isinstance(q, Tensor):
                raise TypeError(f"q must be a JaggedTensor or a tensor, got {type(q).__name__}")
            if k is None:
                raise ValueError("dense queries need k, the users' histories")
            q_offsets, dense = dense_offsets(q, k), DenseShape.of(q, k)
            q_tokens, q_dim = len(k) * dense.queries, q.shape[-1]
        if q.device != k.device:
            raise ValueError(f"q and k must be on one device, got {q.device} and {k.device}")
        if checking():
            check_contents(k=k) if isinstance(q, Tensor) else check_contents(q=q, k=k)
        values = q.values if isinstance(q, JaggedTensor) else q
        heads = values.shape[-2] if values.dim() > 2 else 1
        lists = lists_of(keys, q_offsets, k.offsets, (q_tokens, k.values.shape[0]), heads, longest)
        return build_schedule(
            q_offsets,
            k.offsets,
            q_tokens=q_tokens,
            k_tokens=k.values.shape[0],
            offsets=find_shared(q, k, shared_offsets),
            dense=dense,
            window=band_of(keys, causal, window),
            head_dim=q_dim if head_dim is None else head_dim,
            tile_q=tile_q,
            tile_k=tile_k,
            split=split,
            versions=find_versions(q_offsets, k.offsets),
            keys=keys,
            lists=lists,
        )


def _outside_inference_mode() -> AbstractContextManager[Any]:
    # `torch.compile` cannot ask, and what it makes is no inference tensor.
    inside = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inside else nullcontext()


def build_schedule(
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    q_tokens: int,
    k_tokens: int,
    offsets: Tensor | None,
    dense: DenseShape | None,
    window: tuple[int, int],
    head_dim: int,
    tile_q: int | None = None,
    tile_k: int | None = None,
    split: Split = "auto",
    versions: Versions = (),
    keys: KeyRule | KeyLists | None = None,
    lists: KeyLists | None = None,
) -> AttentionSchedule:
    """`attention_schedule` for offsets that fit each other, without waiting for a device.

    Args:
        offsets: of queries and keys alike, None where each have their own.
        dense: the shape of q, if it came so.
        versions, keys, lists: of `AttentionSchedule`.
    """
    if q_tokens > MOST_TOKENS or k_tokens > MOST_TOKENS:
        raise ValueError(
            f"the kernels count up to {MOST_TOKENS} queries and keys in int32, got {q_tokens} and "
            f"{k_tokens}; use backend='native' or smaller batches"
        )
    users = q_offsets.shape[0] - 1
    policy, tile_q, tile_k = choose_tiles(
        dense, split, tile_q, tile_k, q_tokens=q_tokens, users=users, k_tokens=k_tokens,
        head_dim=head_dim, device=q_offsets.device, mask=mask_of(*window), keys=lists,
    )  # fmt: skip
    tiles = (tile_q, tile_k)
    rows, rows_t = build_tables(
        q_offsets, k_offsets,
        (q_tokens, k_tokens), tiles, window if lists is None else NO_BAND,
        split=policy, shared=offsets is not None,
    )  # fmt: skip
    partitions = (None, None)
    if dense is not None and policy != "rows":
        listed = None if lists is None else (lists, q_offsets)
        partitions = split_partitions(
            rows,
            listed=listed,
            policy=policy,
            heads=dense.heads,
            kv_heads=dense.kv_heads,
            tile_q=tile_q,
            head_dim=head_dim,
            element_size=dense.element_size,
            k_tokens=k_tokens,
        )
    return AttentionSchedule(
        rows, rows_t, window, tile_q, tile_k,
        q_offsets, k_offsets, q_tokens, k_tokens, users, offsets, dense, policy, *partitions,
        versions, keys, lists,
    )  # fmt: skip


def build_tables(
    q_offsets: Tensor,
    k_offsets: Tensor,
    tokens: tuple[int, int],
    tiles: tuple[int, int],
    window: tuple[int, int],
    *,
    split: str,
    shared: bool,
) -> tuple[Tensor, Tensor]:
    """(rows, rows_t) of an `AttentionSchedule`; tokens and tiles of (queries, keys)."""
    left, right = window
    # Spans of equal cost take rows in any order.
    sort = split != "stream"
    # Seen from the keys the mask is the same band with its sides exchanged.
    symmetric = sort and shared and left == right and tiles[0] == tiles[1]
    table = schedule_rows(
        q_offsets, k_offsets, *tokens, *tiles, left, right, sort, not symmetric
    )  # fmt: skip
    if symmetric:
        return table, table
    users = q_offsets.shape[0] - 1
    counts = row_counts(*tokens, users, tile_q=tiles[0], tile_k=tiles[1], sort=sort)
    rows, rows_t = table.split_with_sizes(counts)
    return rows, rows_t


def dense_queries(
    q: Tensor, k: JaggedTensor, schedule: AttentionSchedule | None = None
) -> JaggedTensor:
    """Dense queries [B, N, H, D], or [N, H, D] for every user alike, as a `JaggedTensor`.

    The offsets are the schedule's, where it was built for as many dense queries a user.
    """
    users = len(k)
    check_dense(q, users)
    dense = None if schedule is None else schedule.dense
    if (
        schedule is not None
        and dense is not None
        and schedule.users == users
        and dense.queries == q.shape[-3]
    ):
        offsets = schedule.q_offsets
    else:
        offsets = dense_offsets(q, k)
    if q.dim() == 3:
        q = q.expand(users, *q.shape)
    return JaggedTensor._trusted(q.reshape(users * q.shape[1], *q.shape[2:]), offsets)


def check_users(q: JaggedTensor, k: JaggedTensor) -> None:
    if len(q) != len(k):
        raise ValueError(f"q has {len(q)} users and k has {len(k)}")
