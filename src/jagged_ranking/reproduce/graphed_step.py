"""A training step that is captured once for batches of about the same size, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from jagged_kernels import JaggedTensor, StepGraphs
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.bucket_batch import BucketBatch, inputs_of
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.data.store import ItemTable
from jagged_ranking.figures.throughput_points import UPDATE
from jagged_ranking.reproduce.training_step import TrainingStep, nobody, tensors_in
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.losses import loss_of

Inputs = Mapping[str, JaggedTensor | Tensor]
# Of a bucket, of which the last is the first that is replayed.
STEPS_TO_A_REPLAY = 3


class GraphedStep(TrainingStep):
    """A `TrainingStep` through `StepGraphs`: loss, gradients and the update of the weights are
    replayed; that of their average, whose share grows from step to step, is not.

    On a CPU batches are padded likewise, and nothing is captured.

    Args:
        per_octave: see `StepGraphs`; many, since batches that are measured are about as large as
            each other, and padding is time of the device.
    """

    def __init__(
        self,
        config: TrainConfig,
        shape: DataShape,
        device: torch.device,
        *,
        per_octave: int = 16,
    ) -> None:
        super().__init__(config, shape, device)
        if device.type == "cuda":
            for group in self.optimisers.adamw.param_groups:
                group["capturable"] = True
        self.graphs = StepGraphs(self._trained, per_octave=per_octave)
        self._forward = StepGraphs(self._answered, per_octave=per_octave)
        self._fixed: tuple[ItemTable, int] | None = None  # items, and candidates of a request

    def __call__(self, batch: JaggedBatch, ends: Callable[[str], object] = nobody) -> None:
        """As `TrainingStep`; all of it is one part."""
        if not self.model.training:
            self.model.train()
        self._take(batch)
        self.average.update(self.steps)
        self.steps += 1
        ends(UPDATE)

    def capture(self, batches: Sequence[JaggedBatch]) -> None:
        """Takes steps until each batch has been replayed."""
        for _ in range(STEPS_TO_A_REPLAY):
            for batch in batches:
                self(batch)

    @torch.no_grad()
    def logits(self, batch: JaggedBatch) -> Tensor:
        """Without dropout, of a padded batch."""
        self.model.eval()
        self._expect(batch)
        return self._forward(inputs_of(batch))[: len(batch.candidate.values)]

    def loss_after_a_step(self, batch: JaggedBatch) -> Tensor:
        """[]: that of the same batch behind a step from the first weights; on a GPU, one that is
        replayed."""
        self.model.eval()
        weights = [*self.model.parameters()]
        first = [weight.detach().clone() for weight in weights]
        for _ in range(STEPS_TO_A_REPLAY - 1):
            self._take(batch)
        with torch.no_grad():
            for weight, begun in zip(weights, first, strict=True):
                weight.copy_(begun)
            for state in tensors_in(self.optimisers.state_dict()):
                state.zero_()
            self._take(batch)
            return self._loss(batch)

    def _take(self, batch: JaggedBatch) -> Tensor:
        self._expect(batch)
        with torch.enable_grad():
            return self.graphs(inputs_of(batch))

    def _expect(self, batch: JaggedBatch) -> None:
        """ValueError for a batch of other items than the first one, or with more candidates of a
        request: both are in the graph."""
        asked = batch.longest[0]
        items, most = self._fixed = self._fixed or (batch.items, asked)
        if batch.items is not items or asked > most:
            raise ValueError(
                f"a graph is of its first batch's items, and of {most} candidates of a request at "
                f"most; got {'these' if batch.items is items else 'other'} items and {asked}"
            )

    def _padded(self, inputs: Inputs) -> BucketBatch:
        assert self._fixed is not None
        items, asked = self._fixed
        return BucketBatch.of(inputs, items, (asked, self.config.max_history))

    def _trained(self, inputs: Inputs, real: Tensor) -> Tensor:
        batch = self._padded(inputs)
        loss = loss_of(
            self.config.loss,
            self.model,
            batch,
            negatives=self.config.negatives,
            real=real[batch.request],
        )
        loss.backward()
        self.optimisers.step(scale=1.0)
        self.optimisers.zero_grad()
        return loss

    def _answered(self, inputs: Inputs, real: Tensor) -> Tensor:
        del real
        return self.model(self._padded(inputs))
