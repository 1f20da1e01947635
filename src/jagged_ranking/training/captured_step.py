"""A training step that is captured in CUDA graphs, one for each of a few sizes, and replayed.

Launching a step of a small model takes the host longer than taking it does the GPU. A graph
launches all of it at once; batches are padded to its size (`data/bucket_batch.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from jagged_kernels import JaggedTensor, StepGraphs
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.bucket_batch import BucketBatch, BucketForm
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.losses import loss_of
from jagged_ranking.training.optimisers import Optimisers


class CapturedStep:
    """Loss, gradients and the update of the weights through `StepGraphs`; the average of the
    weights, whose share grows from step to step, is not in it.

    On a CPU batches are padded likewise, and nothing is captured. Of one process, and of a batch a
    step. Dropout draws other numbers than for batches as they are.

    Args:
        longest: the most candidates and events of a request that there will be; by default
            candidates as in the first batch, and `max_history` events.
        per_octave: see `StepGraphs`.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Ranker,
        optimisers: Optimisers,
        *,
        longest: tuple[int, int] | None = None,
        per_octave: int = 4,
    ) -> None:
        self.config, self.model, self.optimisers = config, model, optimisers
        self.graphs = StepGraphs(self._taken, per_octave=per_octave)
        self._longest = longest
        self._form: BucketForm | None = None

    def __call__(self, batch: JaggedBatch) -> tuple[Tensor, Tensor]:
        """Takes a step; its loss [] and the norm [] of its gradient.

        Raises:
            ValueError: a batch of other items than the first one, or with longer requests.
            NotImplementedError: the model has something that is as large as one batch says.
        """
        return self.graphs(self.form_of(batch).inputs(batch))

    def form_of(self, batch: JaggedBatch) -> BucketForm:
        """What all batches share, from the first one."""
        if self._form is None:
            longest = self._longest or (batch.longest[0], self.config.max_history)
            self._form = BucketForm(batch.items, longest)
        return self._form

    def padded(self, inputs: Mapping[str, JaggedTensor | Tensor]) -> BucketBatch:
        """The batch of a bucket's size that these inputs are, once there is a form."""
        assert self._form is not None
        return self._form.padded(inputs)

    def _taken(
        self, inputs: Mapping[str, JaggedTensor | Tensor], real: Tensor
    ) -> tuple[Tensor, Tensor]:
        batch = self.padded(inputs)
        loss = loss_of(
            self.config.loss,
            self.model,
            batch,
            negatives=self.config.negatives,
            real=real[batch.request],
        )
        loss.backward()
        norm = self.optimisers.step()
        self.optimisers.zero_grad()
        return loss, norm
