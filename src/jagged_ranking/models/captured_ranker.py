"""A ranker that answers by CUDA graphs, one for each of a few sizes of a batch.

Launching what scores a request takes the host many times as long as computing it does the GPU. A
graph launches all of it at once; batches are padded to its size (`data/bucket_batch.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jagged_kernels import JaggedTensor, StepGraphs
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.bucket_batch import BucketForm
from jagged_ranking.models.ranker import Ranker


class CapturedRanker:
    """Logits of a ranker through `StepGraphs`, which reads its weights anew in each replay. The
    first two batches of a size are answered without a graph. On a CPU batches are padded likewise,
    and nothing is captured.

    Args:
        ranker: whose module is left in evaluation, without dropout.
        longest: the most candidates and events of a request that there will be; by default
            candidates as in the first batch, and `max_history` events.
        per_octave, most_graphs: see `StepGraphs`.
    """

    def __init__(
        self,
        ranker: Ranker,
        *,
        longest: tuple[int, int] | None = None,
        per_octave: int = 4,
        most_graphs: int = 64,
    ) -> None:
        self.ranker = ranker
        self.graphs = StepGraphs(self._answered, per_octave=per_octave, most_graphs=most_graphs)
        self._longest = longest
        self._form: BucketForm | None = None

    @torch.no_grad()
    def __call__(self, batch: JaggedBatch) -> Tensor:
        """float32 [C, tasks]. Nothing here waits for a GPU once all graphs are captured.

        Raises:
            ValueError: a batch of other items than the first one, or with longer requests.
            NotImplementedError: the model has something that is as large as one batch says.
        """
        if self.ranker.training:
            self.ranker.eval()
        if self._form is None:
            longest = self._longest or (batch.longest[0], self.ranker.max_history)
            self._form = BucketForm(batch.items, longest)
        return self.graphs(self._form.inputs(batch))[: len(batch.candidate.values)]

    def _answered(self, inputs: Mapping[str, JaggedTensor | Tensor], real: Tensor) -> Tensor:
        del real
        assert self._form is not None
        return self.ranker(self._form.padded(inputs))
