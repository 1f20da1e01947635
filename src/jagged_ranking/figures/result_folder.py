"""A folder of results as figures and tables read it: the table and its manifest."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from jagged_ranking import provenance, results
from jagged_ranking.code_roots import has_changed


@dataclass(frozen=True)
class Results:
    """What one run left behind.

    manifest: with a key "code_changed" besides: whether the code that the results depend on is
    another today, see `style.code_of`. table: in the form of `results`.
    """

    manifest: Mapping[str, Any]
    table: pd.DataFrame


def has_results(folder: Path) -> bool:
    """Whether there is a table with a manifest."""
    return all((folder / name).is_file() for name in (results.RESULTS, provenance.MANIFEST))


def read_results(folder: Path) -> Results:
    """The results in a folder.

    Raises:
        FileNotFoundError, ValueError: no results or manifest there, or not readable; one line.
    """
    manifest = provenance.read_manifest(folder / provenance.MANIFEST)
    manifest["code_changed"] = has_changed(manifest)
    return Results(manifest, results.read(folder / results.RESULTS))


def result_folders(figures_dir: Path | str) -> list[Path]:
    """The folders directly below `figures_dir` that hold results and a manifest, by name."""
    return sorted(filter(has_results, Path(figures_dir).glob("*")))


def runs_of(figures_dir: Path | str, name: str) -> list[Results]:
    """The results of a notebook: of the folder of its name, and of those behind it that say what
    else they were measured on (01_speed, 01_speed_h200)."""
    folders = [folder for folder in result_folders(figures_dir) if folder.name.startswith(name)]
    runs = [(folder, read_results(folder)) for folder in folders]
    return [run for folder, run in runs if folder.name == name or run.manifest["id"] == name]
