"""TransAct (Xia et al., KDD 2023, arXiv 2306.00248, section 3.3).

Early fusion: the candidate is concatenated to every event before a transformer encoder reads them.
What is kept of its output are the latest tokens one by one, and the maximum of all. There is a
sequence for each candidate, and what is computed grows with candidates times events.

The concatenation is followed by a projection to D, whose two halves are computed once an event and
once a candidate, and added. The paper's random window, by which the latest events are hidden in
training, is left out: it is there for what is served after it was trained on events of minutes ago.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged_kernels import JaggedTensor, jagged_add, jagged_index_select, jagged_last_k, jagged_max
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.self_attention import TransformerLayers
from jagged_ranking.models.model_config import ModelConfig

LATEST = 10  # tokens that are kept one by one: the paper's K


class TransAct(nn.Module):
    """`layers` of attention in both directions over events that know the candidate."""

    self_attention = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.event = nn.Linear(config.dim, config.dim)
        self.candidate = nn.Linear(config.dim, config.dim, bias=False)
        self.layers = TransformerLayers(config, causal=False)
        self.out = nn.Linear((LATEST + 1) * config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        events = history.with_values(self.event(history.values))
        seen = jagged_index_select(events, batch.request, total=batch.pairs)
        fused = jagged_add(seen, self.candidate(candidates.values))
        encoded = self.layers(fused, longest=batch.longest[1])
        latest, _ = jagged_last_k(encoded, LATEST)
        kept = torch.cat([latest.flatten(1), jagged_max(encoded)], dim=1)
        return self.dropout(self.out(kept))


ENCODER = TransAct
