"""How the two passes of the Hopper backward are laid out, and what they are compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from jagged_kernels.attention.gluon_blocks import register_split
from jagged_kernels.attention.hopper import multiprocessors
from jagged_kernels.attention.rows import NO_LIMIT

HEAD_DIM = 128
CONSUMERS = 2
# A consumer is a group of four warps; a warp holds 16 tokens of the tile.
WARPS = 4
ROWS = 16 * WARPS
TILE = CONSUMERS * ROWS
# Tokens of the other side taken at a time.
BLOCK = 64
# Of a thread, at the start and of a consumer's later.
START_REGISTERS, CONSUMER_REGISTERS = register_split(CONSUMERS, 1)


@dataclass(frozen=True)
class PassShape:
    """What a kernel is compiled for: heads of the tiles, what the mask needs, and its layout.

    Attributes:
        STAGES: buffers for blocks, 3 or more: the one before, the one at hand, the next.
    """

    HEADS: int
    GROUP: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_DLSE: bool
    STAGES: int
    D: int = HEAD_DIM
    ROWS: int = ROWS
    CONSUMERS: int = CONSUMERS
    WARPS: int = WARPS
    BLOCK: int = BLOCK
    REGISTERS: int = CONSUMER_REGISTERS


def pass_shape(
    q: Tensor, k: Tensor, *, heads: int, left: int, right: int, stages: int, d_lse: bool = False
) -> PassShape:
    return PassShape(
        HEADS=heads, GROUP=q.shape[1] // k.shape[1], STAGES=stages,
        HAS_LEFT=left != NO_LIMIT, HAS_RIGHT=right != NO_LIMIT, HAS_DLSE=d_lse,
    )  # fmt: skip


def program_count(x: Tensor, tiles: int) -> int:
    """One program a multiprocessor: shared memory holds no second."""
    return min(multiprocessors(x.device.index), tiles)
