"""--verbose: tracebacks, and what the processes print that a command starts.

Said by a variable of the environment, which those processes inherit.
"""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "JAGGED_TRACEBACK"


def is_verbose() -> bool:
    """Whether --verbose was given, here or to the process that started this one."""
    return bool(os.environ.get(VARIABLE))


def ask() -> None:
    """Be verbose from here on, until the end of `kept`."""
    os.environ[VARIABLE] = "1"


@contextmanager
def kept() -> Iterator[None]:
    """Whatever is asked for in the block ends with it."""
    before = os.environ.get(VARIABLE)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)


def print_traceback(error: BaseException) -> None:
    """The traceback of an error on stderr, where that is wanted."""
    if is_verbose():
        traceback.print_exception(error, file=sys.stderr)
