"""`jagged run`: one notebook with checked parameters, and the record of how it went."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jagged_ranking import paths
from jagged_ranking.figures.result_folder import has_results
from jagged_ranking.first_line import described
from jagged_ranking.processes import alone_in, sweep
from jagged_ranking.provenance import utc
from jagged_ranking.reproduce.freshness import (
    COMMAND_VARIABLE,
    KEY_VARIABLE,
    drawing_key,
    run_key,
)
from jagged_ranking.reproduce.notebook_files import find_notebook
from jagged_ranking.reproduce.parameters import (
    check_values,
    parse_assignments,
    read_parameters,
    read_preset,
)
from jagged_ranking.reproduce.run_record import RunRecord, earlier_seconds
from jagged_ranking.reproduce.train_options import read_options

INTERACTIVE = "interactive"


@dataclass(frozen=True)
class Plan:
    """A notebook with everything that its run is decided by."""

    notebook: Path
    preset: str
    folder: Path  # of its results
    data: Path | None
    parameters: dict[str, Any]

    @property
    def id(self) -> str:
        """The notebook's id."""
        return self.notebook.stem

    @property
    def executed(self) -> Path:
        """Where the notebook is kept with its outputs."""
        return self.folder / self.notebook.name

    def key(self) -> str:
        """What the run depends on, see `run_key`."""
        return run_key(self.notebook, self.parameters, self.data)


def make_plan(
    name: str,
    *,
    preset: str | None = None,
    assignments: Iterable[str] = (),
    out: Path | None = None,
    data: Path | None = None,
) -> Plan:
    """Check everything about a run before any of it happens.

    The notebook's own defaults give way to the preset's values, and these to the assignments;
    `out`, `preset` and `data` reach the notebook as parameters like any other.

    Raises:
        RunError: no such notebook or preset, an unknown parameter or a value of a wrong type.
    """
    notebook = find_notebook(name)
    known = read_parameters(notebook)
    values: dict[str, Any] = {}
    if preset is not None:
        chosen = read_preset(preset, paths.NOTEBOOKS / "params").get(notebook.stem, {})
        values |= check_values(chosen, known, f"preset {preset}, {notebook.stem}")
    values |= parse_assignments(assignments, known, notebook.stem)
    values = {key: _from_here(key, value) for key, value in values.items()}
    label = preset or INTERACTIVE
    folder = (out or paths.RUNS / label).expanduser().resolve() / notebook.stem
    given = {
        "out": str(folder),
        "preset": label,
        "data": str(data.expanduser().resolve()) if data else None,
    }
    for key, value in given.items():
        # A value given with -p counts; a notebook may do without one of the three.
        if key in known and not values.get(key) and value is not None:
            values[key] = value
    values = read_options(check_values(values, known, notebook.stem), notebook)
    data_given = values.get("data")
    return Plan(
        notebook=notebook,
        preset=str(values.get("preset", label)),
        folder=Path(values["out"]) if values.get("out") else folder,
        data=Path(data_given) if data_given else None,
        parameters=values,
    )


def _from_here(name: str, value: Any) -> Any:
    """A parameter's value, paths as the user meant them: from where the user stood.

    The notebook runs in a folder of its own, which is deleted behind it. Of `histories` and
    `datasets`, which may be names too, those are paths that hold a separator.
    """
    match name, value:
        case (("out" | "data"), str()) if value:
            return str(Path(value).expanduser().resolve())
        case (("histories" | "datasets"), list()):
            return [_from_here("data", entry) if os.sep in entry else entry for entry in value]
    return value


def variables_from_here() -> dict[str, str]:
    """The variables that name folders, absolute for the same reason."""
    found = {
        paths.DATA_VARIABLE: str(paths.DATA),
        paths.BUILD_VARIABLE: str(paths.BUILD),
        paths.WORK_VARIABLE: str(paths.WORK),
    }
    if home := os.environ.get(paths.HOME_VARIABLE):
        found[paths.HOME_VARIABLE] = str(Path(home).expanduser().resolve())
    if places := os.environ.get("PYTHONPATH"):
        found["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, places.split(os.pathsep)))
    return found


def run_plan(plan: Plan, *, command: str, progress: bool = True) -> RunRecord:
    """Run the notebook of a plan and write its record, whether it succeeds or not.

    Raises:
        BusyError: another run is at work in the plan's folder.
    """
    key = plan.key()  # reads the data, which may not be there, before a folder is made
    plan.folder.mkdir(parents=True, exist_ok=True)
    with alone_in(plan.folder), paths.naming(plan.folder):
        return _run(plan, key, command, progress)


def _run(plan: Plan, key: str, command: str, progress: bool) -> RunRecord:
    from jagged_ranking.reproduce.notebook import execute  # papermill: only where one runs

    record = RunRecord(
        id=plan.id,
        status="failed",
        key=key,
        parameters=plan.parameters,
        command=command,
        started=utc(),
        error="interrupted",
        earlier_seconds=earlier_seconds(plan.folder, key),
    )
    paths.settle_build(plan.folder)
    sweep(plan.folder)
    record.write(plan.folder)  # an interrupted run is never taken for a fresh one
    began = time.monotonic()
    try:
        error = execute(
            plan.notebook,
            executed=plan.executed,
            parameters=plan.parameters,
            environment={
                COMMAND_VARIABLE: os.environ.get(COMMAND_VARIABLE, command),
                KEY_VARIABLE: record.key,
                **variables_from_here(),
            },
            progress=progress,
        )
    except BaseException as error:
        # The command says why it ends; the report, and who reads the record, have this alone.
        why = described(error) if isinstance(error, Exception) else record.error
        replace(record, error=why, seconds=_since(began)).write(plan.folder)
        raise
    record = replace(
        record,
        status="failed" if error else "ok",
        error=error,
        seconds=_since(began),
        drawing=drawing_key(plan.folder) if has_results(plan.folder) else "",
    )
    record.write(plan.folder)
    return record


def _since(began: float) -> float:
    return round(time.monotonic() - began, 1)
