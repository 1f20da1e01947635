"""The prepared data sets and history lengths that notebooks read, by folder or by name."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from click_data import history_lengths
from click_data.schema import INFO, is_prepared
from jagged_ranking import paths
from jagged_ranking.reproduce.errors import RunError


def describe_data(folder: Path | str) -> dict[str, Any]:
    """What `dataset.json` says of a prepared dataset, "digest" and "name" among it.

    Raises:
        RunError: the folder is not one; the line says how to prepare it.
    """
    path = Path(folder) / INFO
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        what = "is not a prepared dataset" if path.parent.exists() else "does not exist"
        raise RunError(
            f"{path.parent.absolute()} {what} (no {INFO} in it); make one with "
            "`jagged prepare SOURCE --from PATH --out DIR` (`jagged datasets` lists the sources)"
        ) from None
    except ValueError:
        content = None
    if not isinstance(content, dict) or not {"digest", "name"} <= set(content):
        raise RunError(f"{path}: not the description of a dataset")
    return content


def data_digest(folder: Path | str | None) -> str | None:
    """The digest of a prepared dataset (None for no dataset); RunError as `describe_data`."""
    return None if folder is None else str(describe_data(folder)["digest"])


def find_histories(name: str) -> Path | None:
    """Where the histories of a data set are: a path as it is, a name below `paths.DATA`, as a
    folder or as `NAME.parquet`; None where they are not.

    Raises:
        RunError: a path that does not exist.
    """
    if os.sep in name:
        path = Path(name).expanduser()
        if not path.exists():
            raise RunError(f"{path.absolute()} does not exist")
        return path
    places = (paths.DATA / name, paths.DATA / f"{name}.parquet")
    return next((place for place in places if place.exists()), None)


def find_prepared(names: Iterable[str]) -> list[Path]:
    """The prepared data sets of these names that are at hand: paths, or folders in `paths.DATA`.

    One that is not there is left out, and said.

    Raises:
        RunError: a path that is no prepared data set.
    """
    found = []
    for name in names:
        if (folder := _prepared_place(name)) is not None:
            found.append(folder)
        else:
            print(f"no prepared {name} in {paths.DATA}: left out")
    return found


def prepared_digests(names: Iterable[str], data: Path | str | None = None) -> dict[str, str]:
    """name -> digest of each of these prepared data sets that is at hand, and of `data`.

    Raises:
        RunError: as `find_prepared`; and two that are called the same, whose results would be
            taken for one's.
    """
    found: dict[str, str] = {}
    for place in [*prepared_places(names), *([data] if data else [])]:
        described = describe_data(place)
        name, digest = described["name"], described["digest"]
        if found.setdefault(name, digest) != digest:
            raise RunError(f"{place}: another data set of this run is called {name}, too")
    return found


def prepared_places(names: Iterable[str]) -> list[Path]:
    """The folder of each of these prepared data sets that is at hand; RunError as
    `find_prepared`."""
    return [place for place in map(_prepared_place, names) if place is not None]


def _prepared_place(name: str) -> Path | None:
    """Where a prepared data set is: a path, which must be one, or a folder of this name."""
    if os.sep in name:
        folder = Path(name).expanduser()
        describe_data(folder)
        return folder
    folder = paths.DATA / name
    return folder if is_prepared(folder) else None


def histories_digests(names: Iterable[str]) -> dict[str, str]:
    """name -> sha256 of the history lengths of each data set that is at hand; RunError where two
    are called the same."""
    found: dict[str, str] = {}
    for name in names:
        if (place := find_histories(name)) is not None:
            lengths = history_lengths(place).astype("<i8")
            digest = hashlib.sha256(lengths.tobytes()).hexdigest()
            if found.setdefault(place.stem, digest) != digest:
                raise RunError(f"{place}: other histories of this run are called {place.stem}, too")
    return found
