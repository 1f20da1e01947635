"""The command that makes a data set of an older format once more."""

import shlex
from pathlib import Path
from typing import Any

_ASIDE = {"split": [0.8, 0.1, 0.1], "min_history": 0, "seed": 0}  # what needs no option


def renewal(info: Any, folder: Path) -> str:
    """`jagged prepare` with the source and the options that dataset.json tells of.

    It does not tell where the input lies.
    """
    source = info.get("source") if isinstance(info, dict) else None
    if not isinstance(source, str) or "sampled" in info:
        return f"jagged prepare SOURCE --from ... --out {shlex.quote(str(folder))} --force"
    words = ["jagged", "prepare", shlex.quote(source)]
    if info.get("inputs"):
        words += ["--from", "..."]
    options = info.get("options")
    for name, value in options.items() if isinstance(options, dict) else ():
        if value not in (None, False) and value != _ASIDE.get(name):
            words += [shlex.quote(word) for word in _option(name, value)]
    return " ".join([*words, "--out", shlex.quote(str(folder)), "--force"])


def _option(name: str, value: Any) -> list[str]:
    """An option as `jagged prepare` takes it."""
    flag = f"--{name.removesuffix('s') if name in _REPEATED else name}".replace("_", "-")
    if name in _REPEATED:
        each = (
            [f"{ours}={theirs}" for ours, theirs in value.items()]
            if isinstance(value, dict)
            else value
        )
        return [word for one in each for word in (flag, str(one))]
    if value is True:
        return [flag]
    return [flag, *map(str, value)] if isinstance(value, list) else [flag, str(value)]


_REPEATED = ("columns", "signals")
