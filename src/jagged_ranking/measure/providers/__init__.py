"""Every way to compute attention over a jagged batch that is compared here, by name."""

import torch

from jagged_ranking.measure.providers.base import (
    FORWARD,
    MODES,
    TRAINING,
    Prepared,
    Provider,
    Unavailable,
)
from jagged_ranking.measure.providers.dense import (
    DENSE_CUDNN,
    DENSE_EAGER,
    DENSE_FLASH,
    DENSE_SDPA,
)
from jagged_ranking.measure.providers.jagged import (
    FLEX,
    JAGGED,
    JAGGED_ROWS,
    JAGGED_SPLIT,
    JAGGED_STREAM,
    NJT_SDPA,
    VARLEN_ATTN,
)
from jagged_ranking.measure.providers.optional import FBGEMM_SLL, FLASH_ATTN_4

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        JAGGED,
        JAGGED_ROWS,
        JAGGED_SPLIT,
        JAGGED_STREAM,
        DENSE_EAGER,
        DENSE_FLASH,
        DENSE_CUDNN,
        DENSE_SDPA,
        NJT_SDPA,
        FLEX,
        VARLEN_ATTN,
        FBGEMM_SLL,
        FLASH_ATTN_4,
    )
}

POLICIES = ("jagged_rows", "jagged_split", "jagged_stream")
SWEEPS = ("waste", "length", "head_dim")

_CUDA = ("jagged", "dense_eager", "dense_flash", "dense_cudnn", "njt_sdpa", "flex", "varlen_attn")
_CPU = ("jagged", "dense_eager", "dense_flash", "dense_sdpa", "njt_sdpa")
_SWEEP = ("jagged", "dense_eager", "dense_flash", "dense_cudnn", "njt_sdpa", "varlen_attn")


def default_providers(device: torch.device | str, *, group: str = "workloads") -> tuple[str, ...]:
    """The providers that make sense on a device for the workloads of a group.

    A sweep leaves out FlexAttention, which compiles anew at each of its many shapes, and the
    optional peers. The sweep over skew has our policies beside the one that the rule picks.
    """
    cuda = torch.device(device).type == "cuda"
    if group == "target":
        return ("jagged", "dense_sdpa", *(("varlen_attn", "flash_attn_4") if cuda else ()))
    if group == "skew":
        return ("jagged", *((*POLICIES, "varlen_attn") if cuda else ("dense_sdpa",)))
    if not cuda:
        return _CPU
    return _SWEEP if group in SWEEPS else (*_CUDA, "fbgemm_sll", "flash_attn_4")


__all__ = [
    "FORWARD",
    "MODES",
    "PROVIDERS",
    "TRAINING",
    "Prepared",
    "Provider",
    "Unavailable",
    "default_providers",
]
