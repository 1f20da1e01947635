"""Learning rates over a run, as shares of those that the options name."""

from __future__ import annotations

from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.run_progress import Progress


def lower_on_plateau(config: TrainConfig, progress: Progress, *, better: bool) -> None:
    """Behind an epoch: lowers the rate by `lr_factor` after more than `lr_patience` epochs without
    a better one."""
    progress.lr_waited = 0 if better else progress.lr_waited + 1
    if progress.lr_waited > config.lr_patience:
        progress.lr_scale *= config.lr_factor
        progress.lr_waited = 0
