"""What `jagged reproduce` was asked for, checked before anything runs."""

from dataclasses import dataclass, field
from pathlib import Path

from jagged_ranking import paths
from jagged_ranking.reproduce.errors import RunError
from jagged_ranking.reproduce.next_items import refusal
from jagged_ranking.reproduce.notebook_files import find_notebook, notebook_ids
from jagged_ranking.reproduce.parameters import read_preset
from jagged_ranking.reproduce.plan import Plan, make_plan
from jagged_ranking.reproduce.run_data import ENTRIES, RunData, find_run_data


@dataclass(frozen=True)
class Settings:
    """What `jagged reproduce` was asked for.

    Attributes:
        preset: the name of the preset.
        given: a prepared data set, or none.
        out: results go to out / notebook id.
        report: the HTML file.
        only: ids of the notebooks to run.
        progress: whether each notebook shows a bar.
        force: run also what is fresh.
    """

    preset: str
    given: Path | None
    out: Path
    report: Path
    only: tuple[str, ...] = field(default=())
    progress: bool = True
    force: bool = False

    @property
    def data(self) -> RunData:
        """What the notebooks read: found anew, as BUILD may be settled elsewhere meanwhile."""
        entries = read_preset(self.preset, paths.NOTEBOOKS / "params")
        return find_run_data(self.preset, entries, self.given)

    def plan(self, notebook: str) -> Plan:
        """The run of one notebook."""
        return make_plan(notebook, preset=self.preset, out=self.out, data=self.data.folder)


def make_settings(
    *,
    preset: str = "smoke",
    data: Path | None = None,
    out: Path | None = None,
    only: list[str] | None = None,
    progress: bool = True,
    force: bool = False,
) -> Settings:
    """Check the request before anything runs; RunError says in a line what does not fit.

    Without `data` there is a synthetic log of the preset's size. A preset may take a sample of the
    users of larger data.
    """
    out = (out or paths.RUNS / preset).expanduser().resolve()
    inside = out.is_relative_to(paths.FIGURES)
    chosen = [find_notebook(name).stem for name in only] if only else notebook_ids(paths.NOTEBOOKS)
    settings = Settings(
        preset=preset,
        given=data and data.expanduser().resolve(),
        out=out,
        report=(paths.FIGURES if inside else out) / "report.html",
        only=tuple(dict.fromkeys(chosen)),
        progress=progress,
        force=force,
    )
    for entry in read_preset(preset, paths.NOTEBOOKS / "params"):
        if entry not in ENTRIES and entry not in notebook_ids(paths.NOTEBOOKS):
            raise RunError(f"preset {preset} sets parameters of `{entry}`, which is no notebook")
    _check_data([settings.plan(notebook) for notebook in settings.only], settings)
    return settings


def _check_data(plans: list[Plan], settings: Settings) -> None:
    """RunError where notebooks cannot train on the data given: one line for all of them."""
    refused = {plan.id: why for plan in plans if (why := refusal(plan, settings.given))}
    if refused:
        why = next(iter(refused.values()))
        raise RunError(f"{', '.join(refused)}: {why}; --only names other notebooks")
