"""A training step that is captured once for batches of about the same size, and replayed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from jagged_kernels import StepGraphs
from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.figures.throughput_points import UPDATE
from jagged_ranking.models.captured_ranker import CapturedRanker
from jagged_ranking.reproduce.training_step import TrainingStep, nobody, tensors_in
from jagged_ranking.training.captured_step import CapturedStep
from jagged_ranking.training.config import TrainConfig

# Of a bucket, of which the last is the first that is replayed.
STEPS_TO_A_REPLAY = 3


class GraphedStep(TrainingStep):
    """A `TrainingStep` as a `CapturedStep`.

    Args:
        longest: see `CapturedStep`; those who pad pad to that.
        per_octave: see `StepGraphs`; many, since batches that are measured are about as large as
            each other, and padding is time of the device.
    """

    def __init__(
        self,
        config: TrainConfig,
        shape: DataShape,
        device: torch.device,
        *,
        longest: tuple[int, int] | None = None,
        per_octave: int = 16,
    ) -> None:
        super().__init__(config, shape, device)
        sizes: dict[str, Any] = {"longest": longest, "per_octave": per_octave}
        self.step = CapturedStep(config, self.model, self.optimisers, **sizes)
        self._ranker = CapturedRanker(self.model, **sizes)

    @property
    def graphs(self) -> StepGraphs:
        """Of the steps."""
        return self.step.graphs

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

    def logits(self, batch: JaggedBatch) -> Tensor:
        """Without dropout, of a padded batch."""
        return self._ranker(batch)

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

    def _take(self, batch: JaggedBatch) -> None:
        with torch.enable_grad():
            self.step(batch)
