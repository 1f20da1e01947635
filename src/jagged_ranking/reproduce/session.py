"""What a notebook says at its beginning and its end: where it writes, and what it ran on."""

import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from IPython.display import Image, display
from tqdm import TqdmWarning

from jagged_ranking import paths, provenance, results
from jagged_ranking.devices import default_device
from jagged_ranking.figures import style
from jagged_ranking.processes import gpus_alone
from jagged_ranking.reproduce.cache import kept_tables
from jagged_ranking.reproduce.click_logs import histories_digests, prepared_digests
from jagged_ranking.reproduce.errors import RunError
from jagged_ranking.reproduce.freshness import COMMAND_VARIABLE, KEY_VARIABLE
from jagged_ranking.reproduce.parameters import check_values, parameters_in
from jagged_ranking.reproduce.run_record import read_record
from jagged_ranking.reproduce.train_options import read_options

# `datasets` takes the bars of tqdm.auto, which chooses when it is first imported. Plain ones are
# what is wanted, since widgets are not kept with a notebook: no word that there are none.
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="IProgress not found", category=TqdmWarning)
    import tqdm.auto  # noqa: F401


SMOKE = "smoke"  # the preset that times nothing that counts
_held = ExitStack()
# Markdown's, which pandas shows as it is.
_EMPHASIS = re.compile(r"\*{1,2}(?=\S)([^*]+)(?<=\S)\*{1,2}")


@dataclass
class Session:
    """One run of a notebook.

    Attributes:
        id: the notebook's id, e.g. "01_speed".
        preset: the preset it runs at; "interactive" when opened by hand.
        folder: where its results, manifest and figures go.
        device: "cuda" or "cpu".
    """

    id: str
    preset: str
    folder: Path
    device: str
    parameters: dict[str, Any]
    seed: int | None
    data_digests: dict[str, str]
    begun: provenance.Beginning

    def save(self, table: pd.DataFrame) -> dict[str, Any]:
        """Write results.parquet and manifest.json into the folder, where figures of earlier results
        are deleted; returns the manifest."""
        manifest = provenance.manifest(
            preset=self.preset,
            parameters=self.parameters,
            begun=self.begun,
            seed=self.seed,
            data_digests=self.data_digests,
            command=os.environ.get(COMMAND_VARIABLE, f"{self.id}.ipynb, run by hand"),
            run_key=os.environ.get(KEY_VARIABLE, ""),
        )
        # Time and clocks are of this process; what an earlier one measured says so.
        manifest["kept"] = kept_tables()
        record = read_record(self.folder)  # where a command has begun this very run
        begun = record is not None and record.key == manifest["run_key"]
        manifest["earlier_seconds"] = record.earlier_seconds if record and begun else 0.0
        # Both are on the disk before one takes its place: a table beside the manifest of another
        # run would be drawn as that one's.
        place = self.folder / provenance.MANIFEST
        with paths.naming(self.folder), results.atomic(place) as temporary:
            provenance.write_manifest(manifest, temporary)
            results.write(table, self.folder / results.RESULTS)
            style.forget(self.folder, self.id)
        return manifest


def begin(
    run_id: str,
    *,
    out: str | None,
    preset: str,
    data: str | None = None,
    datasets: Sequence[str] = (),
    histories: Sequence[str] = (),
    seed: int | Sequence[int] | None = None,
    device: str = "auto",
    parameters: Mapping[str, Any],
) -> Session:
    """Begin a run: choose folder and device, note the time and the clocks.

    Args:
        run_id: the notebook's id.
        out: the folder for its results; None is PRESET/ID in `paths.RUNS`.
        preset: the name of the preset.
        data: the folder of the prepared dataset that the notebook reads, if any.
        datasets: further ones, see `find_prepared`.
        histories: data sets of which it reads the history lengths, see `find_histories`.
        seed: the seed of everything random in it; of several, the first.
        device: "cpu", "cuda" or "auto" (CUDA where there is one).
        parameters: the other parameters of the notebook, for the manifest.

    Raises:
        RunError: a parameter is not of its type, no seed or one twice, a device that is not there,
            or no such data; one line.
        OSError: the folder cannot be written to.
    """
    _check(run_id, {"datasets": datasets, "histories": histories, **parameters})
    if isinstance(seed, Sequence):
        if not seed:
            raise RunError(f"{run_id}: parameter `seeds` is empty; give one at least")
        if twice := sorted({one for one in seed if list(seed).count(one) > 1}):
            # the same training would count as two, and intervals be too narrow
            raise RunError(f"{run_id}: parameter `seeds` has {twice[0]} more than once")
        seed = seed[0]
    device = _device(device)
    # Errors come first.
    digests = {**histories_digests(histories), **prepared_digests(datasets, data)}
    # A preset's are also of data sets that may not be there, so that it is no error.
    known = {*digests, *(Path(name).name for name in datasets)}
    if idle := [name for name in parameters.get("own") or {} if name not in known]:
        print(f"`own` of {', '.join(idle)} is not used: no data set of this run is called so")
    if device == "cuda" and preset != SMOKE:
        # until the process ends
        _held.enter_context(gpus_alone([0]))
    folder = Path(out) if out else paths.RUNS / preset / run_id
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):  # not first after hours of work
        pass
    paths.settle_build(folder)
    pd.set_option("display.max_colwidth", None)  # a claim, or an error, is longer than pandas' 50
    return Session(
        id=run_id,
        preset=preset,
        folder=folder,
        device=device,
        parameters=dict(parameters),
        seed=seed,
        data_digests=digests,
        begun=provenance.begin(run_id, device),
    )


def _check(run_id: str, values: Mapping[str, Any]) -> None:
    """RunError where a value is not of the type that the notebook says: papermill passes a list
    that it is given by `-p` as text, which has letters where a list has names."""
    notebook = paths.NOTEBOOKS / f"{run_id}.ipynb"
    if not notebook.is_file():
        return
    # as JSON: nbformat takes a second
    known = parameters_in(json.loads(notebook.read_text(encoding="utf-8"))["cells"], notebook)
    given = {name: value for name, value in values.items() if name in known}
    try:
        read_options(check_values(given, known, run_id), notebook)
    except RunError as error:
        hint = "; papermill reads a list as -y '{NAME: [a, b]}'" if "list[" in str(error) else ""
        raise RunError(f"{error}{hint}") from None


def _device(name: str) -> str:
    """ "cuda" or "cpu"; RunError for another name, or without a GPU that works."""
    if name not in ("auto", "cpu", "cuda"):
        raise RunError(f"device {name!r}: must be auto, cpu or cuda")
    found = default_device()
    if name == "cuda" and found != "cuda":
        raise RunError("device 'cuda': PyTorch finds no GPU here; `jagged doctor` says more")
    return found if name == "auto" else name


def show_tables(tables: Iterable[tuple[str, pd.DataFrame]]) -> None:
    """Show tables in the notebook, each below what it is."""
    for said, table in tables:
        print(_EMPHASIS.sub(r"\1", said))
        display(table.replace(_EMPHASIS, r"\1", regex=True))


def show(figures: Iterable[Path]) -> None:
    """Show the figures in the notebook (the PNG of each)."""
    for path in figures:
        if path.suffix == ".png":
            display(Image(filename=str(path), retina=True))
