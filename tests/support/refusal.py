"""What every refusal of `jagged prepare` has in common."""

from collections.abc import Callable
from pathlib import Path

Command = Callable[..., tuple[int, str, str]]


def refused(command: Command, folder: Path, *arguments: object) -> str:
    """Run the command into folder/made/out; returns the error line after checking the rest."""
    before = sorted(folder.rglob("*"))
    code, out, err = command(*arguments, "--out", folder / "made" / "out")
    assert (code, out) == (1, "")
    assert err.startswith("jagged: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert sorted(folder.rglob("*")) == before
    return err.rstrip("\n")
