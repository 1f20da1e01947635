"""When Hopper's own kernels run (`gluon_*`), and how they are laid out.

Apart from the kernels, because Gluon is imported only where it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class HopperConfig:
    """How a kernel is laid out; where keys stand in the rows, read keys for queries.

    Attributes:
        consumers: groups of warps that hold queries, 1 to 3.
        warps: of each consumer, 4 or 8; a warp holds 16 queries.
        block: keys taken at a time.
        stages: buffers for K and for V.
        residents: programs on a multiprocessor at a time.
    """

    consumers: int
    warps: int
    block: int
    stages: int
    residents: int = 1

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


# Measured on an H100, for the two head_dims that the kernels take.


def forward_config(head_dim: int) -> HopperConfig:
    if head_dim == 64:
        return HopperConfig(consumers=1, warps=4, block=128, stages=3, residents=2)
    return HopperConfig(consumers=2, warps=4, block=128, stages=2)


def dq_config(head_dim: int, tile: int) -> HopperConfig:
    """Of `gluon_dq` for tiles of so many queries. Stages are those of K: the block before, this
    one, the next."""
    return HopperConfig(consumers=tile // 64, warps=4, block=64, stages=4 if head_dim == 64 else 3)


def dkv_config(head_dim: int, tile: int) -> HopperConfig:
    """Of `gluon_dkv` for tiles of so many keys; a block has queries."""
    residents = 2 if tile == 64 else 1
    return HopperConfig(consumers=tile // 64, warps=4, block=64, stages=4, residents=residents)


# Tiles of queries and of keys for long histories, and from how many tokens of a user, on average.
_TILES = {64: (192, 64), 128: (128, 128)}
_LONG = {64: 512, 128: 256}
# Tokens of a user, on average, from which a kernel is faster than the plain one; and the tiles that
# it takes. The forward takes those that its own divide.
_FORWARD_PAYS_FROM = {64: 1024, 128: 256}
_DKV_PAYS_FROM = {64: 128, 128: 256}
_DQ_TILES = {64: (128, 192), 128: (128,)}
_DKV_TILES = {64: (64, 128), 128: (128,)}


def hopper_tiles(head_dim: int, tokens: int, users: int) -> tuple[int, int] | None:
    """The tiles of queries and of keys for histories long enough, `tokens` in all; else None."""
    long = head_dim in _LONG and tokens >= _LONG[head_dim] * users
    return _TILES[head_dim] if long else None


def forward_pays(q: Tensor, rows: Tensor, tile_q: int) -> bool:
    dim = q.shape[2]
    fits = dim in _FORWARD_PAYS_FROM and tile_q % forward_config(dim).tile_q == 0
    return fits and _mean_length(q, rows, tile_q) >= _FORWARD_PAYS_FROM[dim]


def dq_takes(q: Tensor, tile_q: int) -> bool:
    """Whether `gluon_dq` has tiles of so many queries; it pays where `dkv_pays`."""
    return tile_q in _DQ_TILES[q.shape[2]]


def dkv_pays(q: Tensor, rows: Tensor, tile_q: int, tile_k: int) -> bool:
    dim = q.shape[2]
    fits = dim in _DKV_PAYS_FROM and tile_k in _DKV_TILES[dim]
    return fits and _mean_length(q, rows, tile_q) >= _DKV_PAYS_FROM[dim]


def _mean_length(q: Tensor, rows: Tensor, tile_q: int) -> float:
    tokens = q.shape[0]
    return tokens / max(rows.shape[0] - tokens // tile_q, 1)


def hopper_fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the Gluon kernels can read these, on this device."""
    dim = q.shape[2]
    return (
        is_hopper(q.device)
        and q.dtype in (torch.float16, torch.bfloat16)
        and dim in (64, 128)
        and v.shape[2] == dim
        and q.shape[0] > 0
        and k.shape[0] > 0
        and all(tma_reads(x) for x in (q, k, v))
    )


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and _capability(device.index) == 9


@lru_cache
def _capability(device: int | None) -> int:
    return torch.cuda.get_device_capability(device)[0]


def tma_reads(x: Tensor) -> bool:
    """TMA wants 16-byte-aligned rows and counts in int32; the exact walk's blocks do, too."""
    stride_t, stride_h, stride_d = x.stride()
    aligned = x.data_ptr() % 16 == 0 and stride_t % 8 == 0 and stride_h % 8 == 0
    fits = x.shape[2] <= stride_t < 2**22 and x.shape[1] * stride_h < 2**31
    return stride_d == 1 and aligned and fits
