"""Mean pooling: the user is the mean of the history, whatever the candidate.

The baseline of the tables that we are held against (the "DNN" of BARS, YouTube's candidate model:
Covington et al., RecSys 2016). It sees the same tokens, features and head as the other models, so
that a difference from it is what attention adds.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from jagged_kernels import JaggedTensor, jagged_mean
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.models.model_config import ModelConfig


class MeanPool(nn.Module):
    """`linear(mean(history))`; a user without history is the linear layer's bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.out = nn.Linear(config.dim, config.dim)

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        del candidates
        return self.out(jagged_mean(history))[batch.request]

    def states(self, history: JaggedTensor, batch: JaggedBatch) -> JaggedTensor:
        """[T, D] -> [T, D]: what it would answer after each of the events."""
        del batch
        values, lengths = history.values, history.lengths
        sums = torch.cat([values.new_zeros(1, values.shape[1]), values]).double().cumsum(0)
        before, events = (
            torch.repeat_interleave(of, lengths, dim=0, output_size=len(values))
            for of in (sums[history.offsets[:-1]], history.offsets[:-1])
        )
        count = torch.arange(1, len(values) + 1, device=values.device) - events
        mean = (sums[1:] - before) / count[:, None]
        return history.with_values(self.out(mean.to(values.dtype)))


ENCODER = MeanPool
