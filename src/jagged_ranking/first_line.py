"""What went wrong, in one line."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """What an error says first, or its type where it says nothing."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)


def described(error: BaseException) -> str:
    """ "Type: first line", of an error that may be of any kind; the type alone where it says
    nothing."""
    name, line = type(error).__name__, first_line(error)
    return name if line == name else f"{name}: {line}"
