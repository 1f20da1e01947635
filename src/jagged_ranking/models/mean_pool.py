"""Mean pooling: the user is the mean of the history, whatever the candidate.

The baseline of the tables that we are held against (the "DNN" of BARS, YouTube's candidate model:
Covington et al., RecSys 2016). It sees the same tokens, features and head as the other models, so
that a difference from it is what attention adds.
"""

from __future__ import annotations

from torch import Tensor, nn

from jagged_kernels import JaggedTensor, jagged_mean
from jagged_ranking.data.batch import JaggedBatch


class MeanPool(nn.Module):
    """`linear(mean(history))`; a user without history is the linear layer's bias.

    `heads`, `layers` and `dropout` are accepted for the common signature and have no meaning here.
    """

    def __init__(self, dim: int, *, heads: int = 1, layers: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        del heads, layers, dropout
        self.out = nn.Linear(dim, dim)

    def forward(
        self, history: JaggedTensor, candidates: JaggedTensor, batch: JaggedBatch
    ) -> Tensor:
        """history [T, D], candidates [C, D] -> [C, D]."""
        del candidates
        return self.out(jagged_mean(history))[batch.request]
