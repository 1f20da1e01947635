"""The tasks of `jagged reproduce`, for doit: prepare the data, run each notebook, write the report.

`dodo.py` shows them to doit's own command line (`doit list`, `doit run notebook:01_speed`).
Freshness is not left to doit's database: a notebook is fresh when the record beside its results
says that a run with the same key succeeded, so results that somebody moved, deleted or made with
`jagged run` are judged rightly.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jagged_ranking import paths
from jagged_ranking.runs.errors import RunError
from jagged_ranking.runs.freshness import data_digest, is_fresh
from jagged_ranking.runs.notebook import find_notebook, notebook_ids
from jagged_ranking.runs.parameters import read_preset
from jagged_ranking.runs.single import Plan, make_plan
from jagged_ranking.runs.synthetic import SOURCE, is_made, synthetic_folder, synthetic_log


@dataclass(frozen=True)
class Settings:
    """What `jagged reproduce` was asked for.

    Attributes:
        preset: the name of the preset.
        data: a prepared dataset; None makes a synthetic log of the preset's size.
        out: results go to out / notebook id.
        report: the HTML file.
        only: ids of the notebooks to run.
        progress: whether each notebook shows a bar.
    """

    preset: str
    data: Path | None
    out: Path
    report: Path
    only: tuple[str, ...] = field(default=())
    progress: bool = True

    @property
    def data_folder(self) -> Path:
        """The dataset that the notebooks read."""
        return self.data or synthetic_folder(f"{SOURCE}-{self.preset}")


def make_settings(
    *,
    preset: str = "smoke",
    data: Path | None = None,
    out: Path | None = None,
    only: list[str] | None = None,
    progress: bool = True,
) -> Settings:
    """Check the request before anything runs; RunError says in a line what does not fit."""
    if data is not None:
        data = data.expanduser().resolve()
        data_digest(data)
    out = (out or paths.RUNS / preset).expanduser().resolve()
    inside = out.is_relative_to(paths.FIGURES)
    chosen = [find_notebook(name).stem for name in only] if only else notebook_ids(paths.NOTEBOOKS)
    settings = Settings(
        preset=preset,
        data=data,
        out=out,
        report=(paths.FIGURES if inside else out) / "report.html",
        only=tuple(dict.fromkeys(chosen)),
        progress=progress,
    )
    for entry in read_preset(preset, paths.NOTEBOOKS / "params"):
        if entry != SOURCE and entry not in notebook_ids(paths.NOTEBOOKS):
            raise RunError(f"preset {preset} sets parameters of `{entry}`, which is no notebook")
    for notebook in settings.only:
        plan(settings, notebook)
    return settings


def plan(settings: Settings, notebook: str) -> Plan:
    """The run of one notebook."""
    return make_plan(notebook, preset=settings.preset, out=settings.out, data=settings.data_folder)


def data_task(settings: Settings) -> dict[str, Any]:
    """Make the synthetic log where no data was given."""
    task: dict[str, Any] = {
        "doc": "the data that the notebooks read",
        "title": lambda task: f"data: {paths.shown(settings.data_folder)}",
        "io": {"capture": False},
    }
    if settings.data is not None:
        return {**task, "actions": None}
    options = read_preset(settings.preset, paths.NOTEBOOKS / "params").get(SOURCE, {})
    name = settings.data_folder.name
    return {
        **task,
        "actions": [(_make_synthetic, [options, name])],
        "uptodate": [lambda: is_made(options, name=name)],
    }


def _make_synthetic(options: dict[str, Any], name: str) -> None:
    synthetic_log(options, name=name)  # doit takes a returned text for a result to keep


def notebook_tasks(settings: Settings) -> Iterator[dict[str, Any]]:
    """One task a notebook: `jagged run` in a process of its own, skipped when fresh.

    A process each, so that an interrupt reaches every running notebook and a crash only its own.
    """
    for notebook in settings.only:
        yield {
            "name": notebook,
            "doc": f"run {notebook} at preset {settings.preset}",
            "actions": [_command(settings, notebook)],
            "task_dep": ["data"],
            "uptodate": [_freshness(settings, notebook)],
            "title": lambda task: task.name.partition(":")[2],
            "io": {"capture": False},
        }


def _command(settings: Settings, notebook: str) -> list[str]:
    return [
        *(sys.executable, "-m", "jagged_ranking.cli", "run", notebook),
        *("--preset", settings.preset),
        *("--data", str(settings.data_folder)),
        *("--out", str(settings.out)),
        *([] if settings.progress else ["--quiet"]),
    ]


def _freshness(settings: Settings, notebook: str) -> Callable[[], bool]:
    # Asked when doit comes to the task: by then the data is there.
    def fresh() -> bool:
        chosen = plan(settings, notebook)
        return is_fresh(chosen.folder, chosen.key())

    return fresh


def report_task(settings: Settings) -> dict[str, Any]:
    """The HTML report of what there is, also after a failure."""
    return {
        "doc": "the HTML report",
        "actions": [(_write_report, [settings])],
        "uptodate": [False],
        "title": lambda task: f"report: {paths.shown(settings.report)}",
        "io": {"capture": False},
    }


def _write_report(settings: Settings) -> None:
    from jagged_ranking.runs.report import write_report  # pandas and the drawing code

    write_report(settings)


def doit_config() -> dict[str, Any]:
    """doit's own options: its database lies in build/, nothing is printed twice."""
    paths.BUILD.mkdir(exist_ok=True)
    return {
        "backend": "json",
        "dep_file": str(paths.BUILD / "doit.json"),
        "continue": True,
        "par_type": "thread",
        "default_tasks": ["data", "notebook", "report"],
    }
