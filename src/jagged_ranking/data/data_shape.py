"""What a model must know of its data set."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from click_data import ClickDataset


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """Vocabulary sizes and statistics; all of them from the train period."""

    num_items: int
    num_categories: int
    positive_rate: float
    signal_mean: tuple[float, ...] = ()
    signal_std: tuple[float, ...] = ()

    @classmethod
    def of(cls, dataset: ClickDataset) -> DataShape:
        """Vocabulary sizes, CTR of the train samples, and each signal's mean and deviation.

        Signals are measured over the events of the train period: those before the last train
        sample's time or at it.
        """
        train = dataset.samples("train")
        if len(train.label) == 0:
            raise ValueError(f"{dataset.name}: there are no train samples")
        rate = float(np.mean(train.label))
        if not 0 < rate < 1:
            raise ValueError(f"{dataset.name}: train samples all have the label {rate:.0f}")
        columns = dataset.histories
        past = np.asarray(columns.time) <= np.max(train.time)
        signals = [np.asarray(columns.signals[name])[past] for name in sorted(columns.signals)]
        return cls(
            num_items=dataset.num_items,
            num_categories=dataset.num_categories,
            positive_rate=rate,
            signal_mean=tuple(float(s.mean(dtype=np.float64)) for s in signals),
            signal_std=tuple(max(float(s.std(dtype=np.float64)), 1e-6) for s in signals),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return asdict(self)
