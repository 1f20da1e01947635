"""What a training is refused for, before anything is trained: one line that names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from jagged_ranking.data.data_shape import is_next_items
from jagged_ranking.evaluation.metrics import metric_names
from jagged_ranking.models.model_config import MODEL_NAMES, encoder_of
from jagged_ranking.models.ranker import Ranker
from jagged_ranking.training.run_progress import TrainingError

if TYPE_CHECKING:
    from click_data import ClickDataset, RequestColumns


def check_loss(loss: str, model: Ranker, dataset: ClickDataset) -> None:
    """Whether the model and the data set have what the loss is of."""
    if loss == "next_item" and not model.follows_sequences:
        able = [name for name in MODEL_NAMES if hasattr(encoder_of(name), "states")]
        raise ValueError(
            f"loss next_item needs a model that answers after every event: {', '.join(able)}"
        )
    if loss != "next_item" and is_next_items(dataset):
        raise ValueError(
            f"{dataset.name}: has next items alone, without others to tell them from: "
            "loss next_item draws these, with head dot"
        )


def check_select(select: str, dataset: ClickDataset, valid: RequestColumns) -> None:
    """Whether the metric to stop on is one of the validation split."""
    known = metric_names(len(valid.item), int(np.count_nonzero(np.diff(valid.offsets))))
    if select not in known:
        raise TrainingError(
            f"{dataset.name}: select is {select}, which needs lists of candidates; there are: "
            f"{', '.join(known)}"
        )
