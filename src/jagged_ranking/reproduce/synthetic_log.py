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
        name: of the folder below build/data.
    """
    options = options or {}
    folder = synthetic_folder(name)
    if not is_made(options, name=name):
        from click_data import prepare  # polars and pyarrow: only where data is made

        folder.parent.mkdir(parents=True, exist_ok=True)
        prepare(SOURCE, out=folder, force=True, **options)
        _stamp(folder).write_text(_key(options), encoding="utf-8")
    return str(folder)


def synthetic_folder(name: str) -> Path:
    """Where the synthetic log of this name lies or will lie."""
    return paths.BUILD / "data" / name


def is_made(options: Mapping[str, Any], *, name: str) -> bool:
    """Whether the log is there, of these options and this code."""
    folder = synthetic_folder(name)
    try:
        data_digest(folder)
        return _stamp(folder).read_text(encoding="utf-8") == _key(options)
    except (RunError, OSError):
        return False


def _stamp(folder: Path) -> Path:
    # Beside the folder: what lies in it is the dataset and nothing else.
    return folder.with_name(f"{folder.name}.key")


def _key(options: Mapping[str, Any]) -> str:
    return digest([dict(options), code_hash(roots=DATA)])
