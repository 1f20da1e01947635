"""What a command found out, as lines for people or, with --json, as one document for programs."""

import argparse
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any


def add_json(parser: argparse.ArgumentParser, keys: Mapping[str, str], *, when: str = "") -> None:
    """Give a command `--json`, and its help the keys of the document.

    Args:
        keys: of the document, with what each holds.
        when: what has to be asked for besides.
    """
    parser.add_argument(
        "--json", action="store_true", help=f"print one JSON document and nothing else{when}"
    )
    wide = max(map(len, keys))
    lines = [f"  {key:<{wide}}  {meaning}" for key, meaning in keys.items()]
    parser.epilog = "\n".join(["keys of the JSON document:", *lines])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def say(arguments: argparse.Namespace, facts: Mapping[str, Any], lines: Iterable[str]) -> None:
    """Print the facts where --json was given, else the lines that were made of them."""
    if arguments.json:
        print(document(facts, indent=2), flush=True)
        return
    for line in lines:
        print(line, flush=True)


def document(facts: Any, *, indent: int, sort_keys: bool = False) -> str:
    """The facts as JSON, which has no NaN and no infinity: numbers that are undefined are null."""
    return json.dumps(_defined(facts), indent=indent, sort_keys=sort_keys, allow_nan=False)


def _defined(facts: Any) -> Any:
    match facts:
        case float():
            return facts if math.isfinite(facts) else None
        case dict():
            return {name: _defined(value) for name, value in facts.items()}
        case list() | tuple():
            return [_defined(value) for value in facts]
    return facts
