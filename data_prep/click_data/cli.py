"""`jagged prepare` and `jagged datasets`."""

import argparse
import json
from pathlib import Path

from click_data import public
from click_data.errors import DataError
from click_data.negatives import POOL
from click_data.preparation import prepare
from click_data.schema import read_info
from click_data.sources import SOURCES
from click_data.summary import SEPARATORS, summary
from click_data.time_units import UNITS

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
  jagged prepare impressions --from trivago --context device --feature price --feature position \\
      --signal action --out data/trivago
  jagged prepare impressions --from mind_small_5k --split-column split_user --out data/mind_5k
  jagged prepare impressions --from ebnerd_sample --context device_type --append-clicks \\
      --out data/ebnerd_sample
  jagged prepare sequences --from lastfm --out data/lastfm
  jagged prepare mind --from MINDsmall --out data/mind
  jagged prepare ebnerd --from ebnerd_small --append-clicks --out data/ebnerd
  jagged prepare reczoo --from AmazonElectronics_x1 --out data/amazon
  jagged prepare yambda --from flat/50m --out data/yambda
  jagged prepare kuairand --from KuaiRand-1K --out data/kuairand
"""

_SEVERAL = ("signals", "contexts", "features")  # options that may be repeated
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
        help="shares of all events (or requests), in time order (default: 0.8 0.1 0.1)",
    )
    add(
        "--min-history",
        type=int,
        metavar="N",
        help="leave out requests that may see fewer events (default: 0)",
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
        help="the least rating that is a positive label (default: 4); with yambda the least share "
        "of a track, in percent (default: 50)",
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
        help="a further numeric column to carry in the histories (of impressions also a "
        "categorical one); may be repeated",
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
        help="items drawn as label 0 for each positive event, out of what other users did at "
        "that time (default: 1 if the log has no labels)",
    )
    add(
        "--pool",
        type=int,
        metavar="N",
        help=f"how many events, at least, are of that time (default: {POOL:,})",
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

    add = _group(parser, "impressions", also=("signal", "time-unit")).add_argument
    add(
        "--context",
        dest="contexts",
        action="append",
        metavar="COLUMN",
        help="a column that describes a request; may be repeated",
    )
    add(
        "--feature",
        dest="features",
        action="append",
        metavar="COLUMN",
        help="a numeric column that describes a candidate; may be repeated",
    )
    add(
        "--split-column",
        metavar="COLUMN",
        help="of the official split, train, valid or test (default: split, if there is one; '' "
        "splits by time)",
    )
    add(
        "--append-clicks",
        action="store_true",
        help="make clicks of earlier lists part of the histories",
    )

    add = _group(parser, "sequences").add_argument
    add(
        "--holdout",
        type=int,
        metavar="N",
        help="ask about the last N items of each user in the test requests and the N before in the "
        "valid ones, without given negatives (default: 1, with those of test.parquet)",
    )

    add = _group(parser, "mind").add_argument
    add(
        "--by-time",
        action="store_true",
        help="split all requests by time, not into the folders of the set",
    )
    _group(parser, "ebnerd", also=("by-time", "context", "append-clicks"))
    _group(parser, "reczoo")
    _group(parser, "yambda", also=("threshold",))
    _group(parser, "kuairand")

    add = _group(parser, "synthetic").add_argument
    for name in SOURCES["synthetic"].option_names:
        meaning = f"number of {name}"
        if name == "gap":
            meaning = (
                "events that pass before a user returns to a category, so that only what lies "
                "farther back tells a taste (default: 0, which plants no such gap)"
            )
        add(f"--{name}", type=int, metavar="N", help=meaning)


def _group(
    parser: argparse.ArgumentParser, name: str, *, also: tuple[str, ...] = ()
) -> argparse._ArgumentGroup:
    """A source's group of options; also: those of other groups that it takes."""
    source = SOURCES[name]
    text = f"{source.summary}.\nFrom: {source.origin}."
    if also:
        text += f"\nTakes {', '.join(f'--{option}' for option in also)}, too."
    return parser.add_argument_group(f"only with source {name}", text)


def run(args: argparse.Namespace) -> int:
    """Run `jagged prepare`: 0, or `DataError` about input that cannot be used."""
    given = dict(vars(args))
    known = {name for source in SOURCES.values() for name in source.option_names} | {*_COMMON}
    options = {name: value for name, value in given.items() if name in known}
    if "columns" in options:
        options["columns"] = _by_name(options["columns"])
    options |= {name: tuple(options[name]) for name in _SEVERAL if name in options}
    folder = prepare(args.source, out=args.out, **options)
    info = read_info(folder)
    if args.json:
        print(json.dumps({"folder": str(folder), **info}, indent=2))
    else:
        print(summary(info, folder))
    return 0


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
    named = {name: separator for separator, name in SEPARATORS.items()}
    return named.get(text, "\t" if text == "\\t" else text)


def _column(text: str) -> tuple[str, str]:
    ours, _, theirs = text.partition("=")
    if not ours or not theirs:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=YOURS, as in user_id=uid")
    return ours, theirs
