"""Files and folders that one process holds while it works on them, and what killed ones left."""

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def hold(path: Path) -> int | None:
    """Hold a file or folder until `os.close` of what this returns, or until this process is gone.

    None where another process holds it. The lock is on the path itself and leaves no file.

    Raises:
        OSError: no such path, or a file system without locks (some over a network).
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return handle


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a file or folder for the time of the block, where that is possible."""
    handle = None
    with suppress(OSError):
        handle = hold(path)
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def unfinished(path: Path, ending: str) -> Path:
    """Where this process makes what will be `path`, or keeps what was."""
    return path.with_name(f".{path.name}.{os.getpid()}.{ending}")


def abandoned(folder: Path, name: str, ending: str) -> Iterator[Path]:
    """What `unfinished` named for `name` in a folder, by processes that are gone.

    Each is held while the caller has it.
    """
    pattern = re.compile(rf"\.{re.escape(name)}\.\d+\.{ending}")
    found = []
    with suppress(OSError):
        found = [path for path in folder.iterdir() if pattern.fullmatch(path.name)]
    for path in found:
        with suppress(OSError):  # another user's, or gone by now
            if (handle := hold(path)) is not None:
                try:
                    yield path
                finally:
                    os.close(handle)


def delete(path: Path) -> None:
    """Delete a file or a folder with all that is in it, as far as that is allowed."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
