"""Dense queries: what a schedule must know of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jagged_kernels.core.autocast import dtype_in_products
from jagged_kernels.tensors.jagged import JaggedTensor


class DenseShape(NamedTuple):
    """What the cut of dense queries [B, N, H, D] depends on; element_size in bytes."""

    queries: int
    heads: int
    kv_heads: int
    element_size: int

    @classmethod
    def of(cls, q: Tensor, k: JaggedTensor) -> DenseShape:
        queries, heads = q.shape[-3:-1]
        return cls(queries, heads, k.values.shape[1], dtype_in_products(q).itemsize)


def dense_offsets(q: Tensor, k: JaggedTensor) -> Tensor:
    """[B + 1], where each user's queries start, in the dtype of k's offsets."""
    users = len(k)
    check_dense(q, users)
    count, offsets = q.shape[-3], k.offsets
    if count == 0:
        return torch.zeros_like(offsets)
    end = users * count + 1
    return torch.arange(0, end, count, device=offsets.device, dtype=offsets.dtype)


def check_dense(q: Tensor, users: int) -> None:
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a JaggedTensor or a tensor, got {type(q).__name__}")
    if q.dim() not in (3, 4) or (q.dim() == 4 and q.shape[0] != users):
        raise ValueError(
            f"dense queries must be [B, N, H, D] or [N, H, D] for B = {users} users, "
            f"got {tuple(q.shape)}"
        )
