"""From when on Hopper's own kernels are faster, what they can read, and how they are laid out.

Apart from the kernels, because Gluon is imported only where it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from jagged_kernels.core.layouts import read_in_place
from jagged_kernels.core.sizes import cdiv, padded_dim
from jagged_kernels.schedule.window import Mask


@dataclass(frozen=True)
class HopperConfig:
    """How a kernel is laid out; where keys stand in the rows, read keys for queries.

    Attributes:
        consumers: groups of warps that hold queries, 1 or 2.
        warps: of each consumer, 4 or 8; a warp holds 16 queries.
        block: keys taken at a time.
        stages: buffers for K and for V.
        residents: programs on a multiprocessor at a time.
        turned: of `hopper.one_pass` at head_dim 64, whether dQ is made as its transpose.
        stays: whether as many programs as run at a time stay. Else each tile has its own, which
            starts where another ends: for tiles whose lists have very unequal lengths.
        counted: whether programs that stay take the next tile that nobody has, of a counter, in
            place of every n-th.
    """

    consumers: int
    warps: int
    block: int
    stages: int
    residents: int = 1
    turned: bool = False
    stays: bool = True
    counted: bool = False

    @property
    def part_q(self) -> int:
        """Queries of a consumer."""
        return 16 * self.warps

    @property
    def tile_q(self) -> int:
        return self.part_q * self.consumers

    @property
    def start_registers(self) -> int:
        """Of every thread at the start; the loading warp counts as a group of four."""
        return 65536 // (128 * (self._groups + 1) * self.residents) // 8 * 8

    @property
    def registers(self) -> int:
        """Of a consumer's thread, once the loading group has given up all but 24."""
        return min(240, (self.start_registers * (self._groups + 1) - 24) // self._groups // 8 * 8)

    @property
    def _groups(self) -> int:
        return self.consumers * self.warps // 4


def box(head_dim: int) -> int:
    """The columns that the kernels have for a head: TMA puts zeros behind its own."""
    return padded_dim(head_dim)


# Measured on an H100, for the boxes that the kernels take, at head_dim 64, 128 and 256 (the forward
# alone). The tiles of all three are the same, so that one schedule serves them.
#
# With lists of key blocks a tile has as many tokens as a listed block: `listed`, 0 without lists.
# Shorter blocks than `block` are brought by twos.


@lru_cache
def forward_config(head_dim: int, listed: int = 0) -> HopperConfig:
    if listed:
        return _LISTED_FORWARD[box(head_dim), listed]
    if box(head_dim) == 64:
        return HopperConfig(consumers=1, warps=4, block=128, stages=3, residents=2)
    if box(head_dim) == 128:
        return HopperConfig(consumers=2, warps=4, block=128, stages=2)
    # One consumer's products take four times as long as its exponentials. Tiles of 64, which are
    # the plain kernels', whose backward it is.
    return HopperConfig(consumers=1, warps=4, block=64, stages=2)


@lru_cache
def fp8_config(head_dim: int) -> HopperConfig:
    """Of `hopper.fp8_forward`, for tiles as `forward_config` has them."""
    if head_dim == 64:
        return HopperConfig(consumers=1, warps=4, block=128, stages=3, residents=2)
    return HopperConfig(consumers=2, warps=4, block=128, stages=4)


# Of `hopper.dq`, in boxes of 128. Stages are those of K: the block before, this one, the next.
DQ_CONFIG = HopperConfig(consumers=2, warps=4, block=64, stages=3)


@lru_cache
def dkv_config(head_dim: int, listed: int = 0) -> HopperConfig:
    """Of `hopper.dkv`; a block has queries."""
    if listed:
        return _LISTED_DKV[box(head_dim), listed]
    if box(head_dim) == 64:
        return HopperConfig(consumers=1, warps=4, block=64, stages=4, residents=2)
    return HopperConfig(consumers=2, warps=4, block=64, stages=4)


@lru_cache
def one_pass_config(head_dim: int) -> HopperConfig:
    """Of `hopper.one_pass`; a block has queries."""
    return HopperConfig(consumers=2, warps=4, block=64, stages=4 if box(head_dim) == 64 else 3)


# What dQ is added up in has at least this much memory, if there is as much to add up: more stays in
# the L2 cache only in part.
RING_BYTES = 32 * 2**20


def ring_blocks(blocks: int, tokens: int, group: int, head_dim: int, config: HopperConfig) -> int:
    """How many blocks of dQ `hopper.one_pass` adds up at a time: as many as the longest user may
    have for one key head (his length is not known here), or all `blocks`, if these are fewer.

    Args:
        group: query heads of a key head.
    """
    longest = group * cdiv(tokens, config.tile_q) * (config.tile_q // config.block)
    return min(blocks, max(longest, RING_BYTES // (4 * config.block * box(head_dim))))


@lru_cache
def counted(config: HopperConfig) -> HopperConfig:
    """`config` for tiles that meet unequal numbers of blocks: with a limit on one side. Every n-th
    tile would leave the program with the most a tenth to a quarter more than the mean on lengths of
    click histories, and half more where tiles of a user are about as many as programs."""
    return replace(config, counted=True)


# Tokens of a user, on average, from which such tiles are counted out, by what scores become and by
# box. Shorter users have few tiles, about equal ones.
COUNTED_FROM = {
    "softmax": {64: 0, 128: 0, 256: 0},
    "pointwise": {64: 256, 128: 0, 256: 0},
}


# By box and tokens of a listed block. In boxes of 128 and for blocks of 64 there is no backward:
# its buffers leave room for one program of four warps on a multiprocessor. Keys are seen by very
# unequal numbers of queries: of S2-Attention's every 16th block by all that follow, the others by
# few. Dealt out beforehand, the tiles of one program would take a third longer than the mean.
_LISTED_FORWARD = {
    (64, 64): HopperConfig(consumers=1, warps=4, block=128, stages=3, residents=2),
    (64, 128): HopperConfig(consumers=2, warps=4, block=128, stages=4),
    (128, 64): HopperConfig(consumers=1, warps=4, block=64, stages=2, residents=2),
    (128, 128): HopperConfig(consumers=2, warps=4, block=128, stages=2),
}
_LISTED_DKV = {
    (64, 64): HopperConfig(consumers=1, warps=4, block=64, stages=4, residents=2, stays=False),
    (64, 128): HopperConfig(consumers=2, warps=4, block=64, stages=4, stays=False),
    (128, 128): HopperConfig(consumers=2, warps=4, block=64, stages=4, stays=False),
}


def _blocks_by_dim(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for dim, listed in pairs:
        found[dim] = (*found.get(dim, ()), listed)
    return found


# Blocks of lists that the kernels take, by box.
FORWARD_LISTED = _blocks_by_dim(_LISTED_FORWARD)
DKV_LISTED = _blocks_by_dim(_LISTED_DKV)
DQ_LISTED = {128: (128,)}

# Tokens of a user, on average, from which these kernels are faster than the plain ones, by what
# scores become and by box, and where keys are lists by box, for some scores apart:
# `hopper_pays.py` in tests/support measures them. Behind either may stand the mask, and a window
# counts as no more tokens than it is wide; lists within a window need the mask in many of their
# blocks.
NEVER = 2**40
FORWARD_PAYS_FROM = {
    "softmax": {64: 1024, 128: 192, 256: 128},
    "softmax, causal": {64: 256, 128: 224, 256: 64},
    "softmax, window": {64: 1536, 128: 512, 256: 512},
    "pointwise": {64: 512, 128: 96, 256: 96},
    "pointwise, causal": {64: 1024, 128: 512, 256: 64},
    "pointwise, window": {64: 1024, 128: 256, 256: 512},
    "lists": {64: 4096, 128: 128},
    "lists, window": {64: NEVER, 128: 128},
    "pointwise lists": {64: 192, 128: 128},
}
BACKWARD_PAYS_FROM = {
    "softmax": {64: 128, 128: 96},
    "softmax, causal": {64: 128, 128: 256},
    "softmax, window": {64: 96, 128: 512},
    "pointwise": {64: 48, 128: 96},
    "pointwise, causal": {64: 48, 128: 256},
    "pointwise, window": {64: 128, 128: 256},
    "lists": {64: 4096, 128: 512},
    "lists, window": {64: 8192, 128: 256},
    "pointwise lists": {64: 128, 128: 384},
    "pointwise lists, window": {64: 128, 128: 256},
}
# From which the backward in one pass is faster than in two by more than a twentieth; it takes a
# tenth more of memory. `backward_passes.py` in tests/support measures that. At head_dim 64 without
# a mask it is a little slower where users have 16 or 23 tiles, and a little faster with 40.
ONE_PASS_PAYS_FROM = {
    "softmax": {64: 4096, 128: 1024},
    "softmax, causal": {64: 8192, 128: 1024},
}
# Where query heads share key heads a tile has as many times the blocks, and tiles of a long user
# that walk around wait for those that no program holds yet: at 4,096 tokens one pass is faster than
# two, at 9,004 not.
ONE_PASS_OF_GROUPS_PAYS_BELOW = 4097


def paying_length(
    table: Mapping[str, Mapping[int, int]], scores: str, keys: str, mask: str, head_dim: int
) -> int | None:
    """What such a table says; None if nothing.

    Args:
        scores, keys, mask: as in `choice.Family`. Lists have an entry of their own for scores
            ("pointwise lists") where these change it.
    """
    names = (f"{scores} lists", "lists") if keys == "lists" else (scores,)
    entries = (entry for name in names for entry in (f"{name}, {mask}", name))
    return next((table[entry] for entry in entries if entry in table), {}).get(box(head_dim))


# Of queries and of keys in the rows that they walk, by box; and by mask the tokens of a user from
# which such tiles are made: plain kernels are about as fast with them.
HOPPER_TILES_FROM: dict[int, dict[Mask, int]] = {
    64: {"none": 0, "causal": 0, "window": 0},
    128: {"none": 96, "causal": 192, "window": 192},
}
HOPPER_TILES = {dim: forward_config(dim).tile_q for dim in HOPPER_TILES_FROM}
FORWARD_TILES = {**HOPPER_TILES, 256: forward_config(256).tile_q}


def hopper_tile(head_dim: int, tokens: int, users: int, mask: Mask) -> int | None:
    """The tile to take for histories long enough, `tokens` in all; else None. A schedule does not
    know what its scores become: no length at which a kernel pays can be shorter in boxes of 128. Of
    64 it is the plain kernels' tile."""
    dim = box(head_dim)
    pays = dim in HOPPER_TILES_FROM and tokens >= HOPPER_TILES_FROM[dim][mask] * users
    return HOPPER_TILES[dim] if pays else None


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and _capability(device.index) == 9


@lru_cache
def _capability(device: int | None) -> int:
    return torch.cuda.get_device_capability(device)[0]


# Of 16 bits each, in the 16 bytes at whose multiples TMA begins a row.
TMA_NUMBERS = 8


def tma_reads(x: Tensor) -> bool:
    """TMA wants 16-byte-aligned rows that do not overlap."""
    (_, heads, dim), (stride_t, stride_h, _) = x.shape, x.stride()
    aligned = x.data_ptr() % 16 == 0 and stride_t % TMA_NUMBERS == 0 and stride_h % TMA_NUMBERS == 0
    # One head may be all heads.
    apart = dim <= stride_t and (dim <= stride_h or stride_h == 0 or heads == 1)
    return aligned and apart and read_in_place(x)


def for_tma(x: Tensor) -> Tensor:
    """`x`, or a copy that TMA can read. A copy also of what is contiguous but not aligned, which
    `contiguous()` would return as it is."""
    return x if tma_reads(x) else x.clone(memory_format=torch.contiguous_format)
