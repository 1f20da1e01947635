"""Tile shapes: a small rule from what is known before a launch, never a search at run time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchConfig:
    """How one kernel walks a row.

    Attributes:
        block: tokens of the range taken at a time.
        num_warps, num_stages: Triton's launch options.
    """

    block: int
    num_warps: int
    num_stages: int


def default_tiles(head_dim: int) -> tuple[int, int]:
    """(tile_q, tile_k): 64 rows fit most click histories in one or two tiles."""
    return (64, 64) if head_dim <= 128 else (32, 32)


def forward_config(head_dim: int, element_size: int, tile: int) -> LaunchConfig:
    """`head_dim` is padded to a power of two; `element_size` in bytes."""
    row_bytes = head_dim * element_size
    if row_bytes <= 256:
        return LaunchConfig(block=64, num_warps=4, num_stages=3)
    return LaunchConfig(block=32, num_warps=4, num_stages=2)


def backward_config(head_dim: int, element_size: int, tile: int) -> LaunchConfig:
    """For both passes of the backward; they hold about twice the forward's state."""
    row_bytes = head_dim * element_size
    if row_bytes <= 64:
        return LaunchConfig(block=64, num_warps=4, num_stages=1)
    if row_bytes <= 128:
        return LaunchConfig(block=64, num_warps=4, num_stages=3)
    if row_bytes <= 256:
        return LaunchConfig(block=64, num_warps=4, num_stages=2)
    return LaunchConfig(block=32, num_warps=4, num_stages=1)
