"""Every way to compute attention over a jagged batch that is compared here, by name."""

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
from jagged_ranking.measure.providers.hstu_peers import DENSE_HSTU, HSTU_TRITON
from jagged_ranking.measure.providers.jagged import (
    FLEX,
    JAGGED,
    JAGGED_ROWS,
    JAGGED_SOFTMAX,
    JAGGED_SPLIT,
    JAGGED_STREAM,
    NJT_SDPA,
    VARLEN_ATTN,
    VARLEN_ATTN_SPLIT,
)
from jagged_ranking.measure.providers.optional import FBGEMM_SLL, FLASH_ATTN_4, FLASHINFER

PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        JAGGED,
        JAGGED_SOFTMAX,
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
        VARLEN_ATTN_SPLIT,
        FBGEMM_SLL,
        FLASH_ATTN_4,
        FLASHINFER,
        DENSE_HSTU,
        HSTU_TRITON,
    )
}

__all__ = [
    "FORWARD",
    "MODES",
    "PROVIDERS",
    "TRAINING",
    "Prepared",
    "Provider",
    "Unavailable",
]
