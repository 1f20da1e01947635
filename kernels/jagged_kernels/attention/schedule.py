"""The schedule of an attention call: which tile of queries meets which range of keys.

Everything irregular about a jagged batch is in two small tables of *rows*, built on the device
by a few vectorised operations without waiting for it. One row is one tile of one user's queries
and the keys it can see; the rows of the transpose are tiles of keys and the queries that see
them, for dK and dV. There are exactly as many rows as tiles (plus unused ones at the end, because
the host only knows a bound), longest first, so that short users do not wait behind a long one and
no program walks padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from jagged_kernels.attention.partition import Partition, split_backward_fits, split_partition
from jagged_kernels.attention.tiles import default_tiles
from jagged_kernels.jagged_tensor import JaggedTensor

# Fields of a row, int32; padded to 8 so that a row is one 32-byte sector.
ROW_FIELDS = ("tile_start", "tile_end", "range_start", "range_end", "shift", "user")
ROW_WIDTH = 8

NO_LIMIT = -1

Split = Literal["auto", "rows", "split", "stream"]
_SPLITS = ("auto", "rows", "split", "stream")
# Queries of one user that one tile of the split kernels holds.
MOST_SPLIT_QUERIES = 64


@dataclass(frozen=True)
class AttentionSchedule:
    """Built by `attention_schedule` once a batch; shared by layers, heads, forward and backward.

    Attributes:
        rows: [R, 8] int32; query tiles and the keys they see (`ROW_FIELDS`, token indices).
        rows_t: [R', 8] int32; key tiles and the queries that see them.
        window: (left, right) keys visible around the aligned diagonal, -1 for no limit.
        tile_q, tile_k: tokens in a tile of queries (forward, dQ) and of keys (dK, dV).
        q_tokens, k_tokens, users: what the schedule was built for.
        split: "rows": a program walks a whole row. "stream", "split": rows are cut, by
            `partition` in the forward and `partition_t` in the backward.
    """

    rows: Tensor
    rows_t: Tensor
    window: tuple[int, int]
    tile_q: int
    tile_k: int
    q_tokens: int
    k_tokens: int
    users: int
    split: str = "rows"
    partition: Partition | None = None
    partition_t: Partition | None = None


def attention_schedule(
    q: JaggedTensor | Tensor,
    k: JaggedTensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    head_dim: int = 64,
    tile_q: int | None = None,
    tile_k: int | None = None,
    split: Split = "auto",
) -> AttentionSchedule:
    """Builds the schedule that `jagged_attention` would build for these offsets and this mask.

    Args:
        q: a `JaggedTensor` with the queries' offsets (its values do not matter), or dense
            queries [B, N, H, D] or [N, H, D] as `jagged_attention` takes them.
        k: the keys' offsets; None for self-attention.
        causal, window: as in `jagged_attention`.
        head_dim: a hint for the tile shapes, never a number in the result.
        tile_q, tile_k: powers of two, 16 or more, in place of the default tile shapes.
        split: how rows become programs. "rows": a program each. "stream": rows are cut into spans
            of equal cost (LeanAttention, arXiv 2405.10480), "split": each row into equal chunks;
            both for dense queries, at most 64 a user. "auto": "stream" where it can be.

    Raises:
        ValueError: `q` and `k` have different numbers of users, dense `q` comes without `k`, or
            `split` asks for a cut that these queries cannot have.
    """
    if not isinstance(q, JaggedTensor):
        if k is None:
            raise ValueError("dense queries need k, the users' histories")
        return dense_schedule(
            q, k, window=resolve_window(causal, window), head_dim=head_dim,
            tile_q=tile_q, tile_k=tile_k, split=split,
        )  # fmt: skip
    if split not in ("auto", "rows"):
        raise ValueError(f"split must be auto or rows for jagged queries, got {split!r}")
    k = q if k is None else k
    check_users(q, k)
    tiles = default_tiles(head_dim)
    return build_schedule(
        q.offsets,
        k.offsets,
        q_tokens=q.values.shape[0],
        k_tokens=k.values.shape[0],
        window=resolve_window(causal, window),
        tile_q=_checked_tile(tile_q, tiles[0]),
        tile_k=_checked_tile(tile_k, tiles[1]),
    )


def dense_schedule(
    q: Tensor,
    k: JaggedTensor,
    *,
    window: tuple[int, int],
    head_dim: int,
    tile_q: int | None = None,
    tile_k: int | None = None,
    split: Split = "auto",
) -> AttentionSchedule:
    """`attention_schedule` for dense queries [B, N, H, D] or [N, H, D]."""
    if split not in _SPLITS:
        raise ValueError(f"split must be one of {', '.join(_SPLITS)}; got {split!r}")
    tiles = default_tiles(head_dim)
    queries, heads = q.shape[-3:-1]
    kv_heads = k.values.shape[1]
    # One tile for a user's queries, no larger than it must be: products with empty rows cost
    # more than the few keys of a short history do.
    tile = _checked_tile(tile_q, max(16, 1 << (max(queries, 1) - 1).bit_length()))
    fits = 0 < queries <= min(tile, MOST_SPLIT_QUERIES) and len(k) > 0 and k.values.shape[0] > 0
    fits = fits and split_backward_fits(heads, kv_heads, tile)
    if split in ("split", "stream") and not fits:
        raise ValueError(
            f"split={split!r} needs 1 to {MOST_SPLIT_QUERIES} queries a user, a tile_q that holds "
            f"them and at least one key; got {queries} queries, {heads} heads over {kv_heads}, "
            f"tile_q={tile_q}, {k.values.shape[0]} keys of {len(k)} users"
        )
    cut = fits and split != "rows"
    jagged = dense_queries(q, k)
    schedule = build_schedule(
        jagged.offsets,
        k.offsets,
        q_tokens=jagged.values.shape[0],
        k_tokens=k.values.shape[0],
        window=window,
        tile_q=tile if cut else _checked_tile(tile_q, tiles[0]),
        tile_k=_checked_tile(tile_k, tiles[1]),
    )
    if not cut:
        return schedule
    policy = "split" if split == "split" else "stream"
    partition, partition_t = (
        split_partition(
            schedule.rows,
            policy=policy,
            heads=heads,
            kv_heads=kv_heads,
            tile_q=tile,
            head_dim=head_dim,
            element_size=q.element_size(),
            k_tokens=schedule.k_tokens,
            backward=backward,
        )
        for backward in (False, True)
    )
    return replace(schedule, split=policy, partition=partition, partition_t=partition_t)


def build_schedule(
    q_offsets: Tensor,
    k_offsets: Tensor,
    *,
    q_tokens: int,
    k_tokens: int,
    window: tuple[int, int],
    tile_q: int,
    tile_k: int,
) -> AttentionSchedule:
    """`attention_schedule` on checked arguments."""
    left, right = window
    rows = build_rows(q_offsets, k_offsets, tokens=q_tokens, tile=tile_q, left=left, right=right)
    # Seen from the keys the mask is the same band with its sides exchanged.
    if q_offsets is k_offsets and left == right and tile_q == tile_k:
        rows_t = rows
    else:
        rows_t = build_rows(
            k_offsets, q_offsets, tokens=k_tokens, tile=tile_k, left=right, right=left
        )
    users = q_offsets.shape[0] - 1
    return AttentionSchedule(rows, rows_t, window, tile_q, tile_k, q_tokens, k_tokens, users)


def build_rows(
    offsets: Tensor, other_offsets: Tensor, *, tokens: int, tile: int, left: int, right: int
) -> Tensor:
    """[R, 8] int32 rows for tiles of `offsets` over ranges of `other_offsets`, longest first.

    R = tokens // tile + users bounds the number of tiles and is known on the host. Unused rows
    come last and have tile_start == tile_end. Token i of a tile sees tokens
    i + shift - left ... i + shift + right of the other side: `shift` aligns the two ends of a
    user, as in flash-attn.
    """
    users = offsets.shape[0] - 1
    row_count = tokens // tile + users
    if users == 0:
        return offsets.new_zeros((0, ROW_WIDTH), dtype=torch.int32)
    start, end = offsets[:-1].int(), offsets[1:].int()
    other_start, other_end = other_offsets[:-1].int(), other_offsets[1:].int()

    tiles = (end - start + tile - 1) // tile
    tiles_up_to = tiles.cumsum(0, dtype=torch.int32)
    row = torch.arange(row_count, device=offsets.device, dtype=torch.int32)
    user = torch.searchsorted(tiles_up_to, row, right=True)
    used = user < users
    user = user.clamp(max=users - 1)

    tile_in_user = row - (tiles_up_to - tiles)[user]
    tile_start = start[user] + tile_in_user * tile
    tile_end = torch.minimum(tile_start + tile, end[user])
    shift = other_end[user] - end[user]
    range_start, range_end = other_start[user], other_end[user]
    if left != NO_LIMIT:
        range_start = torch.maximum(range_start, tile_start + shift - left)
    if right != NO_LIMIT:
        range_end = torch.minimum(range_end, tile_end + shift + right)
    range_start = torch.minimum(range_start, range_end)
    # A first query may see nothing (more queries than keys, aligned to the end): an empty range.
    range_start = torch.maximum(range_start, other_start[user])
    range_end = torch.maximum(range_end, range_start)

    cost = torch.where(used, range_end - range_start, -1)
    order = torch.sort(cost, descending=True, stable=True).indices
    fields = torch.stack([tile_start, tile_end, range_start, range_end, shift, user.int()], dim=1)
    fields = torch.where(used[:, None], fields, 0)[order]
    return torch.nn.functional.pad(fields, (0, ROW_WIDTH - len(ROW_FIELDS)))


def resolve_window(causal: bool, window: tuple[int, int] | None) -> tuple[int, int]:
    """`causal` and `window` as one (left, right) band, -1 for no limit."""
    left, right = (NO_LIMIT, NO_LIMIT) if window is None else window
    if left < NO_LIMIT or right < NO_LIMIT:
        raise ValueError(f"window must be (left, right) of -1 or more, got {window}")
    return left, (0 if causal else right)


def dense_queries(q: Tensor, k: JaggedTensor) -> JaggedTensor:
    """Dense queries [B, N, H, D], or [N, H, D] for every user alike, as a `JaggedTensor`."""
    users = len(k)
    if q.dim() == 3:
        q = q.expand(users, *q.shape)
    if q.dim() != 4 or q.shape[0] != users:
        raise ValueError(
            f"dense queries must be [B, N, H, D] or [N, H, D] for B = {users} users, "
            f"got {tuple(q.shape)}"
        )
    count = q.shape[1]
    # Not an arange with step N: N may be 0.
    offsets = torch.arange(users + 1, device=k.offsets.device, dtype=k.offsets.dtype) * count
    return JaggedTensor._trusted(q.reshape(users * count, *q.shape[2:]), offsets)


def check_users(q: JaggedTensor, k: JaggedTensor) -> None:
    if len(q) != len(k):
        raise ValueError(f"q has {len(q)} users and k has {len(k)}")


def _checked_tile(tile: int | None, default: int) -> int:
    if tile is None:
        return default
    if tile < 16 or tile & (tile - 1):
        raise ValueError(f"a tile must be a power of two of at least 16 tokens, got {tile}")
    return tile
