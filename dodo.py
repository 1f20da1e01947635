"""The tasks of `jagged reproduce` for doit's own command line.

doit list --all
doit run notebook:01_speed
doit preset=small data=build/data/ml_100k
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from doit import get_var

from jagged_ranking.reproduce import tasks
from jagged_ranking.reproduce.settings import make_settings

DATA = get_var("data", "")
SETTINGS = make_settings(
    preset=str(get_var("preset", "smoke")), data=Path(str(DATA)) if DATA else None
)
DOIT_CONFIG = tasks.doit_config()


def task_data() -> dict[str, Any]:
    """The data that the notebooks read."""
    return tasks.held(SETTINGS, tasks.data_task(SETTINGS))


def task_notebook() -> Iterator[dict[str, Any]]:
    """Run each notebook."""
    yield from (tasks.held(SETTINGS, task) for task in tasks.notebook_tasks(SETTINGS))


def task_report() -> dict[str, Any]:
    """Write the HTML report."""
    return tasks.held(SETTINGS, tasks.report_task(SETTINGS))
