"""When the forward runs on Hopper's own kernel (`gluon_forward`), and how that is laid out.

Apart from the kernel, because Gluon is imported only where it runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor


@dataclass(frozen=True)
class HopperConfig:
    """How the forward kernel is laid out.

    Attributes:
        consumers: groups of warps that hold queries, 1 or 2.
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


def hopper_config(head_dim: int) -> HopperConfig:
    """Measured on an H100, for the two head_dims that the kernel takes."""
    if head_dim == 64:
        return HopperConfig(consumers=1, warps=4, block=128, stages=3, residents=2)
    return HopperConfig(consumers=2, warps=4, block=128, stages=2)


# Tokens of a user, on average, from which the kernel is faster than the plain one.
_PAYS_FROM = {64: 1024, 128: 256}


def hopper_pays(head_dim: int, tokens: int, users: int) -> bool:
    """Whether histories are long enough; of `tokens` in all."""
    return head_dim in _PAYS_FROM and tokens >= _PAYS_FROM[head_dim] * users


def hopper_forward_fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `gluon_forward.launch_forward` can read these, on this device."""
    dim = q.shape[2]
    return (
        is_hopper(q.device)
        and q.dtype in (torch.float16, torch.bfloat16)
        and dim in (64, 128)
        and v.shape[2] == dim
        and q.shape[0] > 0
        and k.shape[0] > 0
        and all(_tma_reads(x) for x in (q, k, v))
    )


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and _capability(device.index) == 9


@lru_cache
def _capability(device: int | None) -> int:
    return torch.cuda.get_device_capability(device)[0]


def _tma_reads(x: Tensor) -> bool:
    """TMA wants 16-byte-aligned rows and counts in int32; the exact walk's blocks do, too."""
    stride_t, stride_h, stride_d = x.stride()
    aligned = x.data_ptr() % 16 == 0 and stride_t % 8 == 0 and stride_h % 8 == 0
    fits = x.shape[2] <= stride_t < 2**22 and x.shape[1] * stride_h < 2**31
    return stride_d == 1 and aligned and fits
