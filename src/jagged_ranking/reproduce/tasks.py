"""The tasks of `jagged reproduce`, for doit: prepare the data, run each notebook, write the report.

`dodo.py` shows them to doit's own command line (`doit list`, `doit run notebook:01_speed`).
Freshness is not left to doit's database: a notebook is fresh when the record beside its results
says that a run with the same key succeeded, so results that somebody moved, deleted or made with
`jagged run` are judged rightly.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from doit.exceptions import TaskFailed

from jagged_ranking import paths
from jagged_ranking.processes import PARENT_VARIABLE, BusyError, alone_in, among_others, sweep
from jagged_ranking.reproduce.freshness import is_fresh
from jagged_ranking.reproduce.run_record import read_record
from jagged_ranking.reproduce.settings import Settings

END_SECONDS = 30.0  # a kernel that is busy takes some
_running: set[subprocess.Popen[bytes]] = set()  # a notebook each
_held: set[Path] = set()  # by `_hold`
_holding = threading.Lock()
_to_the_end = ExitStack()  # a lock goes with its process


@contextmanager
def alone(settings: Settings) -> Iterator[None]:
    """Hold the folder of results for the time of the block.

    Raises:
        BusyError: another one is at work there.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    with alone_in(settings.out), paths.naming(settings.out):
        yield


def held(settings: Settings, task: dict[str, Any]) -> dict[str, Any]:
    """A task of a process that does not hold the folder of results by itself, as doit's own: the
    first that runs takes it, until the end of the process."""
    if not task["actions"]:
        return task
    return {**task, "actions": [(_hold, [settings]), *task["actions"]]}


def _hold(settings: Settings) -> TaskFailed | None:
    with _holding:  # doit may run tasks in threads
        if settings.out in _held:
            return None
        try:
            _to_the_end.enter_context(alone(settings))
        except BusyError as error:
            return TaskFailed(str(error))
        _held.add(settings.out)
    return None


def data_task(settings: Settings) -> dict[str, Any]:
    """Make the data that the notebooks read, where it is not there."""
    data = settings.data
    return {
        "doc": "the data that the notebooks read",
        "title": lambda task: f"data: {data.title}",
        "io": {"capture": False},
        "actions": [data.make],
        "uptodate": [data.is_there],
    }


def notebook_tasks(settings: Settings) -> Iterator[dict[str, Any]]:
    """One task a notebook: `jagged run` in a process of its own, skipped when fresh.

    A process each, so that an interrupt reaches every running notebook and a crash only its own.
    """
    for notebook in settings.only:
        yield {
            "name": notebook,
            "doc": f"run {notebook} at preset {settings.preset}",
            "actions": [(_run, [_command(settings, notebook)])],
            "task_dep": ["data"],
            # Asked when doit comes to the task: by then the data is there.
            "uptodate": [partial(is_notebook_fresh, settings, notebook)],
            "title": lambda task: task.name.partition(":")[2],
            "io": {"capture": False},
        }


def _command(settings: Settings, notebook: str) -> list[str]:
    return [
        *(sys.executable, "-m", "jagged_ranking.cli", "run", notebook),
        *("--preset", settings.preset),
        *("--data", str(settings.data.folder)),
        *("--out", str(settings.out)),
        *([] if settings.progress else ["--quiet"]),
    ]


def _run(command: list[str]) -> TaskFailed | None:
    # doit would leave the process to itself when this one is interrupted.
    process = subprocess.Popen(command, env={**os.environ, PARENT_VARIABLE: str(os.getpid())})
    _running.add(process)
    status = process.wait()
    _running.discard(process)
    return TaskFailed(f"`{' '.join(command)}` returned {status}") if status else None


def end_running() -> None:
    """End the notebooks that run, in an orderly way, and wait for that."""
    for process in [*_running]:
        process.terminate()
    while _running:
        process = _running.pop()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


def is_notebook_fresh(settings: Settings, notebook: str) -> bool:
    """Whether a notebook need not run, and is not asked to all the same."""
    if settings.force:
        return False
    chosen = settings.plan(notebook)
    # The key needs torch: only where there is something to compare it with.
    return read_record(chosen.folder) is not None and is_fresh(chosen.folder, chosen.key())


def report(settings: Settings) -> None:
    """Write the report, in a folder of results that this process holds."""
    from jagged_ranking.reproduce.report import write_report  # matplotlib: not to look at a plan

    folder = settings.report.parent
    if folder == settings.out:
        sweep(folder, settings.report.name)
        write_report(settings)
    else:
        with among_others(folder, settings.report.name):
            write_report(settings)


def report_task(settings: Settings) -> dict[str, Any]:
    """The HTML report of what there is, also after a failure."""
    return {
        "doc": "the HTML report",
        "actions": [(report, [settings])],
        "uptodate": [False],
        "title": lambda task: f"report: {paths.shown(settings.report)}",
        "io": {"capture": False},
    }


def doit_config() -> dict[str, Any]:
    """doit's own options: its database lies in build/, nothing is printed twice."""
    paths.BUILD.mkdir(parents=True, exist_ok=True)
    database = paths.BUILD / "doit.json"
    # doit writes over the file: of one that was cut off it would say at every start that it cannot
    # be read. Nothing in it is needed.
    with suppress(FileNotFoundError):
        try:
            json.loads(database.read_text(encoding="utf-8"))
        except ValueError:
            database.unlink()
    return {
        "backend": "json",
        "dep_file": str(database),
        "continue": True,
        "par_type": "thread",
        "default_tasks": ["data", "notebook", "report"],
    }
