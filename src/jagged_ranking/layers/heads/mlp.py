"""The fields side by side, through an MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def hidden_layers(width: int, hidden: Sequence[int], dropout: float) -> list[nn.Module]:
    """Linear, GELU and dropout of each of the widths `hidden`."""
    layers: list[nn.Module] = []
    for units in hidden:
        layers += [nn.Linear(width, units), nn.GELU(), nn.Dropout(dropout)]
        width = units
    return layers


class MLP(nn.Module):
    """Layers of the widths `hidden`, and one to the tasks."""

    def __init__(
        self, widths: Sequence[int], *, hidden: Sequence[int], tasks: int, dropout: float
    ) -> None:
        super().__init__()
        width = sum(widths)
        self.layers = nn.Sequential(
            *hidden_layers(width, hidden, dropout), nn.Linear([width, *hidden][-1], tasks)
        )

    def forward(self, fields: Sequence[Tensor]) -> Tensor:
        """[C, width] each -> [C, tasks]."""
        return self.layers(torch.cat(list(fields), dim=1))
