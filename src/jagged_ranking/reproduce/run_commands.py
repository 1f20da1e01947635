"""`jagged run` and `jagged reproduce`: their arguments, and what they call."""

import argparse
import shlex
import sys
from pathlib import Path

from jagged_ranking import paths
from jagged_ranking.facts import add_json, say
from jagged_ranking.processes import end_with_parent
from jagged_ranking.reproduce.errors import RunError

FOR_A_GPU = "paper"  # the preset
PLAN_KEYS = {
    "preset": "its name",
    "data": "folder, and whether it is there already",
    "notebooks": "id -> fresh or run",
    "figures": "the folder that results go to, one a notebook",
    "report": "the HTML file",
}


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jagged run`."""
    parser.add_argument("notebook", metavar="NOTEBOOK", help="01_speed, 01, or a path")
    parser.add_argument(
        *("-p", "--parameter"),
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a parameter (repeatable; VALUE as in YAML, lists as 1,2,3)",
    )
    parser.add_argument("--preset", help="parameters to begin from: smoke, small or paper")
    parser.add_argument("--data", type=Path, metavar="DIR", help="a prepared dataset")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="results go to DIR/NOTEBOOK (figures/runs/PRESET)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument(
        "--parameters",
        action="store_true",
        help="list the notebook's parameters, with the values of a preset or of -p, and stop",
    )


def run(arguments: argparse.Namespace) -> int:
    """`jagged run`: 0, or 1 when the notebook failed."""
    from jagged_ranking.reproduce.next_items import check_next_items
    from jagged_ranking.reproduce.parameters import read_parameters
    from jagged_ranking.reproduce.plan import make_plan, run_plan

    end_with_parent()
    plan = make_plan(
        arguments.notebook,
        preset=arguments.preset,
        assignments=arguments.parameter,
        out=arguments.out,
        data=arguments.data,
    )
    if arguments.parameters:
        # Without a preset or values of the user's own, the notebook's: what JupyterLab shows.
        given = plan.parameters if arguments.preset or arguments.parameter else {}
        for parameter in read_parameters(plan.notebook).values():
            value = given.get(parameter.name, parameter.default)
            print(f"{parameter.name}: {parameter.type} = {value!r}")
            if parameter.description:
                print(f"    {parameter.description}")
        return 0
    check_next_items(plan)
    if plan.parameters.get("device") != "cpu":
        _warn_without_a_gpu(arguments.preset)
    record = run_plan(plan, command=_command(), progress=not arguments.quiet)
    if record.error:
        print(f"{plan.id} failed: {record.error}", file=sys.stderr)
        print(f"the notebook with its outputs: {paths.shown(plan.executed)}", file=sys.stderr)
        return 1
    print(f"{plan.id}: {record.took}, results in {paths.shown(plan.folder)}", flush=True)
    return 0


def add_reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jagged reproduce`."""
    parser.add_argument(
        "--preset", default="smoke", help="smoke (minutes on a CPU), small or paper (a GPU)"
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="a prepared dataset (default: a synthetic log)"
    )
    parser.add_argument(
        *("-n", "--parallel"),
        type=int,
        default=1,
        metavar="N",
        help="notebooks at a time (timings taken side by side disturb each other)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="results go to DIR/NOTEBOOK (figures/runs/PRESET)"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NOTEBOOK", help="only these notebooks, e.g. --only 01 04"
    )
    parser.add_argument("--force", action="store_true", help="run also what is fresh")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and stop")
    add_json(parser, PLAN_KEYS, when="; with --dry-run")


def reproduce(arguments: argparse.Namespace) -> int:
    """`jagged reproduce`: 0, or 1 when a notebook failed."""
    from jagged_ranking.reproduce.preset_run import plan_facts, plan_lines, reproduce
    from jagged_ranking.reproduce.settings import make_settings

    if arguments.parallel < 1:
        raise RunError(f"-n {arguments.parallel}: at least one notebook at a time")
    if arguments.json and not arguments.dry_run:
        raise RunError("--json: only with --dry-run")
    settings = make_settings(
        preset=arguments.preset,
        data=arguments.data,
        out=arguments.out,
        only=arguments.only,
        progress=arguments.parallel == 1,
        force=arguments.force,
    )
    if arguments.dry_run:
        facts = plan_facts(settings)
        say(arguments, facts, plan_lines(settings, facts))
        return 0
    _warn_without_a_gpu(arguments.preset)
    return reproduce(settings, parallel=arguments.parallel, command=_command())


def _warn_without_a_gpu(preset: str | None) -> None:
    """A line where batches for a data-centre GPU are about to run for days: of a GPU that PyTorch
    does not find, a driver's fault, say, nothing else would tell."""
    from jagged_ranking.devices import default_device

    if preset == FOR_A_GPU and default_device() != "cuda":
        print(
            f"preset {preset} is sized for a data-centre GPU, and PyTorch finds none here: "
            "it runs on the CPU (`jagged doctor` says more)",
            file=sys.stderr,
            flush=True,
        )


def _command() -> str:
    """What the user typed, for manifests: absolute paths by their last part, which says what was
    meant on any machine."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return shlex.join(["jagged", *words])
