"""What a model must know of its data set."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from click_data.pieces import pieces, pieces_of
from jagged_ranking.data.columns import PIECE
from jagged_ranking.data.matches import whole_matches
from jagged_ranking.data.store import once

if TYPE_CHECKING:
    from click_data import ClickDataset


# The positive rate of next items, of which none is negative until others are drawn.
NEXT_ITEM_RATE = 0.5


def is_next_items(dataset: ClickDataset) -> bool:
    """Whether train requests have one candidate each, the item that came next."""
    if dataset.info["timed"] != "none":
        return False
    labels = dataset.requests("train").labels.values()
    return all((of[some] == 1).all() for of in labels for some in pieces(len(of), PIECE))


@dataclass(frozen=True)
class Scale:
    """Mean and standard deviation of numbers in the train period, by which they enter, and those
    of their `symmetric_log`."""

    mean: float
    std: float
    log_mean: float = 0.0
    log_std: float = 1.0

    @classmethod
    def of(cls, numbers: Any, scratch: Callable[[int, Any], np.ndarray] = np.empty) -> Scale:
        """Of an array; a constant has the deviation 1e-6, of nothing the mean is 0.

        `scratch(count, dtype)` makes the arrays of that length that are needed on the way: of long
        columns, `ClickDataset.scratch`.
        """
        if len(numbers) == 0:
            return cls(0.0, 1.0)
        values = np.asarray(numbers)
        logs = scratch(len(values), np.result_type(values, np.float16))
        for some in pieces(len(values), PIECE):
            logs[some] = np.sign(values[some]) * np.log1p(np.abs(values[some]))
        return cls(*_moments(values, scratch), *_moments(logs, scratch))


def _moments(values: np.ndarray, scratch: Callable[[int, Any], np.ndarray]) -> tuple[float, float]:
    """Mean and standard deviation: those of NumPy, to the bit, which would make whole arrays."""
    mean = values.mean(dtype=np.float64)
    squares = scratch(len(values), np.float64)
    for some in pieces(len(values), PIECE):
        np.square(np.subtract(values[some], mean, dtype=np.float64), out=squares[some])
    return float(mean), max(math.sqrt(np.add.reduce(squares) / len(values)), 1e-6)


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
        features = {**train.features, **whole_matches(dataset, train)}
        return cls(
            num_items=dataset.num_items,
            categories=dict(dataset.item_features),
            positive_rates=rates,
            item_dense={
                name: Scale.of(values[1 : dataset.num_items])
                for name, values in dataset.item_dense.items()
            },
            signals={
                name: Scale.of(values, dataset.scratch)
                for name, values in _past_signals(dataset, train).items()
            },
            features={name: Scale.of(values, dataset.scratch) for name, values in features.items()},
            context={
                name: Scale.of(train.context[name], dataset.scratch) if codes is None else codes
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


def _past_signals(dataset: ClickDataset, asked: Any) -> dict[str, np.ndarray]:
    """Signals of the events that some request of these sees, by name."""
    columns = dataset.histories
    offsets = columns.offsets
    longest = np.zeros(dataset.num_users, np.int64)
    for some in pieces(len(asked), PIECE):
        np.maximum.at(longest, asked.user[some], asked.prefix[some])
    found = {
        name: dataset.scratch(int(longest.sum()), values.dtype)
        for name, values in columns.signals.items()
    }
    done = 0
    for some in pieces_of(offsets, PIECE):
        begin, end = int(offsets[some.start]), int(offsets[some.stop])
        lengths = np.diff(offsets[some.start : some.stop + 1])
        position = np.arange(end - begin) - np.repeat(offsets[some] - begin, lengths)
        past = position < np.repeat(longest[some], lengths)
        for name, values in columns.signals.items():
            seen = values[begin:end][past]
            found[name][done : done + len(seen)] = seen
        done += int(longest[some].sum())
    return found
