"""Equal budgets: every model is tried with the same options, and gets those that suit it best.

The list of trials is drawn from the space once, by a seed alone, and is the same for every model:
no model is tried more often, or where another was not. A trial is judged on the validation split;
the test split is not scored. The first trial is the options as they are without a search.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jagged_ranking.training.config import TrainConfig

TRIAL_SEED = 0  # of the trainings that are compared


@dataclass(frozen=True)
class Search:
    """trials: how many for each model; space: the values of each option that may be drawn.

    Raises ValueError for fewer than one trial, an option that `TrainConfig` does not have or that
    is no matter of choice, or one without values.
    """

    trials: int
    space: Mapping[str, Sequence[Any]]
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"trials must be at least 1, got {self.trials}")
        for name, values in self.space.items():
            if name in ("model", "seed", "select"):
                raise ValueError(f"a search does not choose {name}")
            if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
                raise ValueError(f"search space of {name}: must be a list of values, got {values}")
            for value in values:
                TrainConfig.from_dict({name: value} if name != "loss" else {})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Search:
        """From plain values; ValueError for one that is no field, or without one that has to be."""
        known = [spec.name for spec in fields(cls)]
        if unknown := sorted(set(values) - set(known)):
            raise ValueError(f"search has no {unknown[0]!r}; it has {', '.join(known)}")
        if missing := {"trials", "space"} - set(values):
            raise ValueError(f"search needs {min(missing)}")
        return cls(**values)

    def drawn(self, start: TrainConfig) -> list[TrainConfig]:
        """`start`, then other points of the space around it, none twice; fewer than `trials` only
        where the space has no more. Raises ValueError for values that do not fit `start`."""
        rng = np.random.default_rng(self.seed)
        found = dict.fromkeys([replace(start, seed=TRIAL_SEED)])
        for _ in range(100 * self.trials):
            if len(found) == self.trials:
                break
            # drawn by position: numpy would turn values into its own types
            chosen = {name: v[int(rng.integers(len(v)))] for name, v in self.space.items()}
            found.setdefault(TrainConfig.from_dict({**start.to_dict(), **chosen, "seed": 0}))
        return list(found)


def best_of(trials: Sequence[tuple[TrainConfig, float]]) -> TrainConfig:
    """The options of the trial with the largest value, the first of equals; NaN counts as none."""
    values = [-np.inf if np.isnan(value) else value for _, value in trials]
    return trials[int(np.argmax(values))][0]
