"""`jagged cache`: how much is kept of what was measured and trained, and to forget it."""

import argparse

from jagged_ranking import paths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jagged cache`."""
    parser.add_argument("--clear", action="store_true", help="delete what is kept")


def run(arguments: argparse.Namespace) -> int:
    """`jagged cache`: 0."""
    files = [path for path in paths.CACHE.glob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    said = f"{len(files)} results, {size / 1e6:.1f} MB in {paths.CACHE}"
    if arguments.clear:
        for path in files:
            path.unlink(missing_ok=True)
        print(f"deleted {said}")
    else:
        print(f"{said}; --clear deletes them")
    return 0
