"""SASRec: self-attention over the sequence, and the item that follows from its last state.

Kang and McAuley, ICDM 2018 (arXiv 1808.09781, section III). What differs: the loss is chosen by
the options (the paper's is a binary cross-entropy with one drawn negative); an event's place is
its distance from the end, in the tokens, where the paper has a learned vector for each place, also
counted from the end, behind its padding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged_kernels import JaggedTensor, attention_schedule, jagged_last_k
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.models.transformer import TransformerLayer


class SASRec(nn.Module):
    """Causal layers; a request's answer is the state of its last event, whatever the candidate.

    A request without history is answered by a learned vector.
    """

    def __init__(self, dim: int, *, heads: int = 1, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.layers = nn.ModuleList(
            TransformerLayer(dim, heads=heads, dropout=dropout) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.start = nn.Parameter(torch.zeros(dim))

    def states(self, history: JaggedTensor, batch: JaggedBatch) -> JaggedTensor:
        """[T, D] -> [T, D]: what is known of a user after each of the events."""
        del batch
        schedule = None
        if history.values.is_cuda:  # only the kernels read it; all layers share one
            schedule = attention_schedule(history, causal=True, head_dim=self.head_dim)
        for layer in self.layers:
            history = layer(history, schedule)
        return history.with_values(self.norm(history.values))

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        del candidates
        last, events = jagged_last_k(self.states(history, batch), 1)
        return torch.where(events[:, None] > 0, last[:, 0], self.start)[batch.request]
