"""DCN-V2 (Wang et al., WWW 2021, arXiv 2008.13535, section 3), the stacked structure: crosses of
the fields, then the MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from jagged_ranking.layers.heads.mlp import MLP

CROSSES = 2


class DCNv2(nn.Module):
    """x_{l+1} = x_0 * (W_l x_l + b_l) + x_l: each cross is one degree more of the features."""

    def __init__(
        self, widths: Sequence[int], *, hidden: Sequence[int], tasks: int, dropout: float
    ) -> None:
        super().__init__()
        width = sum(widths)
        self.crosses = nn.ModuleList(nn.Linear(width, width) for _ in range(CROSSES))
        self.deep = MLP([width], hidden=hidden, tasks=tasks, dropout=dropout)

    def forward(self, fields: Sequence[Tensor]) -> Tensor:
        """[C, width] each -> [C, tasks]."""
        first = crossed = torch.cat(list(fields), dim=1)
        for cross in self.crosses:
            crossed = first * cross(crossed) + crossed
        return self.deep([crossed])
