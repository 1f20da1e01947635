"""What a training is refused for, before anything is trained: one line that names it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jagged_ranking.data.data_shape import is_next_items
from jagged_ranking.models.model_config import MODEL_NAMES, encoder_of
from jagged_ranking.models.ranker import Ranker

if TYPE_CHECKING:
    from click_data import ClickDataset


def follows(model: str) -> bool:
    """Whether a model of this name answers after every event; ValueError as `encoder_of`."""
    return hasattr(encoder_of(model), "states")


def able_models() -> list[str]:
    """The models that can be trained with the loss next_item."""
    return [name for name in MODEL_NAMES if follows(name)]


def check_loss(loss: str, model: Ranker, dataset: ClickDataset) -> None:
    """Whether the model and the data set have what the loss is of."""
    if loss == "next_item" and not model.follows_sequences:
        raise ValueError(
            "loss next_item needs a model that answers after every event: "
            f"{', '.join(able_models())}"
        )
    if loss != "next_item" and is_next_items(dataset):
        raise ValueError(
            f"{dataset.name}: has next items alone, without others to tell them from: "
            "loss next_item draws these, with head dot"
        )
