"""Comparing the models so that little is lost.

Every notebook imports this module, and one of them compares: what trains and judges, and so
scikit-learn, is imported by the functions that need it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from jagged_ranking import paths
from jagged_ranking.processes import among_others
from jagged_ranking.reproduce.cache import circumstances, read_kept
from jagged_ranking.reproduce.click_logs import data_digest, describe_data, find_prepared
from jagged_ranking.reproduce.freshness import digest

if TYPE_CHECKING:
    from jagged_ranking.training.config import TrainConfig
    from jagged_ranking.training.outcome import Outcome


def compared(
    data: str | Path,
    *,
    datasets: Sequence[str] = (),
    models: Sequence[str],
    seeds: Sequence[int],
    options: Mapping[str, Any],
    options_of: Mapping[str, Mapping[str, Any]] | None = None,
    models_of: Mapping[str, Sequence[str]] | None = None,
    search: Mapping[str, Any] | None = None,
    replicates: int,
    device: str,
    workers: int | None = None,
) -> pd.DataFrame:
    """`compare_models` on each data set, each training kept in `build/cache` as soon as it is done.

    So a comparison that is cut off goes on where it stopped, and one of a seed more trains only
    that. A training counts by its options, the data's digest, code, versions and the device.

    Args:
        data: a prepared data set.
        datasets: further ones, see `find_prepared`; one that is there already counts once.
        models, seeds, replicates, device, workers: see `compare_models`.
        options: of `TrainConfig`, of all models.
        options_of: and, before those, of the data set of this name, of all models.
        models_of: the models of the data set of this name, in the place of `models`.
        search: fields of `Search`: trials, space, seed; none without.

    Raises:
        ValueError: an option that `TrainConfig` does not have.
    """
    from jagged_ranking.training.config import TrainConfig
    from jagged_ranking.training.experiment import compare_models
    from jagged_ranking.training.search import Search

    budget = Search(**search) if search else None
    folders: dict[str | None, Path] = {}
    for folder in (Path(data), *find_prepared(datasets)):
        folders.setdefault(data_digest(folder), folder)
    tables = []
    for folder in folders.values():
        name = describe_data(folder)["name"]
        own = (options_of or {}).get(name, {})
        tables.append(
            compare_models(
                folder,
                models=(models_of or {}).get(name, models),
                seeds=seeds,
                config=TrainConfig.from_dict({**options, **own}),
                replicates=replicates,
                device=device,
                workers=workers,
                search=budget,
                store=_Trainings(folder, compare_models.__module__, device),
            )
        )
    return pd.concat(tables, ignore_index=True)


class _Trainings:
    """The trainings on one data set that lie in `build/cache`."""

    def __init__(self, data: str | Path, module: str, device: str) -> None:
        self._shared = {
            "data": data_digest(data),
            **circumstances(module, device),
        }

    def get(self, config: TrainConfig, splits: tuple[str, ...]) -> Outcome | None:
        from jagged_ranking.training.outcome import read_outcome

        what = f"{config.model} seed {config.seed}"
        return read_kept(self._path(config, splits), read_outcome, what=what)

    def put(self, outcome: Outcome) -> None:
        from jagged_ranking.training.outcome import write_outcome

        path = self._path(outcome.config, tuple(one.split for one in outcome.evaluations))
        with paths.naming(path), among_others(path.parent):
            write_outcome(outcome, path)

    def _path(self, config: TrainConfig, splits: tuple[str, ...]) -> Path:
        key = digest({"config": config.to_dict(), "splits": splits, **self._shared})
        return paths.CACHE / f"training-{key[:20]}.npz"
