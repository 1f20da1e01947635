"""`make constraints`: what is installed becomes the pins.

    python tests/support/new_pins.py constraints.txt FROZEN

FROZEN is what `pip freeze` said. A pin of what is not installed stays as it is: the extras slurm,
tensorboard and torchrec are pinned, too, and no environment that `make setup` makes holds them.
"""

import sys
from pathlib import Path


def named(pins: list[str]) -> dict[str, str]:
    """Name -> its line, whatever way the name is written."""
    return {pin.partition("==")[0].lower().replace("_", "-"): pin for pin in pins}


def merged(old: str, frozen: str) -> str:
    """The first line of `old`, a comment, and below it one pin a name, by name.

    Raises:
        ValueError: a line of `frozen` that is no version, such as an address.
    """
    comment, *kept = old.splitlines()
    # A CPU build of torch is pinned as torch: who installs takes the build that is offered.
    found = [pin.removesuffix("+cpu") for pin in frozen.splitlines()]
    if odd := [pin for pin in found if "==" not in pin]:
        raise ValueError(f"no version in {odd[0]!r}")
    pins = named(kept) | named(found)
    return "\n".join([comment, *(pins[name] for name in sorted(pins))]) + "\n"


if __name__ == "__main__":
    constraints, frozen = map(Path, sys.argv[1:])
    try:
        text = merged(constraints.read_text("utf-8"), frozen.read_text("utf-8"))
    except ValueError as error:
        sys.exit(f"{frozen}: {error}")
    constraints.write_text(text, encoding="utf-8")
