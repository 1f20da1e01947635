"""What a run depends on, as one key: a run whose key has not changed need not be repeated."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jagged_ranking import provenance
from jagged_ranking.code_roots import FIGURES, code_hash, has_changed, roots_of
from jagged_ranking.devices import default_device, device_name, usable_cores
from jagged_ranking.figures.result_folder import read_results
from jagged_ranking.reproduce.click_logs import describe_data, histories_digests, prepared_digests
from jagged_ranking.reproduce.notebook_files import source_digest
from jagged_ranking.reproduce.parameters import read_parameters
from jagged_ranking.reproduce.run_record import read_record

# Set for the kernel of a notebook: what the user typed, and the key of the run.
COMMAND_VARIABLE = "JAGGED_COMMAND"
KEY_VARIABLE = "JAGGED_RUN_KEY"


def digest(content: Any) -> str:
    """sha256 of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def run_key(notebook: Path, parameters: Mapping[str, Any], data: Path | str | None) -> str:
    """sha256 over notebook source, parameters, code, data (name and digest), versions and device.

    The code is what the notebook's results depend on, see `code_roots`. Of a notebook of several
    ranks it counts for how many there are GPUs (or cores), too: what was missing is a result.

    Where the results go and by what path the data is reached does not count.

    Raises:
        RunError: data that is not there, or two data sets that are called the same.
    """
    datasets = parameters.get("datasets") or ()
    prepared_digests(datasets, data)  # what is called the same is refused before anything runs
    counted = {k: v for k, v in parameters.items() if k not in ("out", "data")}
    return digest(
        {
            "notebook": source_digest(notebook),
            "parameters": counted,
            "code": code_hash(roots=roots_of(notebook.stem)),
            "data": None if data is None else [describe_data(data)[k] for k in ("name", "digest")],
            "datasets": prepared_digests(datasets),
            "histories": histories_digests(parameters.get("histories") or ()),
            "versions": provenance.versions(),
            "device": device_name(default_device()),
            **_ranks_there(notebook, parameters),
        }
    )


def _ranks_there(notebook: Path, parameters: Mapping[str, Any]) -> dict[str, int]:
    """For how many of a notebook's ranks there is a GPU or, on a CPU, a core; nothing of a notebook
    without ranks, whose key does not change with a machine's size."""
    values = {name: one.default for name, one in read_parameters(notebook).items()} | {**parameters}
    given = values.get("ranks")
    ranks = [one for one in given if isinstance(one, int)] if isinstance(given, list) else []
    if not ranks:
        return {}
    import torch  # heavy, and known by the key's versions already

    on_cpu = values.get("device") == "cpu" or default_device() == "cpu"
    there = usable_cores() if on_cpu else torch.cuda.device_count()
    return {"ranks_there": min(there, max(ranks))}


def drawing_key(folder: Path) -> str:
    """sha256 over what decides the figures in a folder besides its results: the drawing code, and
    whether a caption has to say that the code behind the results has changed."""
    changed = has_changed(provenance.read_manifest(folder / provenance.MANIFEST))
    return digest([code_hash(roots=FIGURES), changed])


def is_fresh(folder: Path, key: str) -> bool:
    """Whether `folder` holds the whole results of a run with this key, which are read for that."""
    record = read_record(folder)
    if record is None or record.status != "ok" or record.key != key:
        return False
    try:
        found = read_results(folder)
    except (OSError, ValueError):  # not there, or cut off by a disk that was full
        return False
    # A notebook that was opened by hand may have written over them, with parameters of its own.
    return found.manifest.get("run_key", key) == key
