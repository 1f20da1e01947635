"""From a model to predictions and metrics of a split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from click_data.split import SPLITS
from jagged_ranking.data.batch import RequestTable
from jagged_ranking.data.data_shape import is_next_items
from jagged_ranking.data.loader import RequestLoader
from jagged_ranking.data.store import HistoryStore
from jagged_ranking.evaluation.all_items import all_item_metrics, ranks_among_all
from jagged_ranking.evaluation.metrics import evaluate_metrics
from jagged_ranking.models.ranker import Ranker

if TYPE_CHECKING:
    from click_data import ClickDataset


@dataclass(frozen=True)
class Evaluation:
    """Predictions of the first task for the candidates of one split, in order, and their metrics.

    probability: float64 [C]; user, request, label: [C]; metrics: those of `evaluate_metrics`.
    """

    split: str
    probability: np.ndarray
    user: np.ndarray
    request: np.ndarray
    label: np.ndarray
    metrics: dict[str, float]

    @classmethod
    def of(
        cls, split: str, columns: Any, probability: np.ndarray, *, train_ctr: float
    ) -> Evaluation:
        """Judge predictions for click_data's `RequestColumns` of this split."""
        asked = np.diff(columns.offsets)
        label = np.asarray(next(iter(columns.labels.values())))
        of = {
            "user": np.repeat(np.asarray(columns.user), asked),
            "request": np.repeat(np.arange(len(asked)), asked),
            "label": label,
            "probability": probability,
        }
        return cls(split=split, metrics=evaluate_metrics(**of, train_ctr=train_ctr), **of)


def predict(model: Ranker, loader: RequestLoader) -> np.ndarray:
    """Probabilities of the first task, float64 [C] in the loader's order, in eval mode."""
    return score(model, loader)[0]


@torch.no_grad()
def score(model: Ranker, loader: RequestLoader) -> tuple[np.ndarray, np.ndarray]:
    """What `predict` returns, and which of the split's candidates each is, int64 [C]."""
    model.eval()
    parts, places = [], []
    for batch in loader.batches():
        model.bring(batch)
        if len(batch):  # of a batch that is shared there may be nothing here
            parts.append(model(batch)[:, 0].double().sigmoid())
            places.append(batch.index)
    if not parts:
        return np.zeros(0), np.zeros(0, np.int64)
    return torch.cat(parts).cpu().numpy(), torch.cat(places).cpu().numpy()


def evaluate_model(
    model: Ranker,
    dataset: ClickDataset,
    *,
    batch_size: int,
    split: str = "test",
    device: torch.device | str | None = None,
) -> Evaluation:
    """Scores one split with a trained model; NE is over the CTR that the model was trained on."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    columns = dataset.requests(split)
    if len(columns.item) == 0:
        raise ValueError(f"{dataset.name}: there are no {split} requests")
    device = torch.device(device or next(model.parameters()).device)
    store = HistoryStore.from_dataset(dataset, device)
    loader = RequestLoader(
        store,
        RequestTable.from_columns(columns, store.place),
        batch_size=batch_size,
        max_history=model.max_history,
        arrivals=model.embedding.arrival,
    )
    probability = predict(model.to(device), loader)
    found = Evaluation.of(split, columns, probability, train_ctr=model.positive_rate)
    if model.follows_sequences and is_next_items(dataset):
        found.metrics.update(all_item_metrics(ranks_among_all(model, loader)))
    return found
