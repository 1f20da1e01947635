"""From a model to predictions and metrics of a split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from click_data.split import SPLITS
from jagged_ranking.data.batch import HistoryStore, SampleLoader, SampleTable
from jagged_ranking.evaluation.metrics import evaluate_metrics
from jagged_ranking.models.ranker import Ranker

if TYPE_CHECKING:
    from click_data import ClickDataset


@dataclass(frozen=True)
class Evaluation:
    """Predictions of one split, in the order of its samples, and their metrics.

    probability: float64 [N]; user, label: [N]; metrics: auc, gauc, ne, log_loss.
    """

    split: str
    probability: np.ndarray
    user: np.ndarray
    label: np.ndarray
    metrics: dict[str, float]


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU; on a CPU nothing, where it would be slower than float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@torch.no_grad()
def predict(model: torch.nn.Module, loader: SampleLoader) -> np.ndarray:
    """Probabilities float64 [N] in the loader's order, with the model in eval mode."""
    model.eval()
    device = loader.store.item.device
    parts = []
    for batch in loader.batches():
        with autocast(device):
            parts.append(model(batch).double().sigmoid())
    return torch.cat(parts).cpu().numpy() if parts else np.zeros(0)


def split_metrics(columns: Any, probability: np.ndarray, *, train_ctr: float) -> dict[str, float]:
    """The metrics of predictions for click_data's `SampleColumns`."""
    user, label = np.asarray(columns.user), np.asarray(columns.label)
    return evaluate_metrics(user, label, probability, train_ctr=train_ctr)


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
    columns = dataset.samples(split)
    if len(columns.label) == 0:
        raise ValueError(f"{dataset.name}: there are no {split} samples")
    device = torch.device(device or next(model.parameters()).device)
    loader = SampleLoader(
        HistoryStore.from_dataset(dataset, device),
        SampleTable.from_columns(columns, device),
        batch_size=batch_size,
        max_history=model.max_history,
    )
    probability = predict(model.to(device), loader)
    return Evaluation(
        split=split,
        probability=probability,
        user=np.asarray(columns.user),
        label=np.asarray(columns.label),
        metrics=split_metrics(columns, probability, train_ctr=model.head.positive_rate),
    )
