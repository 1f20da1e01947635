"""Where a run stands, and the losses of its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


class TrainingError(ValueError):
    """Training cannot go on; the message is one line for the user."""


@dataclass
class Progress:
    """Where a run stands: the part of its state that is plain numbers."""

    epoch: int = 0  # the epoch in progress
    step: int = 0  # optimiser steps done in all
    epoch_step: int = 0  # of them in this epoch
    losses: list[float] = field(default_factory=list)  # of each step
    history: list[dict[str, float]] = field(default_factory=list)  # of each finished epoch
    best_epoch: int = -1
    best_value: float = math.inf  # of the select metric, lower is better
    stopped: bool = False
    lr_scale: float = 1.0  # what plateaus made of the learning rates
    lr_waited: int = 0  # epochs without a better one, since the last or since it was lowered

    def record(self, row: dict[str, float], *, value: float, patience: int) -> bool:
        """Ends an epoch; says whether it is the best so far."""
        self.history.append(row)
        better = value < self.best_value
        if better:
            self.best_value, self.best_epoch = value, self.epoch
        self.epoch += 1
        self.epoch_step = 0
        self.stopped = self.epoch - 1 - self.best_epoch >= patience
        return better


class StepNumbers:
    """Loss and gradient norm of steps, left on the device until somebody reads them.

    To read each step's at once would make the host wait for the device, and the device then for
    the host.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, loss: Tensor, norm: Tensor) -> None:
        """Of the next step, each a number []."""
        self._waiting.append((loss.detach(), norm))

    def read(self, progress: Progress, *, model: str) -> None:
        """Appends the losses to `progress`; a TrainingError names the first step whose loss or
        gradient is NaN or infinite. Waits for the device, once."""
        if not self._waiting:
            return
        table = torch.stack([torch.stack(pair) for pair in self._waiting]).tolist()
        self._waiting.clear()
        for loss, norm in table:
            for what, value in (("loss", loss), ("gradient's norm", norm)):
                if not math.isfinite(value):
                    raise TrainingError(
                        f"{model}: the {what} is {value} at step {len(progress.losses)} "
                        f"(epoch {progress.epoch}); a smaller learning_rate may help"
                    )
            progress.losses.append(loss)
