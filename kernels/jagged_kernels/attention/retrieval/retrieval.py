"""Top-k retrieval of key blocks: attention to those parts of a long history that fit a query.

The general search unit of SIM (arXiv 2006.05639) and its kin (ETA, TWIN), by blocks: the mean of a
block's keys stands for them, and what is found is listed, not copied. With categories only those
blocks are found that hold the candidate's, as in SIM's hard search.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jagged_kernels.attention.retrieval.block_scores import block_scores
from jagged_kernels.core.operators import call
from jagged_kernels.core.sizes import cdiv
from jagged_kernels.ops.ids.top_k import jagged_top_k
from jagged_kernels.ops.pooling.pooling import jagged_mean
from jagged_kernels.schedule.keys.blocks import check_block, first_tiles, tile_count
from jagged_kernels.schedule.keys.build import longest_user
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.pairs import Batch
from jagged_kernels.schedule.keys.transpose import tables_of_pairs
from jagged_kernels.schedule.row_layout import NO_LIMIT
from jagged_kernels.schedule.schedule import check_users, dense_queries
from jagged_kernels.tensors.checks import as_int, check_floats
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested

# `jagged_top_k` counts them in int32.
_MOST_SCORES = 2**31 - 1


@takes_nested
def block_means(x: JaggedTensor, block: int) -> JaggedTensor:
    """The mean of each block of `block` tokens, counted from its user's first token.

    Args:
        x: [T, ...] of a floating dtype.
        block: a power of two from 16 to 128.

    Returns:
        [T // block + B, ...] in the dtype of x. User b's blocks begin at offsets[b] // block + b,
        and where that leaves room for one more before the next user's, it is 0. Differentiable.

    Raises:
        TypeError, ValueError: arguments of wrong kind, dtype or value.

    >>> x = JaggedTensor(torch.arange(20.0), torch.tensor([0, 18, 20]))
    >>> [means.tolist() for means in block_means(x, 16)]
    [[7.5, 16.5], [18.5]]
    """
    check_floats("x", x)
    check_block(block)
    users, tokens = len(x), x.values.shape[0]
    number = torch.arange(tile_count(tokens, users, block), device=x.device)
    first = first_tiles(x.offsets, block)
    user = torch.searchsorted(first, number, right=True) - 1
    start, end = x.offsets[:-1].long(), x.offsets[1:].long()
    begin = torch.minimum(start[user] + (number - first[user]) * block, end[user])
    blocks = torch.cat([begin, begin.new_full((1,), tokens)]).to(x.offsets.dtype)
    means = jagged_mean(JaggedTensor._trusted(x.values, blocks))
    steps = torch.arange(users + 1, device=x.device, dtype=x.offsets.dtype)
    return JaggedTensor._trusted(means, x.offsets // block + steps)


@takes_nested
def retrieved_blocks(
    q: JaggedTensor | Tensor,
    k: JaggedTensor,
    top_k: int,
    *,
    newest: int = 0,
    block: int = 64,
    groups: int = 1,
    causal: bool = False,
    categories: tuple[Tensor, Tensor] | None = None,
    longest: int | None = None,
) -> KeyLists:
    """The key blocks that fit each tile of queries best, and the newest ones.

    A tile of `block` queries scores the key blocks of its user by the product of their mean with
    its own, and takes the `top_k` best of those that are not among the `newest`; of equal ones the
    earlier. Nothing is copied: the lists are the `keys` of attention. They have no gradient.

    Args:
        q: [Tq, H, D], jagged; or dense queries [B, N, H, D] or [N, H, D].
        k: [Tk, Hk, D], H a multiple of Hk.
        top_k: blocks, at least 0; from 129 on slower.
        newest: blocks that each tile sees besides, at least 0: of those that it sees at all, the
            last ones.
        block: tokens, a power of two from 16 to 128.
        groups: heads are dealt to so many groups, which choose each for themselves; 1: alike.
        causal: a tile sees no block that begins behind its last query, the last query standing at
            the last key; the calls must be causal too. A choice is a tile's: it depends on all of
            its queries, later ones also.
        categories: (of queries [Tq], or as dense q [B, N] or [N]; of keys [Tk]), integers. Of older
            blocks than the newest a tile then takes those alone in which a key has the category of
            one of its queries (SIM, section 3.2, hard search).
        longest: tokens of the longest user or more; of a longer user only blocks within so many
            first tokens are scored. None: read from the offsets, which waits for a GPU.

    Raises:
        TypeError, ValueError: arguments of wrong kind, shape or value; queries and keys of
            different users or devices; a user longer than `longest`, where that is known.

    >>> x = JaggedTensor(torch.randn(100, 2, 8), torch.tensor([0, 100]))
    >>> lists = retrieved_blocks(x, x, 1, newest=1, block=16, causal=True)
    >>> lists.row_ptr.tolist()
    [0, 1, 3, 5, 7, 9, 11, 13]
    """
    top_k, newest, groups = (
        as_int(name, x) for name, x in (("top_k", top_k), ("newest", newest), ("groups", groups))
    )
    check_block(block)
    check_floats("k", k)
    if not isinstance(q, JaggedTensor):
        dense, q = q, dense_queries(q, k)
        if categories is not None and categories[0].shape == dense.shape[:-2]:
            of_queries, of_keys = categories
            categories = (of_queries.expand(len(k), dense.shape[-3]).flatten(), of_keys)
    _check(q, k, top_k, newest, groups)
    if categories is not None:
        _check_categories(categories, q, k)
    batch = Batch(q.offsets, k.offsets, q.values.shape[0], k.values.shape[0], block, groups)
    window = (NO_LIMIT, 0 if causal else NO_LIMIT)
    with torch.no_grad():
        entry, seen = _seen_blocks(batch, causal)
        seen_newest = seen[:, None] - 1 - torch.arange(newest, device=q.device)
        chosen = seen_newest
        if top_k:
            older = (seen - newest).clamp(min=0)
            best = _best_blocks(q, k, batch, older, top_k, newest, categories, longest)
            chosen = torch.cat([best, seen_newest], 1)
        entry = entry.repeat_interleave(chosen.shape[1])
        chosen = chosen.flatten()
        row_ptr, col, row_ptr_t, col_t = tables_of_pairs(entry, chosen, chosen >= 0, batch, window)
    tables = (row_ptr, col, row_ptr_t, col_t)
    return KeyLists(*tables, block, groups, None, window, q.offsets, k.offsets)


def _check(q: JaggedTensor, k: JaggedTensor, top_k: int, newest: int, groups: int) -> None:
    check_floats("q", q)
    check_users(q, k)
    if q.device != k.device:
        raise ValueError(f"q and k must be on one device, got {q.device} and {k.device}")
    shapes = (tuple(q.values.shape), tuple(k.values.shape))
    if q.values.dim() != 3 or k.values.dim() != 3 or shapes[0][2] != shapes[1][2]:
        raise ValueError(f"q and k must be [T, heads, D] of one D, got {shapes[0]} and {shapes[1]}")
    heads, kv_heads = shapes[0][1], shapes[1][1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q must have a multiple of k's heads, got {heads} and {kv_heads}")
    if groups < 1 or heads % groups:
        raise ValueError(f"groups must divide q's {heads} heads, got {groups}")
    if min(top_k, newest) < 0 or top_k + newest < 1:
        raise ValueError(
            f"top_k and newest must be at least 0 and one of them 1, got {top_k} and {newest}"
        )


def _check_categories(categories: tuple[Tensor, Tensor], q: JaggedTensor, k: JaggedTensor) -> None:
    for name, of, x in zip("qk", categories, (q, k), strict=True):
        if of.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"categories of {name} must be of int32 or int64, got {of.dtype}")
        if of.shape != x.values.shape[:1]:
            raise ValueError(
                f"categories of {name} must be [{x.values.shape[0]}], one a token, got "
                f"{tuple(of.shape)}"
            )
        if of.device != x.device:
            raise ValueError(f"categories of {name} must be on {x.device}, got {of.device}")


def _seen_blocks(batch: Batch, causal: bool) -> tuple[Tensor, Tensor]:
    """Of each entry (itself, how many of its user's first key blocks it sees), int64."""
    device, block = batch.k_offsets.device, batch.block
    entry = torch.arange(batch.entries()[0], device=device)
    number = entry // batch.groups
    first = first_tiles(batch.q_offsets, block)
    user = torch.searchsorted(first, number, right=True) - 1
    queries, keys = (x.diff().long()[user] for x in (batch.q_offsets, batch.k_offsets))
    begin = (number - first[user]) * block
    end = keys
    if causal:
        end = torch.minimum(begin + block, queries) + keys - queries
    seen = (end.clamp(min=0) + (block - 1)) // block
    return entry, torch.where(begin < queries, seen, 0)


def _best_blocks(
    q: JaggedTensor, k: JaggedTensor, batch: Batch, older: Tensor, top_k: int, newest: int,
    categories: tuple[Tensor, Tensor] | None, longest: int | None,
) -> Tensor:  # fmt: skip
    """[entries, top_k] int64: the best of an entry's `older` first key blocks, -1 for none."""
    most = max(cdiv(longest_user(q.offsets, k.offsets, longest), batch.block) - newest, 0)
    entries, groups = older.shape[0], batch.groups
    capacity = entries * most
    if capacity > _MOST_SCORES:
        raise ValueError(
            f"at most {_MOST_SCORES} blocks can be scored, and there could be {capacity}; use a "
            "larger block, a smaller batch, or say longest"
        )
    begin = torch.nn.functional.pad(older.clamp(max=most).cumsum(0), (1, 0))
    heads, dim = q.values.shape[1:]
    queries, keys = (block_means(x, batch.block).values for x in (q, k))
    keys = keys.repeat_interleave(heads // keys.shape[1], dim=1)
    queries, keys = (x.reshape(x.shape[0], groups, heads // groups * dim) for x in (queries, keys))
    scores = call(
        block_scores, queries, keys, q.offsets, k.offsets, begin, batch.block, capacity,
        *(categories or (None, None)),
    )  # fmt: skip
    # Room that is left over is one more user's.
    ends = torch.cat([begin, begin.new_full((1,), capacity)])
    values, best = jagged_top_k(JaggedTensor._trusted(scores, ends), top_k)
    if categories is not None:
        best = torch.where(values == -math.inf, -1, best)
    return best[:entries]
