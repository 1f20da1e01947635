"""What a training asks of the processes that it runs in; here, of one.

Where there are several (`rank_group`), every rank holds all weights and takes the same steps; they
share the requests of each batch, and rank 0 alone reads and writes files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from jagged_ranking.data.batch import JaggedBatch
from jagged_ranking.layers.id_table import IdTable, RowGradient
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.determinism import seed_of
from jagged_ranking.training.losses import loss_of
from jagged_ranking.training.torchrec_tables import TorchRecTables

T = TypeVar("T")


class Ranks:
    """One process: it has all requests, and nobody to agree with.

    number: of this rank. count: of all.
    """

    number, count = 0, 1

    @property
    def leads(self) -> bool:
        """Whether it is rank 0, which reads, writes and speaks."""
        return self.number == 0

    def lead(self, do: Callable[[], T]) -> T:
        """What rank 0 gets from `do`, which runs there alone; its errors, too."""
        return do()

    def each(self, do: Callable[[], T]) -> T:
        """`do` on every rank; the error of one is that of all."""
        return do()

    def agree(self, facts: Mapping[str, Any]) -> None:
        """ValueError where facts are others on another rank."""

    def together(self, do: Callable[[], T]) -> T:
        """`do`, which asks the other ranks for something, and which all call at once."""
        return do()

    def device(self, given: Callable[[], torch.device]) -> torch.device:
        """The device of this rank, `given` where there is no choice."""
        return given()

    def share(self, *, squared: bool) -> Callable[[np.ndarray], np.ndarray] | None:
        """Which requests of a batch are this rank's, by the tokens of each; None: all."""

    def share_rows(
        self, tables: Mapping[str, IdTable], *, learning_rate: float, epsilon: float
    ) -> TorchRecTables | None:
        """Shares the rows of tables out; None where this rank has all of them."""

    def begin_step(self, seed: int, step: int) -> int:
        """Before the batches of a step of a run of that seed; the seed of this rank's dropout."""
        return seed_of(seed, step)

    def loss(self, config: TrainConfig, model: Ranker, batch: JaggedBatch) -> Tensor | None:
        """This rank's part of the mean loss of a batch; None where it has none of its requests."""
        return loss_of(config.loss, model, batch, negatives=config.negatives)

    def total_loss(self, parts: list[Tensor]) -> Tensor:
        """The sum of all parts of all ranks, []."""
        return torch.stack(parts).sum()

    def total_gradients(
        self,
        parameters: list[nn.Parameter],
        by_row: dict[str, RowGradient],
        tables: Mapping[str, IdTable],
    ) -> dict[str, RowGradient]:
        """Makes the gradients of parameters the sums over ranks, and returns those of the tables
        that are trained by row."""
        return by_row

    def whole(self, found: np.ndarray, index: np.ndarray) -> np.ndarray:
        """What is found of all candidates [C], or of all requests, from each rank's and their
        places."""
        return found

    def copy(self, module: nn.Module) -> None:
        """Gives all ranks the weights of rank 0."""

    def check_alike(self, module: nn.Module, *, epoch: int) -> None:
        """TrainingError where the weights of a rank are not those of rank 0."""
