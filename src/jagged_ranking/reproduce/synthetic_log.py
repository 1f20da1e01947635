"""The synthetic click log that stands in where no data is given, made once in build/data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jagged_ranking import paths
from jagged_ranking.code_roots import DATA, code_hash
from jagged_ranking.reproduce.click_logs import data_digest
from jagged_ranking.reproduce.errors import RunError
from jagged_ranking.reproduce.freshness import digest

SOURCE = "synthetic"


def synthetic_log(options: Mapping[str, Any] | None = None, *, name: str = SOURCE) -> str:
    """The folder of a prepared synthetic log; made if there is none of these options yet.

    Args:
        options: of the source (users, items, categories, events, seed), else its defaults.
        name: what the folder below build/data begins with.
    """
    options = options or {}
    folder = synthetic_folder(options, name=name)
    if not is_made(options, name=name):
        from click_data import prepare  # polars and pyarrow: only where data is made

        folder.parent.mkdir(parents=True, exist_ok=True)
        prepare(SOURCE, out=folder, force=True, **options)
    return str(folder)


def synthetic_folder(options: Mapping[str, Any], *, name: str = SOURCE) -> Path:
    """Where the log of these options and this code lies or will lie: a folder of its own, as a run
    with other options may be reading its log meanwhile."""
    key = digest([dict(options), code_hash(roots=DATA)])
    return paths.BUILD / "data" / f"{name}-{key[:16]}"


def is_made(options: Mapping[str, Any], *, name: str) -> bool:
    """Whether the log is there, of these options and this code."""
    try:
        return data_digest(synthetic_folder(options, name=name)) is not None
    except RunError:
        return False
