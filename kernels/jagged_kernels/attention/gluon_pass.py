"""How a pass of the Hopper backward is laid out, and what its kernel is compiled for."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from jagged_kernels.attention.gluon_blocks import multiprocessors, register_split
from jagged_kernels.attention.rows import NO_LIMIT

# A consumer is a group of four warps; a warp holds 16 tokens of the tile.
WARPS = 4
ROWS = 16 * WARPS


@dataclass(frozen=True)
class HopperPass:
    """How one kernel is laid out.

    Attributes:
        consumers: warpgroups that hold 64 tokens of the tile each: 1 or 2, in dQ also 3.
        block: tokens of the other side taken at a time.
        stages: buffers for such blocks, 3 or more: the one before, the one at hand, the next.
        residents: programs on a multiprocessor at a time.
        held: the tile's factors of the scores stay in registers; else products read them from
            shared memory.
    """

    consumers: int = 2
    block: int = 64
    stages: int = 4
    residents: int = 1
    held: bool = True

    @property
    def tile(self) -> int:
        return ROWS * self.consumers

    @property
    def registers(self) -> tuple[int, int]:
        return register_split(self.consumers, self.residents)

    def programs(self, device: int, tiles: int) -> int:
        return min(multiprocessors(device) * self.residents, tiles)


@dataclass(frozen=True)
class PassShape:
    """What a kernel is compiled for: heads of the tiles, `HopperPass`, and what the mask needs."""

    HEADS: int
    GROUP: int
    D: int
    ROWS: int
    CONSUMERS: int
    WARPS: int
    BLOCK: int
    STAGES: int
    HELD: bool
    REGISTERS: int
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_DLSE: bool = False


def pass_shape(
    q: Tensor, k: Tensor, config: HopperPass, *, heads: int, left: int, right: int, **more: bool
) -> PassShape:
    return PassShape(
        HEADS=heads, GROUP=q.shape[1] // k.shape[1], D=q.shape[2],
        ROWS=ROWS, CONSUMERS=config.consumers, WARPS=WARPS, BLOCK=config.block,
        STAGES=config.stages, HELD=config.held, REGISTERS=config.registers[1],
        HAS_LEFT=left != NO_LIMIT, HAS_RIGHT=right != NO_LIMIT, **more,
    )  # fmt: skip
