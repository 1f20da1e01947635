"""DHEN (Zhang et al., DLP-KDD 2022, arXiv 2203.11014, section 3), a small one: layers that each
are an ensemble of two interactions of the fields, dot products and a cross, and a shortcut."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from jagged_ranking.layers.heads.mlp import MLP

LAYERS = 2


class DHENLayer(nn.Module):
    """norm(dot products + cross + x) of m fields of width D."""

    def __init__(self, fields: int, dim: int) -> None:
        super().__init__()
        self.dots = nn.Linear(fields**2, fields * dim)
        self.cross = nn.Linear(fields * dim, fields * dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """[C, m, D] -> [C, m, D]."""
        dots = self.dots((x @ x.mT).flatten(1)).view_as(x)
        cross = x * self.cross(x.flatten(1)).view_as(x)
        return self.norm(dots + cross + x)


class DHEN(nn.Module):
    """`LAYERS` ensembles, then the MLP. Fields of other widths than the first are projected."""

    def __init__(
        self, widths: Sequence[int], *, hidden: Sequence[int], tasks: int, dropout: float
    ) -> None:
        super().__init__()
        dim = widths[0]
        self.project = nn.ModuleList(
            nn.Identity() if width == dim else nn.Linear(width, dim) for width in widths
        )
        self.layers = nn.Sequential(*(DHENLayer(len(widths), dim) for _ in range(LAYERS)))
        self.deep = MLP([len(widths) * dim], hidden=hidden, tasks=tasks, dropout=dropout)

    def forward(self, fields: Sequence[Tensor]) -> Tensor:
        """[C, width] each -> [C, tasks]."""
        tokens = [project(field) for project, field in zip(self.project, fields, strict=True)]
        x = torch.stack([token.to(tokens[0].dtype) for token in tokens], dim=1)
        return self.deep([self.layers(x).flatten(1)])
