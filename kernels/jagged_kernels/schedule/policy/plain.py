"""Tile shapes: a small rule from what is known before a launch, never a search at run time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jagged_kernels.core.sizes import LaunchConfig

# The largest that the Triton kernels take.
MAX_HEAD_DIM = 256


# (tile_q, tile_k): 64 rows fit most click histories in one or two tiles.
DEFAULT_TILES = (64, 64)


def parts_of_tile(tile: int, head_dim: int, element_size: int, small_memory: bool) -> int:
    """Programs of the plain kernels that share a tile: what a program holds must fit registers
    and shared memory (`backends.has_small_memory`)."""
    row_bytes = head_dim * element_size
    if row_bytes <= (256 if small_memory else 512):
        return max(tile // 64, 1)
    return max(tile // (32 if row_bytes <= 512 else 16), 1)


# Tokens of a user, on average, below which histories are short.
SHORT_HISTORY = 384

# Tokens of a user, on average, below which short users have kernels of their own (`plain.short`).
MOSTLY_SHORT = 80


def short_warps(row_bytes: int, *, biased: bool) -> int:
    """Of a program of `plain.short` with a user of up to SHORT_USER tokens.

    `biased`: it adds biases, whose addresses do not fit beside rows of 128 bytes into the registers
    of one warp.
    """
    return 1 if row_bytes <= (64 if biased else 128) else 2 if row_bytes <= 256 else 4


# Measured on an H100. `head_dim` is padded to a power of two; `element_size` in bytes; `precision`
# is `blocks.product_precision`'s. With "bf16x6" shared memory holds the parts of a
# block's numbers and not the next blocks: one stage.


def forward_config(head_dim: int, element_size: int, precision: str = "ieee") -> LaunchConfig:
    if precision == "bf16x6":
        return LaunchConfig(block=64 if head_dim <= 128 else 32, num_warps=4, num_stages=1)
    row_bytes = head_dim * element_size
    if row_bytes <= 64:
        return LaunchConfig(block=32, num_warps=4, num_stages=3)
    if row_bytes <= 256:
        return LaunchConfig(block=64, num_warps=4, num_stages=3)
    return LaunchConfig(block=32, num_warps=4, num_stages=2)


def dq_config(head_dim: int, element_size: int, precision: str) -> LaunchConfig:
    if precision == "bf16x6":
        return LaunchConfig(block=_parts_block(head_dim), num_warps=4, num_stages=1)
    row_bytes = head_dim * element_size
    if row_bytes <= 64:
        return LaunchConfig(block=32, num_warps=4, num_stages=4)
    if row_bytes <= 128:
        return LaunchConfig(block=64, num_warps=4, num_stages=3)
    if row_bytes <= 256:
        return LaunchConfig(block=64, num_warps=4, num_stages=2)
    return LaunchConfig(block=32, num_warps=4, num_stages=1)


def short_dq_config(head_dim: int, element_size: int, precision: str) -> LaunchConfig:
    """For users of fewer than `SHORT_HISTORY` tokens on average: smaller blocks end nearer to a
    history's end."""
    config = dq_config(head_dim, element_size, precision)
    smaller = element_size == 2 and 64 < head_dim * element_size <= 128
    return replace(config, block=32) if smaller else config


def dkv_config(head_dim: int, element_size: int, precision: str) -> LaunchConfig:
    """Twice the forward's state: two accumulators, two blocks of scores."""
    if precision == "bf16x6":
        warps = 4 if head_dim <= 128 else 8
        return LaunchConfig(block=_parts_block(head_dim), num_warps=warps, num_stages=1)
    if head_dim > 128 and element_size == 2:
        return LaunchConfig(block=64, num_warps=8, num_stages=1)
    row_bytes = head_dim * element_size
    if row_bytes <= 64:
        return LaunchConfig(block=64, num_warps=4, num_stages=3, registers=128)
    if row_bytes <= 128:
        # Three programs instead of two; what spills, spills in masked blocks.
        return LaunchConfig(block=64, num_warps=4, num_stages=3, registers=168)
    if row_bytes <= 256:
        return LaunchConfig(block=64, num_warps=4, num_stages=2)
    return LaunchConfig(block=32, num_warps=4, num_stages=1)


def small_dkv_config(head_dim: int, element_size: int, precision: str) -> LaunchConfig:
    """Where `backends.has_small_memory`."""
    if head_dim > 128 and element_size == 2:
        return LaunchConfig(block=32, num_warps=4, num_stages=1)
    return dkv_config(head_dim, element_size, precision)


def config_of(
    rule: Callable[[int, int, str], LaunchConfig], head_dim: int, element_size: int,
    precision: str, *, listed: bool,
) -> LaunchConfig:  # fmt: skip
    """What a rule says, which knows nothing of lists of blocks: masks of theirs would take just so
    many registers at head_dim 64 that two programs fit a multiprocessor instead of three."""
    config = rule(head_dim, element_size, precision)
    three = listed and head_dim == 64 and element_size == 2
    return replace(config, registers=168) if three else config


def _parts_block(head_dim: int) -> int:
    """The block of "bf16x6" in the backward, whose parts must fit beside the tile's."""
    return {128: 32, 256: 16}.get(head_dim, 64)
