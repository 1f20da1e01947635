"""Multi-gate mixture-of-experts (Ma et al., KDD 2018, section 4): MLPs that all tasks share, and
for each task a gate that mixes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from jagged_ranking.layers.heads.mlp import hidden_layers


class MMoE(nn.Module):
    """Experts of the widths `hidden`; a task's tower is one linear layer."""

    def __init__(
        self,
        widths: Sequence[int],
        *,
        hidden: Sequence[int],
        tasks: int,
        dropout: float,
        experts: int,
    ) -> None:
        super().__init__()
        width = sum(widths)
        self.tasks = tasks
        self.experts = nn.ModuleList(
            nn.Sequential(*hidden_layers(width, hidden, dropout)) for _ in range(experts)
        )
        self.gates = nn.Linear(width, tasks * experts, bias=False)
        self.towers = nn.ModuleList(nn.Linear(hidden[-1], 1) for _ in range(tasks))

    def forward(self, fields: Sequence[Tensor]) -> Tensor:
        """[C, width] each -> [C, tasks]."""
        x = torch.cat(list(fields), dim=1)
        answers = torch.stack([expert(x) for expert in self.experts], dim=1)
        gates = self.gates(x).unflatten(1, (self.tasks, -1)).softmax(2).to(answers.dtype)
        mixed = (gates @ answers).unbind(1)
        return torch.cat([tower(of) for tower, of in zip(self.towers, mixed, strict=True)], dim=1)
