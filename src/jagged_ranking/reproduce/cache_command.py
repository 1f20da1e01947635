"""`jagged cache`: how much is kept of what was measured and trained, and to forget it."""

import argparse

from jagged_ranking import paths
from jagged_ranking.facts import add_json, say

KEYS = {
    "folder": "where results are kept",
    "files": "how many",
    "bytes": "of all together",
    "deleted": "whether --clear has deleted them",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jagged cache`."""
    parser.add_argument("--clear", action="store_true", help="delete what is kept")
    add_json(parser, KEYS)


def run(arguments: argparse.Namespace) -> int:
    """`jagged cache`: 0."""
    files = [path for path in paths.CACHE.glob("*") if path.is_file()]
    facts = {
        "folder": str(paths.CACHE),
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "deleted": arguments.clear,
    }
    if arguments.clear:
        for path in files:
            path.unlink(missing_ok=True)
    counted = f"{facts['files']} results, {facts['bytes'] / 1e6:.1f} MB in {facts['folder']}"
    said = f"deleted {counted}" if arguments.clear else f"{counted}; --clear deletes them"
    say(arguments, facts, [said])
    return 0
