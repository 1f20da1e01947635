"""What a shell completes behind `jagged`, by argcomplete where that is installed.

A shell waits for every press of the tab key: what is looked up here reads names of files, and
imports nothing that computes.
"""

import argparse
import importlib
import os
from collections.abc import Callable, Iterable
from typing import Any


def is_asked() -> bool:
    """Whether this process is a shell's question."""
    return "_ARGCOMPLETE" in os.environ


def words_so_far() -> list[str]:
    """What stands behind `jagged` on the line that is completed."""
    line, point = os.environ.get("COMP_LINE", ""), os.environ.get("COMP_POINT", "")
    return (line[: int(point)] if point.isdigit() else line).split()[1:]


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and end the process; returns where argcomplete is not installed."""
    try:
        import argcomplete
    except ImportError:
        return
    subparsers = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    for name, subparser in subparsers.choices.items():
        for action in subparser._actions:
            if (find := COMPLETERS.get((name, action.dest))) is not None:
                action.completer = _Completer(find)  # type: ignore[attr-defined]
    argcomplete.autocomplete(parser, always_complete_options="long")


class _Completer:
    """Names that may follow; none where they cannot be found."""

    def __init__(self, find: Callable[[], Iterable[str]]) -> None:
        self._find = find

    def __call__(self, **_: Any) -> list[str]:
        try:
            return sorted(self._find())
        except (OSError, ValueError):
            return []


def _notebooks() -> Iterable[str]:
    from jagged_ranking import paths

    return (path.stem for path in paths.NOTEBOOKS.glob("*.ipynb"))


def _presets() -> Iterable[str]:
    from jagged_ranking import paths

    return (path.stem for path in (paths.NOTEBOOKS / "params").glob("*.yaml"))


def _datasets() -> Iterable[str]:
    """Prepared data sets: below this folder, where logs lie, and the synthetic ones."""
    from pathlib import Path

    from jagged_ranking import paths

    places = (Path(), Path("data"), paths.DATA, paths.BUILD / "data")
    found = (path.parent for place in places for path in place.glob("*/dataset.json"))
    return {paths.shown(folder.resolve()) for folder in found}


def _models() -> Iterable[str]:
    # By its name, as in `cli`: a module beside the rooms imports from none.
    return importlib.import_module("jagged_ranking.models.model_config").MODEL_NAMES


def _sources() -> Iterable[str]:
    from click_data import SOURCES

    return SOURCES


# (command, argument) -> names. Options with choices and files argcomplete knows by itself.
COMPLETERS: dict[tuple[str, str], Callable[[], Iterable[str]]] = {
    ("prepare", "source"): _sources,
    ("train", "model"): _models,
    ("run", "notebook"): _notebooks,
    ("reproduce", "only"): _notebooks,
    **{(command, "preset"): _presets for command in ("run", "reproduce")},
    **{(command, "data"): _datasets for command in ("run", "reproduce", "train", "evaluate")},
}
