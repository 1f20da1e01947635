"""One training step: what the trainer does with a batch, to be measured.

The loss, its gradients, the update of the weights and of their average. PyTorch may use its faster
kernels, which the trainer forbids since they do not repeat themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.data.data_shape import DataShape
from jagged_ranking.figures.throughput_points import BACKWARD, HEAD, UPDATE
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.average import Average
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.losses import loss_of
from jagged_ranking.training.optimisers import Optimisers

# Standard deviation in place of zero, of weights of layers times the root of their inputs: enough
# for logits to depend on attention.
AWAY_FROM_ZERO, OF_LAYERS = 0.1, 1.5


def nobody(part: str) -> None:
    """Who is told of parts where nobody wants to know."""


class TrainingStep:
    """A model (`ranker_to_measure`) with all that a step of it needs."""

    def __init__(self, config: TrainConfig, shape: DataShape, device: torch.device) -> None:
        self.config = config
        self.model = ranker_to_measure(config, shape, device)
        self.optimisers = Optimisers(self.model, config)
        self.average = Average(self.model, decay=config.average_decay)
        if config.backend:
            self.model.compile(backend=config.backend, dynamic=True)
        self.steps = 0

    def __call__(self, batch: JaggedBatch, ends: Callable[[str], object] = nobody) -> None:
        """One step, which leaves no gradient. `ends` is told of each part when it has been
        issued."""
        self.model.train()
        self._update(self._loss(batch), ends)

    @torch.no_grad()
    def logits(self, batch: JaggedBatch) -> Tensor:
        """Without dropout."""
        return self.model.eval()(batch)

    def loss_after_a_step(self, batch: JaggedBatch) -> Tensor:
        """[]: that of the same batch once more, both without dropout."""
        self.model.eval()
        self._update(self._loss(batch), nobody)
        with torch.no_grad():
            return self._loss(batch)

    def tensors(self) -> Iterator[Tensor]:
        """What exists before a step, and stays, the batch apart."""
        for model in (self.model, self.average.model):
            yield from model.parameters()
            yield from model.buffers()
        yield from tensors_in(self.optimisers.state_dict())

    def _loss(self, batch: JaggedBatch) -> Tensor:
        return loss_of(self.config.loss, self.model, batch, negatives=self.config.negatives)

    def _update(self, loss: Tensor, ends: Callable[[str], object]) -> None:
        ends(HEAD)
        loss.backward()
        ends(BACKWARD)
        self.optimisers.step()
        self.average.update(self.steps)
        self.steps += 1
        self.optimisers.zero_grad()
        ends(UPDATE)


def ranker_to_measure(config: TrainConfig, shape: DataShape, device: torch.device) -> Ranker:
    """A model with the weights that its seed says.

    Branches that begin at zero, as those of transformers do, would hide what their attention
    computes: here all that is zero begins at numbers drawn by the seed.
    """
    torch.manual_seed(config.seed)
    model = Ranker(config, shape)
    _leave_zero(model)
    return model.to(device)


@torch.no_grad()
def _leave_zero(model: nn.Module) -> None:
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if not parameter.any():
                linear = isinstance(module, nn.Linear) and parameter.ndim == 2
                std = OF_LAYERS / parameter.shape[1] ** 0.5 if linear else AWAY_FROM_ZERO
                parameter.normal_(std=std)


def tensors_in(state: Any) -> Iterator[Tensor]:
    """All in a dictionary of dictionaries."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from tensors_in(value)
