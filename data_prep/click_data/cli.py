"""`jagged prepare` and `jagged datasets`."""

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from click_data import public
from click_data.columns import UNITS
from click_data.errors import DataError
from click_data.preparation import prepare
from click_data.schema import read_info
from click_data.sources import SOURCES

_SEPARATORS = {",": "comma", "\t": "tab", ";": "semicolon", "|": "bar", " ": "space"}
_SHOWN = 20  # columns not read that a line lists
_EXAMPLES = """examples:
  jagged prepare synthetic --out data/synthetic
  jagged prepare synthetic --users 500 --items 200 --events 20000 --seed 1 --out data/small
  jagged prepare movielens --from ml-latest-small.zip --out data/ml_latest_small
  jagged prepare movielens --from ml-1m --threshold 5 --min-history 5 --out data/ml_1m
  jagged prepare log --from clicks.parquet --out data/mine
  jagged prepare log --from clicks.csv --column user_id=uid --column timestamp=time_ms \\
      --time-unit ms --signal price --out data/mine
  jagged prepare log --from likes.txt --separator tab --negatives 4 --sort \\
      --drop-duplicates --drop-bad-rows --out data/likes
"""

_COMMON = ("from_path", "seed", "split", "min_history", "name", "force")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `jagged prepare`. Options not given are left to `prepare`."""
    # What is not given is absent, so that each source meets only what was meant for it.
    parser.argument_default = argparse.SUPPRESS
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    parser.usage = "%(prog)s SOURCE [--from PATH] --out DIR [options]"  # one line above an error
    add = parser.add_argument
    add("source", metavar="SOURCE", help=f"one of: {', '.join(SOURCES)}")
    add("--from", dest="from_path", type=Path, metavar="PATH", help="a file, folder or zip")
    add("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    add(
        "--split",
        type=float,
        nargs=3,
        metavar=("TRAIN", "VALID", "TEST"),
        help="shares of all events, in time order (default: 0.8 0.1 0.1)",
    )
    add(
        "--min-history",
        type=int,
        metavar="N",
        help="leave out samples with fewer strictly earlier events (default: 0)",
    )
    add("--seed", type=int, metavar="N", help="of what is drawn at random (default: 0)")
    add("--name", help="what to call the data set (default: the source's choice)")
    add("--force", action="store_true", help="replace another prepared data set in DIR")
    add(
        "--json",
        action="store_true",
        default=False,
        help="print what DIR/dataset.json says, and the folder, as one JSON document",
    )

    add = _group(parser, "movielens").add_argument
    add(
        "--threshold",
        type=float,
        metavar="STARS",
        help="the least rating that is a positive label (default: 4)",
    )

    add = _group(parser, "log").add_argument
    add(
        "--column",
        dest="columns",
        type=_column,
        action="append",
        metavar="NAME=YOURS",
        help="your name for user_id, item_id, timestamp, label or category; may be repeated",
    )
    add(
        "--signal",
        dest="signals",
        action="append",
        metavar="COLUMN",
        help="a further numeric column to carry in the histories; may be repeated",
    )
    add(
        "--time-unit",
        choices=tuple(UNITS),
        help="of numeric timestamps, counted since 1970 (default: s); text such as "
        "2024-03-31 02:30:00+02:00 needs none, and without a zone is UTC",
    )
    add(
        "--negatives",
        type=int,
        metavar="N",
        help="items drawn as label 0 for each positive event (default: 1 if the log has no "
        "labels); events of items not seen in training are then no samples",
    )
    add("--sort", action="store_true", help="accept times that go backwards within a user")
    add("--drop-duplicates", action="store_true", help="keep the first of repeated events")
    add(
        "--drop-bad-rows",
        action="store_true",
        help="leave out rows that cannot be read, and say how many and which came first",
    )
    add(
        "--separator",
        type=_separator,
        metavar="CHAR",
        help="between the fields of text: one character, or tab, comma, semicolon, bar, space "
        "(default: what gives the columns asked for)",
    )
    add(
        "--encoding",
        metavar="NAME",
        help="of text, as Python calls it, such as cp1252, latin-1 or utf-16-le (default: "
        "UTF-8, or what a byte order mark says)",
    )

    add = _group(parser, "synthetic").add_argument
    for size in SOURCES["synthetic"].option_names:
        add(f"--{size}", type=int, metavar="N", help=f"number of {size}")


def _group(parser: argparse.ArgumentParser, name: str) -> argparse._ArgumentGroup:
    source = SOURCES[name]
    text = f"{source.summary}.\nFrom: {source.origin}."
    return parser.add_argument_group(f"only with source {name}", text)


def run(args: argparse.Namespace) -> int:
    """Run `jagged prepare`: 0, or `DataError` about input that cannot be used."""
    given = dict(vars(args))
    known = {name for source in SOURCES.values() for name in source.option_names} | {*_COMMON}
    options = {name: value for name, value in given.items() if name in known}
    if "columns" in options:
        options["columns"] = _by_name(options["columns"])
    if "signals" in options:
        options["signals"] = tuple(options["signals"])
    folder = prepare(args.source, out=args.out, **options)
    info = read_info(folder)
    if args.json:
        print(json.dumps({"folder": str(folder), **info}, indent=2))
    else:
        print(summary(info, folder))
    return 0


def summary(info: dict[str, Any], folder: Path) -> str:
    """A few lines that say what a prepared data set holds."""
    counts, lengths = info["counts"], info["history_length"]
    samples = ", ".join(
        f"{name} {number:,} ({counts['positives'][name] / number:.1%} positive)"
        for name, number in counts["samples"].items()
    )
    left_out = ", ".join(
        f"{name} {share:.1%}" for name, share in info.get("unknown_left_out", {}).items()
    )
    return "\n".join(
        (
            f"{info['name']} -> {folder}",
            f"  {counts['users']:,} users, {counts['items']:,} items, "
            f"{counts['categories']:,} categories, {counts['events']:,} events",
            *_read(info.get("read"), info["signals"]),
            *_dropped(info.get("dropped", {})),
            f"  samples: {samples}",
            *(
                [f"  left out of the samples, items not seen in training: {left_out} of the events"]
                if left_out
                else []
            ),
            f"  split by time: {_when(info)}",
            *_given_up(info),
            f"  history: mean {lengths['mean']:.0f}, median {lengths['p50']:.0f}, "
            f"longest {lengths['max']:,} events; "
            f"padding waste {info['padding_waste']:.1%} in batches of 256",
        )
    )


def _read(read: dict[str, Any] | None, signals: list[str]) -> list[str]:
    """A line that says which columns were taken for what."""
    if read is None:
        return []
    columns = [o if o == t else f"{o} from {t}" for o, t in read["columns"].items()]
    parts = [", ".join(columns)]
    if signals:
        parts.append(f"signals {', '.join(signals)}")
    if "separator" in read:
        separator = read["separator"]
        parts.append(f"separated by {_SEPARATORS.get(separator, separator)}")
    if "encoding" in read:
        parts.append(f"encoded in {read['encoding']}")
    if read["unread"]:
        some = ", ".join(read["unread"][:_SHOWN]) + ", ..." * (len(read["unread"]) > _SHOWN)
        parts.append(f"not read: {some}")
    return [f"  columns: {'; '.join(parts)}"]


def _dropped(dropped: dict[str, Any]) -> list[str]:
    """Lines that say how many rows were left out, and why."""
    lines = []
    if "bad_rows" in dropped:
        number, rows = dropped["bad_rows"], dropped["rows"]
        first = dropped["first_bad_rows"]
        which = f"; the first {len(first)}:" if number > len(first) else ":" if number else ""
        share = f"{number / rows:.1%}"
        lines.append(f"  dropped, bad rows: {number:,} of {rows:,} rows ({share}){which}")
        lines += [f"    {line}" for line in first]
    if "duplicates" in dropped:
        number, rows = dropped["duplicates"], dropped["rows"]
        lines.append(
            f"  dropped, the same user, item and time as an earlier row: {number:,} of {rows:,} "
            f"rows ({number / rows:.1%})"
        )
    return lines


def _when(info: dict[str, Any]) -> str:
    """When validation and test begin: dates show whether times were read as they were meant."""
    unit = UNITS[info["time_unit"]]
    starts = {
        name: datetime.fromtimestamp(t / unit, UTC) for name, t in info["split_times"].items()
    }
    return ", ".join(f"{name} from {start:%Y-%m-%d %H:%M}" for name, start in starts.items())


def _given_up(info: dict[str, Any]) -> list[str]:
    number = info.get("negatives_given_up", 0)
    why = "their users touch (nearly) every item"
    return [f"  negatives that could not be drawn, since {why}: {number:,}"] if number else []


def list_datasets(folder: Path | None) -> str:
    """What `jagged datasets` prints: sources, public sets, and which of these are in `folder`.

    folder: of downloaded sets; None where nobody knows of one.
    """
    lines = ["Sources: jagged prepare SOURCE [--from PATH] --out DIR", ""]
    for source in SOURCES.values():
        lines += [
            f"  {source.name}",
            f"      {source.summary}",
            f"      from: {source.origin}",
            f"      licence: {source.licence}",
        ]
    lines += ["", f"Public sets for source movielens, from {public.MOVIELENS_ORIGIN}", ""]
    for known in public.MOVIELENS:
        place = public.find(known, folder) if folder else None
        lines.append(f"  {known.name:<16} {known.size:<32} {known.licence}")
        if place:
            lines.append(f"  {'':<16} here: {place}")
    looked = "None looked for"
    if folder:
        looked = f"Looked in {folder}" if folder.is_dir() else f"There is no folder {folder}"
    lines += ["", f"{looked}; CLICK_DATA_DIR names the folder of downloaded sets."]
    return "\n".join(lines)


def _by_name(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """The file's column for each of ours; one of ours given twice would lose the first."""
    for name, _ in pairs:
        if sum(name == other for other, _ in pairs) > 1:
            raise DataError(f"--column {name}=...: given twice")
    return dict(pairs)


def _separator(text: str) -> str:
    named = {name: separator for separator, name in _SEPARATORS.items()}
    return named.get(text, "\t" if text == "\\t" else text)


def _column(text: str) -> tuple[str, str]:
    ours, _, theirs = text.partition("=")
    if not ours or not theirs:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=YOURS, as in user_id=uid")
    return ours, theirs
