"""Top-k retrieval of key blocks: attention to those parts of a long history that fit a query.

The general search unit of SIM (arXiv 2006.05639) and its kin (ETA, TWIN), by blocks: the mean of a
block's keys stands for them, and what is found is listed, not copied. With categories only those
blocks are found that hold the candidate's, as in SIM's hard search.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.attention.retrieval.asked import Asked
from jagged_kernels.attention.retrieval.block_means import mean_values
from jagged_kernels.attention.retrieval.choice import choose_blocks
from jagged_kernels.core.contents import readable
from jagged_kernels.core.operators import call
from jagged_kernels.core.sizes import as_int, cdiv
from jagged_kernels.schedule.keys.blocks import check_block, tile_count
from jagged_kernels.schedule.keys.build import longest_user
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.schedule import check_users, dense_queries
from jagged_kernels.tensors.checks import check_floats
from jagged_kernels.tensors.jagged import JaggedTensor
from jagged_kernels.tensors.nested import takes_nested

# Lists and scores are counted in int32.
_MOST_BLOCKS = 2**31 - 1


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
    key_means: JaggedTensor | None = None,
    longest: int | None = None,
) -> KeyLists:
    """The key blocks that fit each tile of queries best, and the newest ones.

    A tile of `block` queries scores the key blocks of its user by the product of their mean with
    its own, and takes the `top_k` best of those that are not among the `newest`; of equal ones the
    earlier. Nothing is copied: the lists are the `keys` of attention. They have no gradient.

    Args:
        q: [Tq, H, D], jagged; or dense queries [B, N, H, D] or [N, H, D].
        k: [Tk, Hk, D], H a multiple of Hk.
        top_k: blocks, at least 0.
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
        key_means: [M, Hk, D] of the same users: the means of each user's first key blocks, kept by
            the caller for a history that is asked more often than it grows, so that k is not read.
            As `block_means(k, block)` gives them, or one user's behind the other's. A block without
            one is not found but among the newest: means of whole blocks never change, and with
            `newest` they are enough.
        longest: tokens of the longest user or more; of a longer user only blocks within so many
            first tokens are scored. None: read from the offsets, which waits for a GPU.

    Raises:
        TypeError, ValueError: arguments of wrong kind, shape or value; queries and keys of
            different users or devices; what a CPU (or JAGGED_CHECK=1) shows: a user longer than
            `longest`, or of more `key_means` than it has blocks, but for one that `block_means` may
            give besides.

    >>> x = JaggedTensor(torch.randn(100, 2, 8), torch.tensor([0, 100]))
    >>> lists = retrieved_blocks(x, x, 1, newest=1, block=16, causal=True)
    >>> lists.row_ptr.tolist()
    [0, 1, 3, 5, 7, 9, 11, 13]

    Means kept, of the six blocks that are whole:

    >>> k, q = x[0], torch.randn(3, 2, 8)
    >>> kept = k[:96].view(6, 16, 2, 8).mean(1)
    >>> means = JaggedTensor(kept, torch.tensor([0, 6]))
    >>> lists = retrieved_blocks(q, x, 2, newest=1, block=16, key_means=means)
    >>> jagged_attention(q, x, x, keys=lists).shape
    torch.Size([1, 3, 2, 8])
    """
    top_k, newest, groups = (
        as_int(name, x) for name, x in (("top_k", top_k), ("newest", newest), ("groups", groups))
    )
    block = check_block(block)
    check_floats("k", k)
    if not isinstance(q, JaggedTensor):
        dense, q = q, dense_queries(q, k)
        if categories is not None and categories[0].shape == dense.shape[:-2]:
            of_queries, of_keys = categories
            categories = (of_queries.expand(len(k), dense.shape[-3]).flatten(), of_keys)
    _check(q, k, top_k, newest, groups)
    if categories is not None:
        _check_categories(categories, q, k)
    if key_means is not None:
        _check_means(key_means, k, block)
    blocks = 0
    if top_k:
        blocks = cdiv(longest_user(q.offsets, k.offsets, longest), block)
    most = max(blocks - newest, 0)
    asked = Asked(min(top_k, most), newest, most, causal)
    tokens = (q.values.shape[0], k.values.shape[0])
    _check_room(asked, tile_count(tokens[0], len(q), block) * groups)
    with torch.no_grad():
        means_offsets = None if key_means is None else key_means.offsets
        if not asked.best:  # nobody looks at scores
            queries = keys = q.values
        else:
            queries = mean_values(q, block)
            keys = mean_values(k, block) if key_means is None else key_means.values
        row_ptr, col = call(
            choose_blocks, queries, keys, means_offsets, q.offsets, k.offsets,
            *(categories or (None, None)), *tokens, block, groups, *asked,
        )  # fmt: skip
    window = asked.window
    return KeyLists(row_ptr, col, None, None, block, groups, None, window, q.offsets, k.offsets)


def _check_room(asked: Asked, entries: int) -> None:
    most = entries * max(asked.most if asked.best else 0, asked.width)
    if most > _MOST_BLOCKS:
        raise ValueError(
            f"at most {_MOST_BLOCKS} blocks can be scored or listed, and there could be {most}; "
            "use a larger block, a smaller batch, or say longest"
        )


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


def _check_means(means: JaggedTensor, k: JaggedTensor, block: int) -> None:
    check_floats("key_means", means)
    if len(means) != len(k):
        raise ValueError(f"key_means must be of k's {len(k)} users, got {len(means)}")
    if means.values.shape[1:] != k.values.shape[1:]:
        raise ValueError(
            f"key_means must be [M, {', '.join(map(str, k.values.shape[1:]))}] as k, got "
            f"{tuple(means.values.shape)}"
        )
    if means.device != k.device:
        raise ValueError(f"key_means must be on {k.device}, got {means.device}")
    if readable(means.offsets) and readable(k.offsets):
        counts, blocks = means.offsets.diff(), -(-k.offsets.diff() // block)
        wrong = (counts > blocks + 1).nonzero()
        if len(wrong):
            user = int(wrong[0])
            raise ValueError(
                f"key_means has {int(counts[user])} of user {user}, and it has "
                f"{int(blocks[user])} blocks of {block} keys"
            )
