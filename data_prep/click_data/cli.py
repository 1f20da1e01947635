"""`jagged prepare` and `jagged datasets`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from click_data.errors import DataError
from click_data.prepare import prepare
from click_data.schema import read_info
from click_data.sources import SOURCES

_COMMON = ("from_path", "seed", "split", "min_history", "name", "force")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jagged prepare`. Options not given are left to `prepare`."""
    given = argparse.SUPPRESS
    parser.add_argument("source", metavar="SOURCE", help=f"one of: {', '.join(SOURCES)}")
    parser.add_argument("--from", dest="from_path", type=Path, default=given, metavar="PATH",
                        help="input of the source: a file, folder or zip")  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--split", type=float, nargs=3, default=given,
                        metavar=("TRAIN", "VALID", "TEST"),
                        help="shares of all events, in time order (default: 0.8 0.1 0.1)")  # fmt: skip
    parser.add_argument("--min-history", type=int, default=given, metavar="N",
                        help="leave out samples with fewer earlier events (default: 0)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=given, help="of what is drawn (default: 0)")
    parser.add_argument("--name", default=given, help="what to call the data set")
    parser.add_argument("--force", action="store_true", default=given,
                        help="replace another prepared data set in DIR")  # fmt: skip
    movielens = parser.add_argument_group("movielens")
    movielens.add_argument("--threshold", type=float, default=given, metavar="STARS",
                           help="the least rating that is a positive label (default: 4)")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Run `jagged prepare`: 0, or 1 after one line on stderr about input that cannot be used."""
    try:
        sources = {name for source in SOURCES.values() for name in source.option_names}
        given = {name: value for name, value in vars(args).items() if name in sources}
        common = {name: value for name, value in vars(args).items() if name in _COMMON}
        folder = prepare(args.source, out=args.out, **common, **given)
        print(summary(read_info(folder), folder))
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def summary(info: dict[str, Any], folder: Path) -> str:
    """A few lines that say what a prepared data set holds."""
    counts, lengths = info["counts"], info["history_length"]
    samples = ", ".join(
        f"{name} {number:,} ({counts['positives'][name] / number:.1%} positive)"
        for name, number in counts["samples"].items()
    )
    return "\n".join(
        (
            f"{info['name']} -> {folder}",
            f"  {counts['users']:,} users, {counts['items']:,} items, "
            f"{counts['categories']:,} categories, {counts['events']:,} events",
            f"  samples: {samples}",
            f"  history: mean {lengths['mean']:.0f}, median {lengths['p50']:.0f}, "
            f"longest {lengths['max']:,} events; "
            f"padding waste {info['padding_waste']:.1%} in batches of 256",
        )
    )


def list_datasets() -> str:
    """What `jagged datasets` prints."""
    return "\n".join(f"{source.name}: {source.summary}" for source in SOURCES.values())
