"""Options of training in a notebook's parameters, checked before anything runs: to a notebook they
are one mapping, and a training would stop at them in its middle, without their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from jagged_ranking.code_roots import ROOTS
from jagged_ranking.reproduce.parameters import Parameter, check_values
from jagged_ranking.training.config import TrainConfig

OPTIONS = ("options", "from_disk")  # the parameters that are such mappings
OWN = "own"  # the parameter that has `options` by data set


def read_options(values: Mapping[str, Any], notebook: Path) -> dict[str, Any]:
    """The values of a notebook's parameters, numbers among options of training that YAML took for
    text (1e-3 has no dot) as numbers; those of a notebook of a user's own as they are.

    Raises:
        RunError: an option that there is not, or of another type.
    """
    found = dict(values)
    if notebook.stem not in ROOTS:
        return found
    for name in OPTIONS:
        if isinstance(found.get(name), Mapping):
            found[name] = _read(found[name], f"{notebook.stem}, {name}")
    if isinstance(own := found.get(OWN), Mapping):
        found[OWN] = {data: _of_data(mine, notebook, data) for data, mine in own.items()}
    return found


def _of_data(mine: Any, notebook: Path, data: str) -> Any:
    # What has another form says so itself, see `quality_study.with_own`.
    if not isinstance(mine, Mapping) or not isinstance(options := mine.get(OPTIONS[0]), Mapping):
        return mine
    where = f"{notebook.stem}, {OWN} of {data}, {OPTIONS[0]}"
    return {**mine, OPTIONS[0]: _read(options, where)}


def _read(options: Mapping[str, Any], where: str) -> dict[str, Any]:
    checked = check_values(options, _KNOWN, where)
    # 1 stays 1: what is kept under it is not measured again.
    return {name: checked[name] if isinstance(one, str) else one for name, one in options.items()}


def _type_of(annotation: Any) -> str:
    return "list[int]" if annotation == "tuple[int, ...]" else str(annotation)


_KNOWN = {
    option.name: Parameter(option.name, _type_of(option.type), option.default, "")
    for option in fields(TrainConfig)
}
