# PYTHON_ARGCOMPLETE_OK
"""The `jagged` command.

Only the module of the command that was asked for is imported, so that `jagged --help` is quick.
What a user did wrong is one line on stderr and exit status 1. Ctrl-C is exit status 130, and
SIGTERM, which ends a command in the same orderly way, 143.
"""

import argparse
import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from jagged_ranking import completion, verbosity


class Command(NamedTuple):
    """A subcommand, its functions as "module:function" so that nothing is imported early."""

    help: str
    add: str  # gives a parser its arguments
    run: str  # takes the parsed arguments, returns the exit status (None is 0)


COMMANDS = {
    "prepare": Command(
        "turn a click log into the form that everything here reads",
        add="click_data.cli:add_arguments",
        run="click_data.cli:run",
    ),
    "datasets": Command(
        "list the sources and public data sets, and where each comes from",
        add="jagged_ranking.cli:add_datasets_arguments",
        run="jagged_ranking.cli:print_datasets",
    ),
    "lengths": Command(
        "keep only how long the histories of a log are, to measure elsewhere",
        add="click_data.lengths:add_arguments",
        run="click_data.lengths:run",
    ),
    "train": Command(
        "train one ranking model",
        add="jagged_ranking.training.train_commands:add_train_arguments",
        run="jagged_ranking.training.train_commands:run_train",
    ),
    "evaluate": Command(
        "evaluate a trained model",
        add="jagged_ranking.training.train_commands:add_evaluate_arguments",
        run="jagged_ranking.training.train_commands:run_evaluate",
    ),
    "run": Command(
        "run one notebook with parameters",
        add="jagged_ranking.reproduce.run_commands:add_run_arguments",
        run="jagged_ranking.reproduce.run_commands:run",
    ),
    "reproduce": Command(
        "run every notebook and write the report",
        add="jagged_ranking.reproduce.run_commands:add_reproduce_arguments",
        run="jagged_ranking.reproduce.run_commands:reproduce",
    ),
    "submit": Command(
        "run train or reproduce as a job of SLURM",
        add="jagged_ranking.reproduce.submit_command:add_arguments",
        run="jagged_ranking.reproduce.submit_command:run",
    ),
    "figures": Command(
        "redraw the figures from committed results (no GPU, no network)",
        add="jagged_ranking.figures.figures_command:add_arguments",
        run="jagged_ranking.figures.figures_command:run",
    ),
    "lab": Command(
        "open the notebooks in JupyterLab",
        add="jagged_ranking.reproduce.lab_command:add_arguments",
        run="jagged_ranking.reproduce.lab_command:run",
    ),
    "doctor": Command(
        "say what is on this machine, whether the kernels work, and what will be left out",
        add="jagged_ranking.reproduce.doctor:add_arguments",
        run="jagged_ranking.reproduce.doctor:run",
    ),
    "cache": Command(
        "say how much is kept of what was measured and trained, or delete it",
        add="jagged_ranking.reproduce.cache_command:add_arguments",
        run="jagged_ranking.reproduce.cache_command:run",
    ),
}


DATASETS_KEYS = {
    "sources": "of `jagged prepare`: name, summary, origin and licence of each",
    "public": "data sets of source movielens: name, size, licence and path of each (null: not "
    "there)",
    "folder": "where these are looked for (null: nowhere)",
}


def add_datasets_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jagged datasets`."""
    from jagged_ranking.facts import add_json

    add_json(parser, DATASETS_KEYS)


def print_datasets(arguments: argparse.Namespace) -> None:
    """`jagged datasets`."""
    from click_data import SOURCES, public
    from click_data.cli import list_datasets
    from jagged_ranking import paths
    from jagged_ranking.facts import say

    try:
        folder = paths.DATA
    except paths.NoCheckoutError:
        folder = None
    places = [(known, folder and public.find(known, folder)) for known in public.MOVIELENS]
    facts = {
        "sources": [
            {key: getattr(source, key) for key in ("name", "summary", "origin", "licence")}
            for source in SOURCES.values()
        ],
        "public": [
            {
                **{key: getattr(known, key) for key in ("name", "size", "licence")},
                "path": str(place) if place else None,
            }
            for known, place in places
        ],
        "folder": str(folder) if folder else None,
    }
    say(arguments, facts, [list_datasets(folder)])


class Terminated(KeyboardInterrupt):
    """SIGTERM, or SIGHUP of a terminal that was closed: the number is `signal`."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = number


@contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """What would end this process on the spot raises as Ctrl-C does, so that nothing is left
    behind: no kernel of a notebook, no half-written file."""

    def end(number: int, frame: Any) -> None:
        for other in before:
            signal.signal(other, signal.SIG_IGN)  # `timeout` tells a process and then its group
        raise Terminated(number)

    # Where one is ignored (nohup) or handled it stays so; only a main thread has handlers.
    main = threading.current_thread() is threading.main_thread()
    numbers = [signal.SIGTERM, signal.SIGHUP] if main else []
    before = [one for one in numbers if signal.getsignal(one) is signal.SIG_DFL]
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_DFL)


def build_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser, with the arguments of the one command that `arguments` name."""
    parser = argparse.ArgumentParser(
        prog="jagged",
        description="Jagged Flash Attention, reproduced: click logs in, figures out.",
        epilog="`jagged COMMAND --help` explains a command. Begin with `jagged reproduce`.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and stop")
    _add_verbose(parser, default=False)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.help, description=command.help)
        if name == chosen:
            _find(command.add)(subparser)
            # Before or behind the command; there it must not undo what was said before.
            _add_verbose(subparser, default=argparse.SUPPRESS)
    return parser


def _add_verbose(parser: argparse.ArgumentParser, *, default: Any) -> None:
    parser.add_argument(
        "--verbose",
        action="store_true",
        default=default,
        help="show tracebacks, and all that processes print which this one starts",
    )


class _Version(argparse.Action):
    """Looked up when asked for alone: to read a distribution's metadata takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        from jagged_ranking.paths import DISTRIBUTION

        print(f"jagged {version(DISTRIBUTION)}")
        parser.exit()


def _find(name: str) -> Callable[..., int | None]:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    if arguments is None and completion.is_asked():
        completion.complete(build_parser(completion.words_so_far()))
    arguments = sys.argv[1:] if arguments is None else arguments
    with verbosity.kept():
        return _main(arguments)


def _main(arguments: Sequence[str]) -> int:
    try:
        with _signals_as_interrupts():
            return _run(arguments)
    except Terminated as ended:
        return 128 + ended.signal
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `jagged datasets | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: Sequence[str]) -> int:
    try:
        parser = build_parser(arguments)
        parsed = parser.parse_args(arguments)
        if parsed.command is None:
            parser.print_help()
            return 0
        if parsed.verbose:
            verbosity.ask()
        # Not at the top: completion and help do without.
        from jagged_ranking.processes import launched

        if parsed.command != "train" and launched() > 1:
            if os.environ.get("RANK", "0") != "0":
                return 1  # one of them speaks
            raise ValueError(f"{parsed.command} is done by one process: start it without torchrun")
        return _find(COMMANDS[parsed.command].run)(parsed) or 0
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        # Every error that is meant for the user is a ValueError (DataError, RunError, ...).
        verbosity.print_traceback(error)
        # In one piece: torchrun leaves stderr unbuffered, and `print` ends its line by itself, so
        # that two ranks' lines became one.
        sys.stderr.write(f"jagged: {' '.join(str(error).split())}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
