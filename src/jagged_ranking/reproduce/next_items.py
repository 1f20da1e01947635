"""Data sets of next items, which not every training takes: what a notebook would stop at in its
middle is said before it begins."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jagged_ranking.reproduce.click_logs import describe_data, prepared_places
from jagged_ranking.reproduce.errors import RunError
from jagged_ranking.reproduce.parameters import read_parameters
from jagged_ranking.reproduce.plan import Plan

OWN = "own"  # the parameter of what a data set has of its own; all notebooks that train on one have
SHARED = ("models", "caps", "seeds", "options", "search")  # what it may have of its own
OPTIONS = {"loss": "next_item", "head": "dot"}


def check_next_items(plan: Plan) -> None:
    """Whether a notebook trains nothing on next items but what can be.

    Raises:
        RunError: it would; the line says what to give instead.
        ValueError: parameters that are wrong themselves, see `with_own` and `encoder_of`.
    """
    if why := refusal(plan, plan.data):
        raise RunError(f"{plan.id}: {why}")


def refusal(plan: Plan, data: Path | None) -> str | None:
    """Why a notebook cannot train on its data sets, and what can be done; None where it can.

    Args:
        plan: of its run.
        data: the data set as it was given; that of the plan may be a sample, still to be made.

    Raises:
        ValueError: as `check_next_items`.
    """
    known = read_parameters(plan.notebook)
    if OWN not in known:
        return None
    values = {name: one.default for name, one in known.items()} | plan.parameters
    for folder in [*([data] if data else []), *prepared_places(values.get("datasets", []))]:
        if _is_next_items(folder):
            name = describe_data(folder)["name"]
            if "models" not in values:
                return f"{name} has next items alone, which its model cannot be trained on"
            if not _trains_them(values, name):
                return (
                    f"{name} has next items alone, which few models can be trained on: "
                    f"`jagged run {plan.id} -p {_advice(name)} ...` trains them"
                )
    return None


def _trains_them(values: Mapping[str, Any], name: str) -> bool:
    """Whether what holds for the data set of this name can be trained on next items."""
    from jagged_ranking.reproduce.quality_study import with_own
    from jagged_ranking.training.refusals import follows

    shared = {key: values[key] for key in SHARED if key in values}
    mine = with_own(shared, values[OWN], name)
    chosen = {key: mine["options"].get(key) for key in OPTIONS}
    return chosen == OPTIONS and bool(mine["models"]) and all(map(follows, mine["models"]))


def _advice(name: str) -> str:
    """The parameter that has the data set of this name trained, as a shell reads it."""
    from jagged_ranking.training.refusals import able_models

    own = {name: {"models": able_models(), "options": OPTIONS}}
    return shlex.quote(f"{OWN}={json.dumps(own)}")


def _is_next_items(folder: Path) -> bool:
    if describe_data(folder).get("timed") != "none":  # what else it takes needs torch
        return False
    from click_data import open_dataset
    from jagged_ranking.data.data_shape import is_next_items

    return is_next_items(open_dataset(folder))
