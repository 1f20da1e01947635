"""The code of a user's own models, which lies outside of the project's."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from jagged_ranking.code_roots import code_hash
from jagged_ranking.models.model_config import MODEL_NAMES, encoder_of
from jagged_ranking.reproduce.errors import RunError

# Of each package that models were asked for of: as what it was imported, and its code then.
_imported: dict[str, tuple[ModuleType, str]] = {}


def own_code(models: Iterable[str]) -> dict[str, str]:
    """Of those models that are a user's own (package.module), by their names, the hash of every
    Python file of the package, which a model may import from.

    Raises:
        ValueError: a name that is no model, see `encoder_of`.
        RunError: files that have changed since this process imported them: what it would train is
            what they were, and what a process beside it would train is what they are.
    """
    return {name: _code_of(name) for name in models if name not in MODEL_NAMES}


def _code_of(name: str) -> str:
    encoder_of(name)
    package = sys.modules[name.partition(".")[0]]
    now = "".join(code_hash(Path(folder), ["."]) for folder in package.__path__)
    module, before = _imported.setdefault(package.__name__, (package, now))
    if module is not package:  # imported anew
        _imported[package.__name__] = (package, now)
    elif before != now:
        raise RunError(
            f"model {name}: the code of its package has changed since it was imported; "
            "restart Python (in a notebook: the kernel)"
        )
    return now
