"""FLOPs of attention's operators: of the pairs of query and key that the mask leaves, no others.

How many there are is in the rows of a schedule, or in offsets: counting them waits for the device.
Where these cannot be read (fake tensors, "meta"), all users are taken to be of one length, which
for self-attention without a window is the least that so many tokens can be.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from jagged_kernels.core.contents import is_tracing
from jagged_kernels.schedule.keys.lists import KeyLists, expand_lists
from jagged_kernels.schedule.row_layout import NO_LIMIT


def forward_flops(q: Tensor, v: Tensor, pairs: Any) -> Any:
    """q k^T and p v, as `torch.utils.flop_counter.sdpa_flop_count` has them."""
    return _whole(2 * pairs * q.shape[1] * (q.shape[2] + v.shape[2]))


def backward_flops(q: Tensor, v: Tensor, pairs: Any, *, wanted_kv: bool = True) -> Any:
    """q k^T once more, d_o v^T and d_s k; p^T d_o and d_s^T q for the gradients of k and v."""
    of_dim, of_dim_v = (3, 2) if wanted_kv else (2, 1)
    return _whole(2 * pairs * q.shape[1] * (of_dim * q.shape[2] + of_dim_v * v.shape[2]))


def _whole(flops: Any) -> Any:
    """Of all heads that see a fraction on average."""
    return int(flops) if isinstance(flops, Fraction) else flops


def pairs_of_rows(
    q: Tensor, k: Tensor, rows: Tensor, rows_t: Tensor, tile_k: int, left: int, right: int
) -> Any:
    """Visible pairs of a schedule's rows."""
    if not _readable(rows):
        users = rows_t.shape[0] - k.shape[0] // tile_k
        return _pairs_of_equal_users(q.shape[0], k.shape[0], users, left, right)
    return _sum_of_rows(rows, left, right)


def pairs_of_cache(q: Tensor, k_store: Tensor, rows: Tensor, users: Any, right: int) -> Any:
    """Visible pairs of the rows of a `CacheSchedule`. Where these cannot be read, those of a cache
    that is full."""
    if not _readable(rows):
        return _pairs_of_equal_users(q.shape[0], k_store.shape[0], users, NO_LIMIT, right)
    return _sum_of_rows(rows, NO_LIMIT, right)


def _sum_of_rows(rows: Tensor, left: int, right: int) -> int:
    tile_start, tile_end, range_start, range_end, shift, *_ = rows.long().unbind(1)
    # Of a tile's last query and last key, how far the key is ahead.
    ahead = range_end - tile_end - shift
    return int(
        _pairs(
            tile_end - tile_start,
            range_end - range_start,
            None if left == NO_LIMIT else left + ahead,
            None if right == NO_LIMIT else right - ahead,
        ).sum()
    )


def pairs_of_offsets(
    q: Tensor, k: Tensor, q_offsets: Tensor, k_offsets: Tensor, left: int, right: int,
    *, recent: int | None = None,
) -> Any:  # fmt: skip
    """Visible pairs of users; `recent`: of so many last queries of each."""
    if not _readable(q_offsets):
        tokens, users = q.shape[0], q_offsets.shape[0] - 1
        if recent is not None:
            tokens = torch.sym_min(tokens, users * recent)
        return _pairs_of_equal_users(tokens, k.shape[0], users, left, right)
    n, m = (offsets.long().diff() for offsets in (q_offsets, k_offsets))
    return int(_pairs(n.clamp(max=recent) if recent else n, m, *_limits(left, right)).sum())


def pairs_of_lists(
    q: Tensor,
    k: Tensor,
    lists: KeyLists,
    q_offsets: Tensor,
    k_offsets: Tensor,
    band: tuple[int, int],
) -> Any:
    """Visible pairs of a head, of those that heads see on average where each sees others.

    Where lists cannot be read, those that their mask would leave of whole histories.
    """
    if not _readable(lists.row_ptr):
        users = q_offsets.shape[0] - 1
        return _pairs_of_equal_users(q.shape[0], k.shape[0], users, *band)
    pairs = 0
    bounds = [list(pairwise(offsets.tolist())) for offsets in (q_offsets, k_offsets)]
    for user, (queries, keys) in enumerate(zip(*bounds, strict=True)):
        shown = expand_lists(lists, user, queries, keys)
        if lists.rule is None:
            n, m = shown.shape[1:]
            ahead = (
                torch.arange(m, device=shown.device)
                - torch.arange(m - n, m, device=shown.device)[:, None]
            )
            left, right = band
            shown &= (ahead >= -left) | (left == NO_LIMIT)
            shown &= (ahead <= right) | (right == NO_LIMIT)
        pairs += int(shown.sum())
    return Fraction(pairs, lists.groups)


def _readable(table: Tensor) -> bool:
    return not (is_tracing(table) or isinstance(table, FunctionalTensor) or table.is_meta)


def _limits(left: int, right: int) -> tuple[int | None, int | None]:
    return None if left == NO_LIMIT else left, None if right == NO_LIMIT else right


def _pairs_of_equal_users(q_tokens: Any, k_tokens: Any, users: Any, left: int, right: int) -> Any:
    if users == 0:
        return 0
    if left == right == NO_LIMIT:
        return q_tokens * k_tokens // users
    return users * _pairs(q_tokens // users, k_tokens // users, *_limits(left, right))


def _pairs(n: Any, m: Any, left: Any, right: Any) -> Any:
    """Pairs of n queries and m keys, aligned at their ends, inside of the band; for numbers, or
    element by element. None: no limit."""
    pairs = n * m
    if right is not None:
        pairs = pairs - _corner(n - 1 - right, m)
    if left is not None:
        pairs = pairs - _corner(m - 1 - left, n)
    return pairs


def _corner(side: Any, across: Any) -> Any:
    """Pairs beyond one side of the band: 1, 2, ... `side` of them a line, at most `across`."""
    if isinstance(side, Tensor):
        side = side.clamp(min=0)
        inside = torch.minimum(side, across)
    else:
        side = torch.sym_max(side, 0)
        inside = torch.sym_min(side, across)
    return inside * (inside + 1) // 2 + across * (side - inside)
