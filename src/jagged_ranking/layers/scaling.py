"""Numbers as models want them: with mean 0 and deviation 1 in the train period."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from jagged_ranking.data.data_shape import Scale, symmetric_log

LARGEST = 10.0  # deviations; beyond, a number says only that it is far away


class Standard(nn.Module):
    """(x - mean) / std of the columns of x [N, S], clipped to `LARGEST` deviations."""

    mean: Tensor
    std: Tensor

    def __init__(self, scales: Iterable[Scale]) -> None:
        super().__init__()
        scales = list(scales)
        self.register_buffer("mean", torch.tensor([scale.mean for scale in scales]))
        self.register_buffer("std", torch.tensor([scale.std for scale in scales]))

    def forward(self, x: Tensor) -> Tensor:
        """[N, S] -> [N, S]."""
        return ((x - self.mean) / self.std).clamp(-LARGEST, LARGEST)


class StandardWithLog(nn.Module):
    """`Standard` of x and, behind it, of its symmetric logarithm: of a place in a list or a price
    it is the small ones that differ."""

    def __init__(self, scales: Iterable[Scale]) -> None:
        super().__init__()
        scales = list(scales)
        self.plain = Standard(scales)
        self.log = Standard(Scale(scale.log_mean, scale.log_std) for scale in scales)

    def forward(self, x: Tensor) -> Tensor:
        """[N, S] -> [N, 2 S]."""
        return torch.cat([self.plain(x), self.log(symmetric_log(x))], dim=1)
