"""Comparing the models so that little is lost."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from jagged_ranking import paths
from jagged_ranking.processes import among_others
from jagged_ranking.reproduce.cache import circumstances, read_kept
from jagged_ranking.reproduce.click_logs import data_digest
from jagged_ranking.reproduce.freshness import digest
from jagged_ranking.training.config import TrainConfig
from jagged_ranking.training.experiment import compare_models
from jagged_ranking.training.outcome import Outcome, read_outcome, write_outcome


def compared(
    data: str | Path,
    *,
    models: Sequence[str],
    seeds: Sequence[int],
    config: TrainConfig,
    replicates: int,
    device: str,
) -> pd.DataFrame:
    """`compare_models`, each training kept in `build/cache` as soon as it is done.

    So a comparison that is cut off goes on where it stopped, and one of a seed more trains only
    that. A training counts by its options, the data's digest, code, versions and the device.
    """
    return compare_models(
        data,
        models=models,
        seeds=seeds,
        config=config,
        replicates=replicates,
        device=device,
        store=_Trainings(data, device),
    )


class _Trainings:
    """The trainings on one data set that lie in `build/cache`."""

    def __init__(self, data: str | Path, device: str) -> None:
        self._shared = {
            "data": data_digest(data),
            **circumstances(compare_models.__module__, device),
        }

    def get(self, config: TrainConfig) -> Outcome | None:
        what = f"{config.model} seed {config.seed}"
        return read_kept(self._path(config), read_outcome, what=what)

    def put(self, outcome: Outcome) -> None:
        path = self._path(outcome.config)
        with paths.naming(path), among_others(path.parent):
            write_outcome(outcome, path)

    def _path(self, config: TrainConfig) -> Path:
        key = digest({"config": config.to_dict(), **self._shared})
        return paths.CACHE / f"training-{key[:20]}.npz"
