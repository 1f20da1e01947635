"""How a schedule is cut: the tiles of queries and keys, and whether rows are cut among programs."""

from __future__ import annotations

from typing import Literal

import torch

from jagged_kernels.schedule.dense import DenseShape
from jagged_kernels.schedule.keys.lists import KeyLists
from jagged_kernels.schedule.keys.rules import KeyRule, StridedKeys
from jagged_kernels.schedule.policy.hopper import hopper_tile, is_hopper
from jagged_kernels.schedule.policy.plain import DEFAULT_TILES
from jagged_kernels.schedule.spans import split_backward_fits
from jagged_kernels.schedule.window import Mask

Split = Literal["auto", "rows", "split", "stream"]
_SPLITS = ("auto", "rows", "split", "stream")
# Queries of one user that one tile of the split kernels holds.
MOST_SPLIT_QUERIES = 64


def choose_tiles(
    dense: DenseShape | None,
    split: Split,
    tile_q: int | None = None,
    tile_k: int | None = None,
    *,
    q_tokens: int,
    k_tokens: int,
    users: int,
    head_dim: int,
    device: torch.device,
    mask: Mask,
    keys: KeyRule | KeyLists | None = None,
) -> tuple[Literal["rows", "split", "stream"], int, int]:
    """How rows become programs, and the tiles of queries and keys: `build_schedule`'s.

    Raises:
        ValueError: an unknown `split`, or one that these queries and keys cannot have; a tile that
            is none, or with `keys` no block of theirs.
    """
    whole_tile = None
    if keys is not None:
        whole_tile = keys.block
        if any(tile not in (None, whole_tile) for tile in (tile_q, tile_k)):
            raise ValueError(
                f"with keys a tile is a block of {whole_tile} tokens, got {(tile_q, tile_k)}"
            )
        refusal = list_cut_refusal(keys, dense)
        if dense is None or refusal is not None:
            if split not in ("auto", "rows"):
                raise ValueError(
                    f"with keys split must be auto or rows, got {split!r}"
                    f"{'' if refusal is None else f': {refusal}'}"
                )
            return "rows", whole_tile, whole_tile
        tile_q, tile_k = None, whole_tile
    default_q, default_k = DEFAULT_TILES
    if is_hopper(device) and (tile := hopper_tile(head_dim, q_tokens, users, mask)):
        default_q = default_k = tile
    tile_k = _checked_tile(tile_k, default_k)
    if dense is None:
        if split not in ("auto", "rows"):
            raise ValueError(f"split must be auto or rows for jagged queries, got {split!r}")
        return "rows", _checked_tile(tile_q, default_q), tile_k
    if split not in _SPLITS:
        raise ValueError(f"split must be one of {', '.join(_SPLITS)}; got {split!r}")
    queries, heads, kv_heads, _ = dense
    tile = _checked_tile(tile_q, tile_to_cut(dense))
    refusal = cut_refusal(
        dense, tile, users=users, k_tokens=k_tokens, head_dim=head_dim, device=device
    )
    if split in ("split", "stream") and refusal is not None:
        raise ValueError(
            f"split={split!r} needs 1 to {MOST_SPLIT_QUERIES} queries a user, a tile_q that holds "
            f"them, shared memory for the heads that share keys, and at least one key; got "
            f"{queries} queries, {heads} heads over {kv_heads}, head_dim {head_dim}, "
            f"tile_q={tile_q}, {k_tokens} keys of {users} users"
        )
    if split == "auto":
        split = "stream" if refusal is None else "rows"
    if split == "rows":
        return split, whole_tile or _checked_tile(tile_q, default_q), tile_k
    return split, tile, tile_k


def tile_to_cut(dense: DenseShape | None) -> int:
    """One tile for a user's queries, no larger than it must be: products with empty rows cost more
    than the few keys of a short history do."""
    queries = 0 if dense is None else dense.queries
    return max(16, 1 << (max(queries, 1) - 1).bit_length())


def list_cut_refusal(keys: KeyRule | KeyLists | None, dense: DenseShape | None) -> str | None:
    """Why rows with lists of keys cannot be cut among programs, in words; None for no such reason.
    `cut_refusal` has others."""
    if keys is None:
        return None
    if isinstance(keys, StridedKeys):
        # Its lists have no rule for tokens, and each head has its own.
        groups = 1 if dense is None else dense.heads
    elif isinstance(keys, KeyLists) and keys.rule is None:
        groups = keys.groups
    else:
        return "keys are those of a rule, it takes lists"
    if dense is not None and dense.queries > keys.block:
        return "a block of the lists does not hold the queries of a user"
    if dense is not None and dense.kv_heads % groups:
        return "heads that share keys have lists of their own"
    return None


def cut_refusal(
    dense: DenseShape | None,
    tile_q: int,
    *,
    users: int,
    k_tokens: int,
    head_dim: int,
    device: torch.device,
) -> str | None:
    """Why rows of these queries cannot be cut among programs, in words; None if they can.

    No word is of numbers of a batch: in a trace they are symbols.
    """
    if dense is None:
        return "queries are jagged, it takes dense ones"
    queries, heads, kv_heads, element_size = dense
    if not 0 < queries <= MOST_SPLIT_QUERIES:
        return f"it takes 1 to {MOST_SPLIT_QUERIES} dense queries a user"
    if queries > tile_q:
        return "a tile does not hold the queries of a user"
    if users == 0 or k_tokens == 0:
        return "there is no key"
    if not split_backward_fits(heads, kv_heads, tile_q, head_dim, element_size, device):
        return "shared memory does not hold the queries of the heads that share keys"
    return None


def _checked_tile(tile: int | None, default: int) -> int:
    if tile is None:
        return default
    if tile < 16 or tile & (tile - 1):
        raise ValueError(f"a tile must be a power of two of at least 16 tokens, got {tile}")
    return tile
