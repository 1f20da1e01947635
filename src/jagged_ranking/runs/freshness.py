"""What a run depends on, as one key: a run whose key has not changed need not be repeated."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from click_data import history_lengths
from jagged_ranking import paths, provenance
from jagged_ranking.runs.errors import RunError
from jagged_ranking.runs.notebook import read_record, source_digest

DATASET_FILE = "dataset.json"
RESULTS = "results.parquet"
MANIFEST = "manifest.json"

# Set for the kernel of a notebook: what the user typed, and the key of the run.
COMMAND_VARIABLE = "JAGGED_COMMAND"
KEY_VARIABLE = "JAGGED_RUN_KEY"


def describe_data(folder: Path | str) -> dict[str, Any]:
    """What `dataset.json` says of a prepared dataset, "digest" and "name" among it.

    Raises:
        RunError: the folder is not one; the line says how to prepare it.
    """
    path = Path(folder) / DATASET_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        what = "is not a prepared dataset" if path.parent.exists() else "does not exist"
        raise RunError(
            f"{folder} {what} (no {DATASET_FILE} in it); make one with "
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
            raise RunError(f"{name} does not exist")
        return path
    places = (paths.DATA / name, paths.DATA / f"{name}.parquet")
    return next((place for place in places if place.exists()), None)


def histories_digests(names: Iterable[str]) -> dict[str, str]:
    """name -> sha256 of the history lengths of each data set that is at hand."""
    found: dict[str, str] = {}
    for name in names:
        if (place := find_histories(name)) is not None:
            lengths = history_lengths(place).astype("<i8")
            found[place.stem] = hashlib.sha256(lengths.tobytes()).hexdigest()
    return found


def default_device() -> str:
    """ "cuda" where there is one, else "cpu"."""
    import torch  # seconds to import, and `jagged --help` passes through here

    return "cuda" if torch.cuda.is_available() else "cpu"


def digest(content: Any) -> str:
    """sha256 of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def run_key(notebook: Path, parameters: Mapping[str, Any], data: Path | str | None) -> str:
    """sha256 over notebook source, parameters, code tree, data digest, versions and device.

    Where the results go and by what path the data is reached does not count.
    """
    counted = {k: v for k, v in parameters.items() if k not in ("out", "data")}
    return digest(
        {
            "notebook": source_digest(notebook),
            "parameters": counted,
            "code": provenance.code_hash(),
            "data": data_digest(data),
            "histories": histories_digests(parameters.get("histories") or ()),
            "versions": provenance.versions(),
            "device": provenance.device_name(default_device()),
        }
    )


def is_fresh(folder: Path, key: str) -> bool:
    """Whether `folder` holds the whole results of a run with this key."""
    record = read_record(folder)
    return (
        record is not None
        and record.status == "ok"
        and record.key == key
        and all((folder / name).is_file() for name in (RESULTS, MANIFEST))
    )
