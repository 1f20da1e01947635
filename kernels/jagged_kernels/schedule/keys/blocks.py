"""Tiles of queries and blocks of keys: which there can be, and how they are numbered.

Tile t of user b is number offsets[b] // block + b + t: no two have the same, and none needs the
lengths to be summed. Between users one number may be no tile's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels.core.sizes import as_int

SMALLEST_BLOCK, LARGEST_BLOCK = 16, 128


def check_block(block: int) -> int:
    """`block` as an int; raises ValueError for one that kernels do not have."""
    block = as_int("block", block)
    if not SMALLEST_BLOCK <= block <= LARGEST_BLOCK or block & (block - 1):
        raise ValueError(
            f"block must be a power of two from {SMALLEST_BLOCK} to {LARGEST_BLOCK} tokens, "
            f"got {block}"
        )
    return block


def tile_count(tokens: int, users: int, block: int) -> int:
    """How many numbers there are."""
    return tokens // block + users


def first_tiles(offsets: Tensor, block: int) -> Tensor:
    """[B] int64: the number of each user's first tile."""
    users = offsets.shape[0] - 1
    return offsets[:-1].long() // block + torch.arange(users, device=offsets.device)
