"""What one training comes to, and its file."""

from __future__ import annotations

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from jagged_ranking.evaluation.evaluate import Evaluation
from jagged_ranking.results import atomic
from jagged_ranking.training.config import TrainConfig

ARRAYS = ("probability", "user", "request", "label")


@dataclass(frozen=True)
class Outcome:
    """One training: its evaluations, its best epoch, and how many seconds it took."""

    config: TrainConfig
    evaluations: list[Evaluation]
    best_epoch: int
    seconds: float


class Store(Protocol):
    """Where outcomes are kept, all of one data set."""

    def get(self, config: TrainConfig, splits: tuple[str, ...], /) -> Outcome | None:
        """The outcome of a training that was done before, scored on these splits; None where there
        is none."""

    def put(self, outcome: Outcome, /) -> None:
        """Keep an outcome."""


def write_outcome(outcome: Outcome, path: Path) -> None:
    """Write as .npz, whole or not at all: every number as it is, to the bit."""
    said = {
        "config": outcome.config.to_dict(),
        "best_epoch": outcome.best_epoch,
        "seconds": outcome.seconds,
        "evaluations": [[one.split, one.metrics] for one in outcome.evaluations],
    }
    arrays = {
        f"{one.split}_{name}": getattr(one, name) for one in outcome.evaluations for name in ARRAYS
    }
    with atomic(path) as temporary:
        np.savez_compressed(temporary, allow_pickle=False, said=json.dumps(said), **arrays)


def read_outcome(path: Path) -> Outcome:
    """Read what `write_outcome` wrote; a ValueError of one line for a damaged file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            said = json.loads(str(file["said"]))
            evaluations = [
                Evaluation(
                    split=split,
                    metrics=metrics,
                    **{name: file[f"{split}_{name}"] for name in ARRAYS},
                )
                for split, metrics in said["evaluations"]
            ]
        config = TrainConfig.from_dict(said["config"])
        return Outcome(config, evaluations, said["best_epoch"], said["seconds"])
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: is damaged, or not the outcome of a training") from error
