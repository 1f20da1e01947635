"""Comparing the models so that little is lost.

Every notebook imports this module, and one of them compares: what trains and judges, and so
scikit-learn, is imported by the functions that need it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
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
    search: Mapping[str, Any] | None = None,
    own: Mapping[str, Mapping[str, Any]] | None = None,
    replicates: int,
    device: str,
    workers: int | None = None,
) -> pd.DataFrame:
    """`compare_models` on the data sets, each training kept in `build/cache` as soon as it is done.

    So a comparison that is cut off goes on where it stopped, and one of a seed more trains only
    that. A training counts by its options, the data's digest, code, that of a user's own model
    too, versions and the device.

    Args:
        data: a prepared data set.
        datasets: further ones, see `find_prepared`; one that is there already counts once.
        models: every one that there is where none is named.
        seeds, replicates, device, workers: see `compare_models`.
        options: of `TrainConfig`, of all models.
        search: fields of `Search`: trials, space, seed; {} and None are without.
        own: models, seeds, options and search that a data set has of its own, see `with_own`.

    Raises:
        ValueError: an option that `TrainConfig` or `Search` does not have, or what `with_own` does
            not take; before anything is trained.
    """
    from jagged_ranking.models.model_config import MODEL_NAMES
    from jagged_ranking.training.config import TrainConfig
    from jagged_ranking.training.experiment import Plan, compare_models
    from jagged_ranking.training.search import Search

    shared = {"models": models, "seeds": seeds, "options": options, "search": search or {}}
    plans = []
    for folder in distinct_folders([data, *find_prepared(datasets)]):
        mine = with_own(shared, own, describe_data(folder)["name"])
        plan = Plan(
            folder,
            models=mine["models"] or MODEL_NAMES,
            seeds=mine["seeds"],
            config=TrainConfig.from_dict(mine["options"]),
            search=Search.from_dict(mine["search"]) if mine["search"] else None,
            store=Trainings(folder, compare_models.__module__, device),
        )
        plans.append(plan)
    return compare_models(plans, replicates=replicates, device=device, workers=workers)


def with_own(
    shared: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]] | None, name: str
) -> dict[str, Any]:
    """What holds for the data set `name`: all of `shared`, and what `own` has of it instead.

    Args:
        shared: lists, and mappings, of which a data set's own say only what differs.
        own: by the name of a data set, of the keys of `shared` those that it has of its own; None
            for none.
        name: of a data set.

    Raises:
        ValueError: in `own` of this data set a key that `shared` does not have, or a list where
            there is a mapping, or the other way round.
    """
    mine = (own or {}).get(name, {})
    if not isinstance(mine, Mapping):
        raise ValueError(f"own of {name}: must be a mapping, got {mine!r}")
    if unknown := sorted(set(mine) - set(shared)):
        raise ValueError(f"own of {name}: unknown {unknown[0]!r}; known: {', '.join(shared)}")
    found = dict(shared)
    for key, value in mine.items():
        if isinstance(shared[key], Mapping):
            if not isinstance(value, Mapping):
                raise ValueError(f"own of {name}: {key} must be a mapping, got {value!r}")
            found[key] = {**shared[key], **value}
        elif isinstance(value, str | Mapping) or not isinstance(value, Sequence):
            raise ValueError(f"own of {name}: {key} must be a list, got {value!r}")
        else:
            found[key] = value
    return found


def distinct_folders(folders: Iterable[str | Path]) -> list[Path]:
    """Prepared data sets, each once, whatever its folders."""
    found: dict[str | None, Path] = {}
    for folder in folders:
        found.setdefault(data_digest(folder), Path(folder))
    return list(found.values())


class Trainings:
    """The trainings on one data set that lie in `build/cache`."""

    def __init__(self, data: str | Path, module: str, device: str) -> None:
        self._data = data_digest(data)
        # once a model: a training counts by the code that there was when it began
        self._circumstances = functools.cache(
            lambda model: circumstances(module, device, models=[model])
        )

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
        around = {"data": self._data, **self._circumstances(config.model)}
        key = digest({"config": config.to_dict(), "splits": splits, **around})
        return paths.CACHE / f"training-{key[:20]}.npz"
