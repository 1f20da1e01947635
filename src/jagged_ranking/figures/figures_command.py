"""`jagged figures`: its arguments, and what it calls."""

import argparse
from pathlib import Path

from jagged_ranking import paths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jagged figures`."""
    parser.add_argument(
        "folder", nargs="?", type=Path, metavar="DIR", help="where the results are (figures/)"
    )


def run(arguments: argparse.Namespace) -> int:
    """`jagged figures`: redraw from committed results, and say which files changed."""
    from jagged_ranking.figures.redraw import refresh

    changed = refresh(arguments.folder.resolve() if arguments.folder else paths.FIGURES)
    for path in changed:
        print(f"changed  {paths.shown(path)}")
    print(f"files changed: {len(changed)}" if changed else "nothing changed")
    return 0
