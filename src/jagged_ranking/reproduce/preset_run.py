"""`jagged reproduce`: every notebook at one preset, then the report."""

import os
import sys
from collections.abc import Iterator
from typing import Any

from doit.cmd_base import ModuleTaskLoader
from doit.doit_cmd import DoitMain
from doit.reporter import ZeroReporter

from jagged_ranking import paths
from jagged_ranking.reproduce import tasks
from jagged_ranking.reproduce.freshness import COMMAND_VARIABLE
from jagged_ranking.reproduce.run_record import read_record
from jagged_ranking.reproduce.settings import Settings


class _Reporter(ZeroReporter):
    """A line a task; what fails is kept for the summary."""

    failed_tasks: dict[str, str]  # name -> why; set by `reproduce`

    def execute_task(self, task: Any) -> None:
        """Before a task runs."""
        if task.actions:
            print(f"running  {task.title()}", flush=True)

    def skip_uptodate(self, task: Any) -> None:
        """Instead of a task whose results are fresh."""
        print(f"fresh    {task.title()}", flush=True)

    def add_failure(self, task: Any, fail_info: Any) -> None:
        """After a task that failed: what its last line says."""
        if task.has_subtask:  # it fails with one of them, which is named itself
            return
        lines = [line.strip() for line in fail_info.get_msg().splitlines() if line.strip()]
        self.failed_tasks[task.name] = lines[-1] if lines else fail_info.get_name()


def plan_facts(settings: Settings) -> dict[str, Any]:
    """What `reproduce` would do, as `--dry-run --json` prints it; none of it is done."""
    there = settings.data.is_there()
    return {
        "preset": settings.preset,
        "data": {"folder": str(settings.data.folder), "there": there},
        # Without its data nothing is known of a notebook but that it has to run.
        "notebooks": {
            notebook: "fresh" if there and tasks.is_notebook_fresh(settings, notebook) else "run"
            for notebook in settings.only
        },
        "figures": str(settings.out),
        "report": str(settings.report),
    }


def plan_lines(settings: Settings, facts: dict[str, Any]) -> Iterator[str]:
    """The same for people."""
    state = "there" if facts["data"]["there"] else "make"
    yield f"{state:<7} data: {settings.data.title}"
    for notebook, state in facts["notebooks"].items():
        yield f"{state:<7} {notebook}"
    yield f"figures: {paths.shown(settings.out)}"


def reproduce(settings: Settings, *, parallel: int, command: str) -> int:
    """Run what is not fresh, write the report, say where things are; the exit status.

    Args:
        settings: what to run.
        parallel: how many notebooks at a time. Timings taken side by side disturb each other.
        command: what the user typed, for the manifests.

    Raises:
        BusyError: another one is at work in the same folder.
    """
    with tasks.alone(settings):
        return _reproduce(settings, parallel, command)


def _reproduce(settings: Settings, parallel: int, command: str) -> int:
    os.environ[COMMAND_VARIABLE] = command  # the notebooks' processes inherit it
    paths.settle_build(settings.out)
    failed: dict[str, str] = {}
    reporter = type("Reporter", (_Reporter,), {"failed_tasks": failed})
    loader = ModuleTaskLoader(
        {
            "task_data": lambda: tasks.data_task(settings),
            "task_notebook": lambda: tasks.notebook_tasks(settings),
            "DOIT_CONFIG": {**tasks.doit_config(), "reporter": reporter},
        }
    )
    # No configuration files: a `doit.cfg` in the working directory is not ours.
    doit = DoitMain(loader, config_filenames=())
    try:
        status = doit.run(["run", "-n", str(parallel if parallel > 1 else 0), "data", "notebook"])
    finally:
        tasks.end_running()
    # First, for the report may fail, too: as on a disk that is full.
    for name, message in failed.items():
        print(_failure_line(settings, name, message), file=sys.stderr, flush=True)
    tasks.report(settings)
    good = sum(f"notebook:{notebook}" not in failed for notebook in settings.only)
    print(f"{good} of {len(settings.only)} notebooks are good")
    print(f"figures: {paths.shown(settings.out)}")
    print(f"report: {paths.shown(settings.report)}", flush=True)
    return 1 if failed or status else 0


def _failure_line(settings: Settings, task: str, message: str) -> str:
    kind, _, notebook = task.partition(":")
    if kind != "notebook":
        return f"FAILED {task}: {message}"
    folder = settings.out / notebook
    record = read_record(folder)
    if record is None or record.status == "ok":  # it did not come to run at all
        return f"FAILED {notebook}: did not run ({message})"
    executed = paths.shown(folder / f"{notebook}.ipynb")
    return f"FAILED {notebook}: {record.error} (executed notebook: {executed})"
