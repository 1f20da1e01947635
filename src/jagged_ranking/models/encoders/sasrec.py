"""SASRec: self-attention over the sequence, and what its last state says comes next.

Kang and McAuley, ICDM 2018 (arXiv 1808.09781, section III). What differs: the loss is chosen by
the options (the paper's is a binary cross-entropy with one drawn negative); an event's place is
its distance from the end, in the tokens, where the paper has a learned vector for each place, also
counted from the end, behind its padding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged_kernels import JaggedTensor, jagged_last_k
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.self_attention import TransformerLayers
from jagged_ranking.models.model_config import ModelConfig


class SASRec(nn.Module):
    """Causal layers; a request's answer is the state of its last event, whatever the candidate.

    A request without history is answered by a learned vector.
    """

    self_attention = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layers = TransformerLayers(config, causal=True)
        self.norm = nn.LayerNorm(config.dim)
        self.start = nn.Parameter(torch.zeros(config.dim))

    def states(self, history: JaggedTensor, batch: JaggedBatch) -> JaggedTensor:
        """[T, D] -> [T, D]: what is known of a user after each of the events."""
        encoded = self.layers(history, longest=batch.longest[1])
        return encoded.with_values(self.norm(encoded.values))

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        del candidates
        last, events = jagged_last_k(self.states(history, batch), 1)
        return torch.where(events[:, None] > 0, last[:, 0], self.start)[batch.request]


ENCODER = SASRec
