"""Learning rates over a run, as shares of those that the options name."""

from __future__ import annotations

import math

from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.run_progress import Progress


def rate_scale(config: TrainConfig, progress: Progress, *, epoch_steps: int) -> float:
    """The share of the next step, one of `epoch_steps` in its epoch.

    Linear over the first `warmup_steps`, times: constant, what plateaus have left of 1; cosine,
    half a cosine from 1 to 0 over all epochs, whatever plateaus there are (Loshchilov and Hutter,
    SGDR, ICLR 2017, equation 5, without restarts).
    """
    warm = min(1.0, (progress.step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.schedule == "constant":
        return warm * progress.lr_scale
    done = (progress.epoch + progress.epoch_step / epoch_steps) / config.epochs
    return warm * (1 + math.cos(math.pi * done)) / 2


def lower_on_plateau(config: TrainConfig, progress: Progress, *, better: bool) -> None:
    """Behind an epoch: lowers the rate by `lr_factor` after more than `lr_patience` epochs without
    a better one."""
    progress.lr_waited = 0 if better else progress.lr_waited + 1
    if progress.lr_waited > config.lr_patience:
        progress.lr_scale *= config.lr_factor
        progress.lr_waited = 0
