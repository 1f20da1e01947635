"""Sums and means over each user's tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from jagged_kernels import JaggedTensor


def segment_sum(x: JaggedTensor) -> Tensor:
    """[T, ...] -> float32 [B, ...]: the sum of each user's tokens, 0 for an empty user.

    One user's tokens are added in order, so that the sum does not change from run to run; an
    `index_add`, with its atomics on a GPU, would.
    """
    values = x.values.float()
    return torch.segment_reduce(values, "sum", offsets=x.offsets, axis=0, initial=0)


def segment_mean(x: JaggedTensor) -> Tensor:
    """[T, ...] -> float32 [B, ...]: the mean of each user's tokens, 0 for an empty user."""
    count = x.lengths.clamp(min=1).view(-1, *[1] * (x.values.dim() - 1))
    return segment_sum(x) / count
