"""What a model must know of its data set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from jagged_ranking.data.batch import MATCHES, whole_matches
from jagged_ranking.data.store import HistoryStore, once

if TYPE_CHECKING:
    from click_data import ClickDataset


# The positive rate of next items, of which none is negative until others are drawn.
NEXT_ITEM_RATE = 0.5


def is_next_items(dataset: ClickDataset) -> bool:
    """Whether train requests have one candidate each, the item that came next."""
    if dataset.info["timed"] != "none":
        return False
    return all((np.asarray(of) == 1).all() for of in dataset.requests("train").labels.values())


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of numbers in the train period, by which they enter, and those
    of their `symmetric_log`."""

    mean: float
    std: float
    log_mean: float = 0.0
    log_std: float = 1.0

    @classmethod
    def of(cls, numbers: Any) -> Scale:
        """Of an array; a constant has the deviation 1e-6, of nothing the mean is 0."""
        if len(numbers) == 0:
            return cls(0.0, 1.0)
        values = np.asarray(numbers)
        return cls(*_moments(values), *_moments(np.sign(values) * np.log1p(np.abs(values))))


def _moments(values: np.ndarray) -> tuple[float, float]:
    mean, std = float(values.mean(dtype=np.float64)), float(values.std(dtype=np.float64))
    return mean, max(std, 1e-6)


def symmetric_log(x: Tensor) -> Tensor:
    """sign(x) log(1 + |x|)."""
    return x.sign() * x.abs().log1p()


@dataclass(frozen=True, kw_only=True)
class DataShape:
    """Names, vocabulary sizes and statistics; all of them from the train period.

    num_items: rows to embed; ids from there on are items that training has not seen. categories:
    number of codes of each categorical feature of items; item_dense, signals, features (the data
    set's, then `MATCHES`): scales by name; context: the number of codes, or a scale;
    positive_rates: CTR by task, the first being what is ranked by.
    """

    num_items: int
    categories: Mapping[str, int]
    positive_rates: Mapping[str, float]
    item_dense: Mapping[str, Scale] = field(default_factory=dict)
    signals: Mapping[str, Scale] = field(default_factory=dict)
    features: Mapping[str, Scale] = field(default_factory=dict)
    context: Mapping[str, int | Scale] = field(default_factory=dict)

    @property
    def tasks(self) -> tuple[str, ...]:
        """What there are labels of."""
        return tuple(self.positive_rates)

    @property
    def positive_rate(self) -> float:
        """CTR of the first task in the train split."""
        return next(iter(self.positive_rates.values()))

    @classmethod
    @once
    def of(cls, dataset: ClickDataset) -> DataShape:
        """Measured on the train split, once.

        Signals are measured over the events that train requests see: those before each user's
        longest prefix.
        """
        train = dataset.requests("train")
        if len(train.item) == 0:
            raise ValueError(f"{dataset.name}: there are no train requests")
        rates = {task: float(np.mean(label)) for task, label in train.labels.items()}
        if is_next_items(dataset):
            rates = dict.fromkeys(rates, NEXT_ITEM_RATE)
        for task, rate in rates.items():
            if not 0 < rate < 1:
                which = "" if len(rates) == 1 else f" of {task}"
                raise ValueError(
                    f"{dataset.name}: train candidates all have the label {rate:.0f}{which}"
                )
        columns = dataset.histories
        matches = whole_matches(HistoryStore.from_dataset(dataset), train).numpy().T
        features = {**train.features, **dict(zip(MATCHES, matches, strict=True))}
        past = _seen(columns.offsets, np.asarray(train.user), np.asarray(train.prefix))
        return cls(
            num_items=dataset.num_items,
            categories=dict(dataset.item_features),
            positive_rates=rates,
            item_dense={
                name: Scale.of(values[1 : dataset.num_items])
                for name, values in dataset.item_dense.items()
            },
            signals={n: Scale.of(np.asarray(v)[past]) for n, v in columns.signals.items()},
            features={name: Scale.of(values) for name, values in features.items()},
            context={
                name: Scale.of(train.context[name]) if codes is None else codes
                for name, codes in dataset.context.items()
            },
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DataShape:
        """The inverse of `to_dict`."""
        made = dict(values)
        for name in ("item_dense", "signals", "features", "context"):
            made[name] = {
                key: Scale(**value) if isinstance(value, Mapping) else value
                for key, value in made[name].items()
            }
        return cls(**made)


def _seen(offsets: Any, user: np.ndarray, prefix: np.ndarray) -> np.ndarray:
    """Which events some request of these sees, bool [T]."""
    lengths = np.diff(offsets)
    longest = np.zeros(len(lengths), np.int64)
    np.maximum.at(longest, user, prefix)
    position = np.arange(int(offsets[-1])) - np.repeat(np.asarray(offsets)[:-1], lengths)
    return position < np.repeat(longest, lengths)
