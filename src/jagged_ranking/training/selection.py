"""What an epoch is chosen by: a metric of the validation split."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from jagged_ranking.data.data_shape import is_next_items
from jagged_ranking.data.loader import RequestLoader
from jagged_ranking.evaluation.all_items import all_item_metrics, ranks_and_rows
from jagged_ranking.evaluation.evaluate import Evaluation, score
from jagged_ranking.evaluation.metrics import LIST_METRICS, metric_names
from jagged_ranking.models.model_config import LOSSES_OF_ORDER
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.config import (
    AUTO,
    SELECT,
    SELECT_AMONG_ALL,
    SELECT_FOR_NEXT_ITEMS,
    TrainConfig,
)
from jagged_ranking.training.ranks import Ranks
from jagged_ranking.training.run_progress import TrainingError

if TYPE_CHECKING:
    from click_data import ClickDataset, RequestColumns


def settled(config: TrainConfig, dataset: ClickDataset) -> TrainConfig:
    """The same options with the metric to stop on named, where it depends on the data."""
    if config.select != AUTO:
        return config
    able = selectable(config.loss, dataset, dataset.requests("valid"))
    listed = SELECT_FOR_NEXT_ITEMS[0]
    return replace(config, select=next((m for m in SELECT_FOR_NEXT_ITEMS if m in able), listed))


def selectable(loss: str, dataset: ClickDataset, valid: RequestColumns) -> tuple[str, ...]:
    """Which of `SELECT` the validation split has, for a training with this loss.

    Of candidates that all have one label no order is better than another. Ranks among all items
    are those of next items.
    """
    label = np.asarray(next(iter(valid.labels.values())))
    known = {*_metrics(valid)}
    if not label.any() or label.all():
        known &= {"log_loss"}
    if loss in LOSSES_OF_ORDER:
        known -= {"log_loss"}
    if loss == "next_item" and is_next_items(dataset):
        known |= {*SELECT_AMONG_ALL}
    return tuple(name for name in SELECT if name in known)


def check_select(config: TrainConfig, dataset: ClickDataset, valid: RequestColumns) -> None:
    """Whether the metric to stop on is one of the validation split."""
    able = selectable(config.loss, dataset, valid)
    if config.select in able:
        return
    needed = "candidates of both labels"
    if config.select in SELECT_AMONG_ALL:
        needed = "next items alone"
    elif config.select in LIST_METRICS and config.select not in _metrics(valid):
        needed = "lists of candidates"
    raise TrainingError(
        f"{dataset.name}: select is {config.select}, which needs {needed}; there are: "
        f"{', '.join(able) or 'none'}"
    )


def validated(
    model: Ranker,
    loader: RequestLoader,
    valid: RequestColumns,
    *,
    select: str,
    train_ctr: float,
    ranks: Ranks,
) -> dict[str, float]:
    """Metrics of the validation split; among all items, which takes longer, if one is selected.

    Args:
        model: what is judged.
        loader: of this rank's share of the split.
        valid: the split.
        select: the metric to stop on.
        train_ctr: as for `evaluate_metrics`.
        ranks: who share the split.
    """
    probability = ranks.whole(*score(model, loader))
    found = Evaluation.of("valid", valid, probability, train_ctr=train_ctr).metrics
    if select in SELECT_AMONG_ALL:
        found.update(all_item_metrics(ranks.whole(*ranks_and_rows(model, loader))))
    return found


def _metrics(valid: RequestColumns) -> tuple[str, ...]:
    return metric_names(len(valid.item), int(np.count_nonzero(np.diff(valid.offsets))))
