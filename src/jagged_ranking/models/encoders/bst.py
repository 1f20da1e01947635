"""Behavior Sequence Transformer (Chen et al., DLP-KDD 2019, arXiv 1905.06874, section 2).

The candidate is the last token of the history, and one transformer reads both: events look at the
candidate and at each other. So there is a sequence for each candidate, and what is computed grows
with candidates times events.

The paper's positions are the times to the request, as buckets; tokens have them already, and the
candidate is marked by a vector of its own. The paper concatenates the outputs of exactly 20 events
and of the candidate; histories of any length have no such vector, so that here it is the
candidate's output and the mean of all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged_kernels import JaggedTensor, jagged_cat, jagged_index_select, jagged_last_k, jagged_mean
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.self_attention import TransformerLayers
from jagged_ranking.models.model_config import ModelConfig


class BST(nn.Module):
    """`layers` of attention in both directions over a history and one candidate behind it."""

    self_attention = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mark = nn.Parameter(torch.zeros(config.dim))
        self.layers = TransformerLayers(config, causal=False)
        self.out = nn.Linear(2 * config.dim, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        seen = jagged_index_select(history, batch.request, total=batch.pairs)
        target = (candidates.values + self.mark).to(seen.values.dtype)
        sequences = jagged_cat([seen, target[:, None]])
        encoded = self.layers(sequences, longest=batch.longest[1] + 1)
        last, _ = jagged_last_k(encoded, 1)
        return self.dropout(self.out(torch.cat([last[:, 0], jagged_mean(encoded)], dim=1)))


ENCODER = BST
